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
over_64, over_1024 = passes["change"]["64"], passes["change"]["1024"]
assert over_64["low"] > 0 and over_1024["high"] < 0, "the curves cross"
assert round(100 * over_64["difference"]) == 10 and round(-100 * over_1024["difference"], 1) == 4.5
assert passes["largest kind"] == 6
assert all(mean_curve(coins["after"])[place] < coins["before"][str(k)] for place, k in enumerate(ks)), "behind"
assert coins["right"]["before"] > passes["by kind"][6]["right"]["before"], "coins were rewarded at least as often"
others = [kind for kind in passes["by kind"] if kind is not coins]
lead = [sum(mean_curve(kind["after"])[place] - kind["before"][str(k)] for kind in others) for place, k in enumerate(ks)]
assert min(lead[:-1]) > 0 and abs(lead[-1]) < 1e-9, "the other nine kinds: ahead up to 512, then equal"
assert set(passes["gained"]) == {0} and (min(passes["lost"]), max(passes["lost"])) == (4, 9)
assert passes["of these known"] == passes["newly solved"], "a right answer among 1,024 samples before"
