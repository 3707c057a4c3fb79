"""What notebook 02 says and what must hold for its numbers on every computer."""

# extracting: the functions that go by position misread right solutions, the marked answer is always read
assert right_of_six == 4
assert 0 < extraction["misread"]["last_number"] < extraction["misread"]["last_digits"]
assert extraction["misread"]["extract_answer"] == 0
assert different == 0
assert sum(careless) > sum(honest) > 0
assert all("####" not in text for text, a, b in zip(samples, honest, careless, strict=True) if b > a)

# a reward that never sees the answer
assert paid_for_looks["wrong, with work"] > paid_for_looks["right, with work"] > paid_for_looks["right, bare"]
assert max(paid_for_looks, key=paid_for_looks.get) == "gibberish"
assert noticed <= 0.1 * len(right) and still_paid == 0 and len(right) > 5


# the run with equal weights is hacked, the one with small weights is not
def rise(history, key):
    values = [metrics[key] for metrics in history]
    return sum(values[-5:]) / 5 - sum(values[:5]) / 5


assert rise(equal_history, "reward") > 0.05
assert rise(equal_history, "rewards/accuracy_reward/mean") < -0.10
assert rise(equal_history, "completions/mean_length") < -4
assert change.difference < -0.08 and change.p_value < 0.001
assert gain.difference > 0.10 and gain.p_value < 0.001
for values, direct_pays_more in (([1.0, 1.0, 1.0], True), ([1.0, 0.9, 0.9], True), ([1.0, 0.1, 0.1], False)):
    rewards = grpo_edu.combine_rewards(parts, values)
    assert (rewards[~worked].mean() > rewards[worked].mean()).item() is direct_pays_more

# five seeds: every run is paid more
assert len(hacking["runs"]) == 10
for run in hacking["runs"]:
    assert run["reward_change"]["low"] > 0
    assert (run["accuracy_change"]["difference"] > 0) is (run["condition"] == "small weights")

# the exploits
assert "guess without working" == fooled(REWARDS, [1.0, 1.0, 1.0])[0]
assert not fooled(REWARDS, [1.0, 0.1, 0.1]) and not fooled([accuracy_reward, brief_if_right], [1.0, 0.2])
assert len(fooled(signs)) > 2 and all(verdict.holds for verdict in judge_reward(accuracy_reward))
assert passing == [0.5, 0.9]
