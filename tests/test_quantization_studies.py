"""What the quantization studies conclude, on made-up counts; and that their measurements measure what they say."""

import json

import pytest
import torch
from random_policy import byte_tokenizer, random_model

from benchmarks import quantization_kernels, quantization_speed, quantization_study, quantized_rollouts
from grpo_edu.quantization import QUANTIZATION_SCHEMES, quantize_model


def line(model, scheme, right, n=1200):
    """A measurement in which the first `right` problems of each domain are solved."""
    sizes = {name: sum(sets.values()) for name, sets in quantization_study.DOMAINS.items()}
    bits = {
        name: "1" * round(size * right / n) + "0" * (size - round(size * right / n)) for name, size in sizes.items()
    }
    found = {"model": model, "scheme": scheme, "correct": {"sampled": bits}, "bytes": 10,
             "ms": {"1": {"median": 1.0}, "8": {"median": 2.0}}}  # fmt: skip
    if scheme != "float32":
        found |= {"bytes_in_file": 10, "mismatch": {"mean": 0.01, "largest": 0.1, "kl": 1e-4}}
    return found


def test_the_study_has_what_was_promised():
    assert len(quantization_study.MODELS) >= 5 and len(quantization_study.DOMAINS) >= 3
    assert sum(sum(sets.values()) for sets in quantization_study.DOMAINS.values()) >= 1000
    assert quantization_study.SCHEMES == ("float32", *QUANTIZATION_SCHEMES)


def test_a_scheme_that_loses_ten_points_is_not_within_three():
    lines = [line("a", scheme, 480 if scheme == "int4-group" else 600) for scheme in quantization_study.SCHEMES]
    changes = quantization_study.differences(lines)
    int4 = [c for c in changes if c["scheme"] == "int4-group" and c["domain"] == "all"]
    assert [c["difference"] for c in int4] == pytest.approx([-0.1])
    assert all(c["low"] < -0.1 < c["high"] < 0 for c in int4)
    domains = [c for c in changes if c["scheme"] == "int4-group" and c["domain"] != "all"]
    assert sorted({c["n"] for c in domains}) == [300, 600]
    judged = quantization_study.verdicts(lines, changes)
    assert [holds for name, holds in judged.items() if name.startswith("int4")] == [False]
    assert all(holds for name, holds in judged.items() if not name.startswith("int4"))
    lines[1]["bytes_in_file"] = 11
    assert quantization_study.verdicts(lines, changes)["sizes equal the bytes on disk"] is False
    page = quantization_study.report(lines, changes, judged)
    assert "40.0%" in page and "-10.0" in page and "**does not hold**: int4-group" in page


def rollout_run(condition, seed, sampled, mismatch):
    bits = "1" * sampled + "0" * (300 - sampled)
    curves = {} if condition == "float32" else {quantized_rollouts.MISMATCH: [mismatch, mismatch / 2]}
    return {"condition": condition, "seed": seed, "seconds": 1.0, "n": 300, "sampled": sampled, "greedy": sampled,
            "sampled_correct": bits, "greedy_correct": bits, "curves": curves}  # fmt: skip


@pytest.mark.parametrize(("int8", "holds"), [(270, True), (255, False)])
def test_corrected_rollouts_must_reach_the_interval_of_float32(int8, holds):
    runs = []
    for seed in range(5):
        for condition in quantized_rollouts.CONDITIONS:
            solved = {"float32": 270, "int8, corrected": int8}.get(condition, 269)
            runs.append(rollout_run(condition, seed, solved, 0.02))
    found = quantized_rollouts.summaries(runs)
    assert found["int8, corrected"]["sampled"]["difference"] == pytest.approx((int8 - 270) / 300)
    assert found["int8, uncorrected"]["sampled"]["difference"] == pytest.approx(-1 / 300)
    assert (found["int8, corrected"]["mismatch_first"], found["int8, corrected"]["mismatch_last"]) == (0.02, 0.01)
    judged = quantized_rollouts.verdicts(runs, found)
    assert {name: value for name, value in judged.items() if name.startswith("int8, corrected: reaches")} == {
        "int8, corrected: reaches the 95% interval of its seed's float32 run, on every seed": holds
    }
    assert all(value for name, value in judged.items() if not name.startswith("int8, corrected"))


def test_a_study_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    output, ran = tmp_path / "runs.json", []

    def run_one(condition, seed):
        ran.append((condition, seed))
        return rollout_run(condition, seed, 270, 0.02)

    monkeypatch.setattr(quantized_rollouts, "run_one", run_one)
    for conditions in (["float32"], list(quantized_rollouts.CONDITIONS)):
        monkeypatch.setattr(
            "sys.argv", ["x", "--output", str(output), "--seeds", "0", "1", "--conditions", *conditions]
        )
        assert quantized_rollouts.main() == 0
    assert len(ran) == len(set(ran)) == 6
    assert "not finished" in capsys.readouterr().out
    assert len(json.loads(output.read_text())["runs"]) == 6


def test_a_decode_step_leaves_the_cache_as_it_was():
    model = random_model(byte_tokenizer())
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, options: seen.append(
            (tuple(options["input_ids"].shape), options["past_key_values"].get_seq_length())
        ),
        with_kwargs=True,
    )
    step = quantization_speed.decode_step(model, 3, context=5)
    step()
    step()
    assert seen == [((3, 5), 0), ((3, 1), 5), ((3, 1), 5)]


def test_speed_promises_are_judged_on_medians():
    ms = {"float32": 100.0, "bf16": 50.0, "int8-dynamic": 20.0}
    decode = {rows: {name: {"ms": {"median": value}, "times as fast": {"median": 100 / value}}
                     for name, value in ms.items()} for rows in ("1", "8")}  # fmt: skip
    assert list(quantization_speed.verdicts(decode, "int8-dynamic").values()) == [True, True]
    assert list(quantization_speed.verdicts(decode, "bf16").values()) == [True, False]
    decode["1"]["int8-dynamic"]["times as fast"]["median"] = 3.9
    assert list(quantization_speed.verdicts(decode, "int8-dynamic").values()) == [False, True]


def test_sizes_and_mismatch_of_the_study():
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, sharpness=3.0, hidden_size=64, intermediate_size=96, stop_ids=range(0, 256, 16),
                         max_position_embeddings=512)  # fmt: skip
    small = quantize_model(model, "int8-dynamic")
    sizes = quantization_study.file_bytes(small, tokenizer)
    assert sizes["bytes"] == sizes["bytes_in_file"] > 0
    moved = quantization_study.mismatch(model, small, tokenizer)
    assert 0 < moved["mean"] < moved["largest"] and moved["kl"] > 0
    assert quantization_study.mismatch(model, model, tokenizer) == {"mean": 0.0, "largest": 0.0, "kl": 0.0}


def test_the_kernels_compared_agree_on_a_small_layer():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for make in (quantization_kernels.dynamic_int_mm, quantization_kernels.dequantizing):
        error = (make(weight)(x) - x @ weight.t()).norm() / (x @ weight.t()).norm()
        assert error < 0.03
    names = [name for name in quantization_kernels.WAYS if "of this package" in name]
    assert len(names) == 3 and set(quantization_kernels.WAYS) >= {"float32", "bfloat16"}
