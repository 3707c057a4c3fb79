# one step by hand: the parts agree with the package, the loss is 0 and its gradient is not
assert recorded < 1e-4
assert abs(loss.item()) < 1e-6
assert grad_norm > 0.01
assert (change[1::2] > 0).all() and (change[[0, 4]] < 0).all() and int((change > 0).sum()) == 6
assert (advantages * change).sum() > 0

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

# a habit: among eight samples nearly every problem had a right answer before
assert pass_8["before"] > 0.85 and pass_8["after"] > 0.9

# halfway: wrong greedily, right among the samples; and the stored study says what the text says
assert 0.2 < greedy.accuracy < 0.4 and 0.15 < solvable < 0.5 and better
assert skill["grpo"]["greedy_gain"]["low"] > 0.15 and skill["shuffled"]["greedy_gain"]["high"] < 0.05
assert skill["grpo"]["over seeds and puzzles"]["greedy"]["low"] > 0.2
assert passes["largest kind"] == 6 and all(point["low"] > 0 for point in passes["change"].values())
assert (
    passes["change without the largest kind"]["64"]["low"] < 0 < passes["change without the largest kind"]["64"]["high"]
)
assert all(mean_curve(coins["after"])[place] < coins["before"][str(k)] for place, k in enumerate(ks)), "behind"
assert coins["right"]["before"] > passes["by kind"][6]["right"]["before"], "coins were rewarded at least as often"
assert min(passes["lost"]) == 6 and max(passes["lost"]) == 7 and passes["by kind"][7]["change"]["64"]["high"] < 0
assert max(half["lost"]) < half["second draw"] < min(half["gained"]), "real gains; the losses show nothing"
shares = [known / new for new, known in zip(passes["newly solved"], passes["of these known"], strict=True)]
assert 0.695 < min(shares) and max(shares) <= 0.8
