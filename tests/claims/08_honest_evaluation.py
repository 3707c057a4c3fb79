assert spread >= 4, "one model's sixteen accuracies scatter by several points"
single = rates["one honest look"]
assert single < 1 / 25 and rates["all of them"] > 1 / 6
assert all(rate > max(1.3 * single, 0.025) for habit, rate in rates.items() if habit != "one honest look")
assert careful <= 0.03, "Bonferroni keeps the promise"
assert worst == mcnemar_range(43, 48, 60)[1]
assert my_wilson(8, 10)[0] - wilson_interval(8, 10)[0] < 1e-6
assert gains.min() > 0.2
pass_at_1, pass_at_16 = correct.mean(), (num_correct > 0).mean()
assert pass_at_1 < 0.75 and pass_at_16 > 0.85
# the interval over seeds and problems, by hand and by the package, is several times as wide as the one over seeds
assert abs(low_of_both - both.low) < 0.01 and abs(high_of_both - both.high) < 0.01
over_seeds = grpo_edu.evaluation.mean_estimate(change.mean(axis=1))
assert both.high - both.low > 4 * (over_seeds.high - over_seeds.low)
assert over_kinds.high - over_kinds.low > 2 * (both.high - both.low)
