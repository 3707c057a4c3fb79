assert judged.keys() == CLAIMS.keys(), "every claim has a verdict"
assert len(right_texts) > 50 and abs(score - spoiled) < 0.01
assert largest_error < 1e-9
for run in study["runs"]:
    smallest, largest = mcnemar_range(run["accuracy_before"]["k"], run["accuracy_after"]["k"], 300)
    assert smallest * 0.999 <= run["p_value"] <= min(0.001, largest * 1.001)
    for name in ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after"):
        assert run[name]["k"] == sum(level["k"] for level in run[name]["per_level"].values())
