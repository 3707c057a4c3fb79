from safetensors.torch import save

from grpo_edu.quantization.model import stored_tensors

assert 0.45 < worst <= 0.5 + 1e-4, "rounding moves a number by at most half a step"
assert 10 < errors["per tensor"][2] / errors["per tensor"][6] < 25, "four bits fewer, an error about 16 times as large"
assert spread["per tensor"] > 10 * spread["per row"]
assert torch.allclose(mine, DynamicInt8Linear(layer)(x), atol=1e-5)
assert relative_error(x @ W.T, mine) < 0.02
assert together > 5 * apart, "an outlier feature harms the other features of its token"
finer = relative_error(W, quantize(W, bits=4, dim=0).dequantize())
assert finer < 0.9 * relative_error(W, quantize(W, bits=4).dequantize())

for scheme, small in copies.items():
    content = save(stored_tensors(small))
    header = 8 + int.from_bytes(content[:8], "little")
    assert len(content) - header == stored_bytes(small), f"{scheme}: what is counted is what the file holds"

control = {(line["bits"], line["scale"]): line["change"] for line in lines}
assert all(control[8, scale]["low"] > -0.03 for scale in layouts), "8 bits cost nothing"
assert all(control[b, scale]["high"] < 0 for b in (4, 3, 2) for scale in layouts), "fewer bits do"
assert all(-0.03 <= change["low"] and change["high"] <= 0.03 for change in sampled)
assert int4.k > 0.95 * int4.n, "int4-group loses little"
same_seed = grpo_edu.evaluate(copies["int8-dynamic"], tokenizer, heldout, seed=0).correct
assert sum(a != b for a, b in zip(float32, same_seed, strict=True)) < 20

times = {rows: {name: found["float32"] / ms for name, ms in found.items()} for rows, found in milliseconds.items()}
assert round(times["rows: 1"]["int8-dynamic"], 1) == 3.1 and round(times["rows: 8"]["int8-dynamic"], 1) == 3.9
assert round(times["rows: 8"]["int8-dynamic"] / times["rows: 8"]["packed float32"], 1) == 1.8
assert 1.25 < speed["rollout"]["float32"]["median"] / whole < 1.4, "a rollout gains a third"
assert changed < 0.1, "one update moves few integers"
assert torch.allclose(w, package_w) and torch.allclose(my_loss, loss)
assert abs(drawn * w_first * w_second * direction - exact) < 1e-9 < abs(drawn * w_first * direction - exact)
assert all(abs(found["sampled"]["difference"]) < 0.005 for found in runs["against_float32"].values())
