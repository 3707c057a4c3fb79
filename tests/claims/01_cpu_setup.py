"""What notebook 01 says and what must hold for its numbers on every computer."""

# scoring and the update are thin slices of a step
assert set(seconds) == {"sample", "score", "forward", "backward", "update"}
assert seconds["score"] + seconds["update"] < 0.25 * sum(seconds.values())
assert imports > startup["model"]

# 4 + 4 + 8 bytes per weight
assert held["gradients"] == held["weights"] == 4 * model.num_parameters()
assert held["optimizer"] == 2 * held["weights"]

# the small products gain nothing from a second thread; another program may slow one of the two down to a half
assert one / two < 3
before, after = in_a_new_process(late).partition("≈")[2].split(" and ")
assert before.strip() == after.strip()
assert in_a_new_process(early, OMP_NUM_THREADS="1") == "threads: 1"

# every setting of section 4 was measured; how far the speed falls depends on the computer
assert set(measured) == set(settings) and all(share > 0 for share in measured.values())

assert total.item() == 256
assert (torch.tensor(0.5, dtype=torch.bfloat16) - 1e-4).item() == 0.5
assert whole.tolist() == [50, -127, 3, 26]
