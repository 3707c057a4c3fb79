assert likely == 2

# the formula for a bandit: π(k) (r(k) − J)
start = torch.tensor([1.0, 0.0, -1.0]).softmax(dim=0)
assert torch.allclose(exact_gradient, start * (pays - (start * pays).sum()), atol=1e-6)
assert difference < 1e-6 and 1.0 < ratio < 1.02
assert (by_hand + theta.grad).abs().max() < 1e-6

# the best arm wins, and needs its baseline when all rewards are large
assert scores.softmax(dim=0)[2] > 0.9
assert successes[True] == 40 and successes[False] < 20
assert variances[0] / variances[1] > 300

# the student's sampling agrees with the package, but for rounding
assert compared > 50 and different <= compared / 10

# the habit grows on the problem that was trained, and on the other one less
trained, elsewhere = frames[-1]
assert frames[0][0] < 0.65 and frames[0][1] < 0.65
assert trained > 0.85 and 0.65 < elsewhere < trained
