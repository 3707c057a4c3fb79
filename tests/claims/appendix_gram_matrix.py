assert torch.isclose(total_variance(a, g @ g.T), (a[:, None] * g).var(dim=0).sum())

# a baseline helps where all rewards are large, and the mean of the others is not the best one for 0 and 1
assert measured["rewards 1 and 2"][1] > 3, measured
assert measured["rewards 0 and 1"][2] < 1, measured
assert length_ratio > 1 and surprises[0] > surprises[1]
assert 0.35 < lowest < 0.8, lowest
