assert difference < 1e-4, "the log-probabilities are those that the sampler recorded"
assert 0.7 < sure < 1 and lengths[row] > 10, "most tokens are nearly certain"
assert clipped[-1][0] / 0.25 > 1.3 and clipped[-1][1] / 0.25 < 0.81, "the clip is no wall"
assert free[-1][0] > 0.9, "without it the policy is nearly certain"
