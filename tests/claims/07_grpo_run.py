# one step by hand: the parts agree with the package, the loss is 0 and its gradient is not
assert difference < 1e-6 and recorded < 1e-4
assert abs(loss.item()) < 1e-6 and abs((loss - package_loss).item()) < 1e-6
assert grad_norm > 0.01
assert (change[1::2] > 0).all() and (change[[0, 4]] < 0).all() and int((change > 0).sum()) == 6
assert (advantages * change).sum() > 0
assert apart < 0.02 * moved, "two steps by hand are two steps of the package"

# the run
rewards_of_steps = [metrics["reward"] for metrics in history]
lengths = [metrics["completions/mean_length"] for metrics in history]
ties = [metrics["frac_reward_zero_std"] for metrics in history]
entropy = [metrics["entropy"] for metrics in history]
for rising in (rewards_of_steps, lengths, ties):
    assert sum(rising[-5:]) > sum(rising[:5])
assert sum(entropy[-5:]) < sum(entropy[:5])
assert sum(rewards_of_steps[-5:]) / 5 - sum(rewards_of_steps[:5]) / 5 > 0.2
assert all(0.9 < sum(frame) < 1.001 for frame in (frames[0], frames[-1]))
assert frames[-1][0] > frames[0][0] + 0.3 and frames[-1][1] < frames[0][1] and frames[-1][2] < frames[0][2]

# sampled accuracy rises, on each level and in total
assert 0.25 < before.accuracy < 0.70
assert result.difference >= 0.25 and result.low > 0.15 and result.p_value < 0.001
for level in LEVELS:
    rows = [i for i in range(300) if before.levels[i] == level]
    assert sum(after.correct[i] for i in rows) > sum(before.correct[i] for i in rows) + 20

# a habit: greedy answers were right before, and worked, marked answers too
assert before_greedy.accuracy > 0.97 and after_greedy.accuracy > 0.97
assert marked["after"][0] - marked["before"][0] > 75
assert all(right_ones > 0.95 * count for count, right_ones in marked.values())

# halfway: wrong greedily, right among the samples; and the stored study says what the text says
assert 0.2 < greedy.accuracy < 0.4 and 0.15 < solvable < 0.5 and better
assert skill["grpo"]["greedy_gain"]["low"] > 0.15 and skill["shuffled"]["greedy_gain"]["high"] < 0.05
assert all(point["change"]["low"] > 0.1 for point in skill["pass"].values())
assert skill["before"]["per_kind"][7] == 0.025 and skill["grpo"]["per_kind"][7] < 0.01, "the puzzles about coins"
