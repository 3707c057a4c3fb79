import numpy as np

# section 1: the new task is learned, and the known skills pay for it
assert before[0] >= 90 and before[1] <= 5
assert after_plain[1] >= 50 and after_plain[0] <= before[0] - 15

# by hand and by the package
assert abs(my_forgetting(matrix) - forgetting(matrix)) < 1e-9
assert torch.allclose(descend(2 * old_curvature), new_best / (1 + 2 * old_curvature), atol=1e-4)
assert torch.allclose(
    my_ewc_penalty(line, toy_fisher, toy_old, 10.0), ewc_penalty(line, toy_fisher, toy_old, ewc_lambda=10.0)
)
assert at_start == 0 and line.weight.grad.abs().max() == 0
assert (by_hand - formula).abs().max() < 1e-5 and (package - formula).abs().max() < 1e-5
assert difference_to_fisher < 1e-5

# two opposite gradients cancel before they are squared; the empirical kind is large where the model is wrong
assert found["batched-empirical"] < 1e-9 and all(abs(found[kind] - 0.25) < 1e-6 for kind in kinds[:3])

# the penalty acts: more is kept, and the model moves less where the old predictions would change
assert protected_history[0]["penalty"] == 0 and min(step["penalty"] for step in protected_history[2:]) > 0
assert after_ewc[0] >= after_plain[0] + 8 and after_ewc[1] >= 40
assert kl["EWC"][0] < kl["plain"][0] / 4 and kl["EWC"][1] < kl["plain"][1]

# the stored study: every protection has its strength, and the orders hold the same methods
assert set(study["strengths"]) <= {"lower rate", "l2", "kl", "replay"} | {name for name in protections if "ewc" in name}
for methods in study["orders"].values():
    for row in methods.values():
        tasks = [row[task]["value"] for task in ("known", "puzzles A", "puzzles B")]
        assert abs(np.mean(tasks) - row["average"]["value"]) < 1e-3
        assert row["forgotten"]["low"] <= row["forgotten"]["value"] <= row["forgotten"]["high"]

# what the text says of the study: nothing is left with A first, and the slower runs keep more and learn B as well
assert shown["A first"] == [] and len(shown["B first"]) == 3
slow, fast = study["slow selection"][0], study["selection"]["none"]
assert (slow["rate"], slow["steps"]) == (5e-4, 160) and slow["known"] > fast["known"] + 0.2
assert slow["puzzles B"] >= fast["puzzles B"] - 0.05
assert slow["average"] - fast["average"] > (study["selection"]["ewc sampled"]["average"] - fast["average"]) / 2
