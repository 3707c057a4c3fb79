# the setups of runs 1 to 3 on one batch: unpaid, though right; no chat template; cut off
_, _, (unpaid_batch,) = first_steps(CASES[0].broken)
assert unpaid_batch.rollout.completions == healthy.rollout.completions, "the same seed, the same texts"
assert unpaid_batch.rewards.sum() == 0 and healthy.rewards.sum() > 10
_, _, (cut_batch,) = first_steps(CASES[2].broken)
assert cut_batch.rollout.is_truncated.sum() > 64 / 3
assert sum(paid) / len(paid) > 0.25 and max(unpaid) == 0

# runs 4 to 6
assert advantage_of_ties(CASES[3].broken) == 0 == advantage_of_ties(HEALTHY)
assert advantage_of_ties(CASES[5].broken) > 0.1

# runs 7 to 9: signs and masks
assert right_signs(healthy) == 1
_, _, (mixed,) = first_steps(CASES[6].broken)
assert right_signs(mixed) < 0.9
assert surprise[:, 0].mean() > 5 * others, "the first token is the one that decides"

# runs 10 to 12
sizes = []
for setup in (CASES[9].broken, CASES[9].mended):
    model, _, (batch,) = first_steps(setup)
    sizes.append(moved(model, batch.rollout))
assert sizes[0] > 5 * sizes[1]
_, history, _ = first_steps(CASES[10].broken, 4)
assert history[0]["clip_ratio/region_mean"] == 0 < history[3]["clip_ratio/region_mean"]
assert kl_terms(CASES[11].mended) == [-term for term in kl_terms(CASES[11].broken)] and kl_terms(HEALTHY)[1] > 0.5
assert sum(lowered) < 0.2 * sum(reloaded)

# the stored study: what the text says about it
means = {arm: sum(shares(arm)) / 5 for case in CASES for arm in (case.name, mended_arm(case))}
names = [case.name for case in CASES]
assert max(means[names[number]] for number in (9, 11)) == 0
assert means["length truncation"] < start["low"]
for number in (0, 1, 3, 7):
    assert means[names[number]] < start["high"] + 0.05
for number in (4, 5, 6, 10):
    assert start["high"] < means[names[number]] < 0.85
assert 0.87 < means["EOS masked"] < means["healthy"]
for name in names:
    row = study["comparisons"][name]
    assert min(row["gains"]) > 0 and max(row["p_values"]) < 0.05

# the command on the stored metrics: nine named, silent on a healthy run and on three faults that no curve shows
assert {arm for arm, cause in first_causes.items() if cause == "(nothing found)"} == {
    *("healthy", "std float trap", "groups mixed", "EOS masked")
}
assert sum(arm == cause for arm, cause in first_causes.items()) == 9

# the check passes a healthy setup and each fixed one, and rings for each faulty one
assert all(check_up(HEALTHY).values())
for case in CASES:
    assert not all(check_up(case.broken).values()), case.name
    if case.mended is not HEALTHY:
        assert all(check_up(case.mended).values()), case.name
