assert gradients["k1"].abs().max() < 1e-9 < gradients["true reverse"].abs().max()
assert (gradients["k2"] - gradients["true reverse"]).abs().max() < 1e-9
assert (gradients["k3"] - gradients["true forward"]).abs().max() < 1e-9
assert standard_deviation(policy, k["k3"]) > 50 * standard_deviation(policy, k["k1"])  # far from the reference
slopes = {name: torch.autograd.grad(value, first_logit, retain_graph=True)[0] for name, value in values.items()}
assert abs(slopes["k2 of the whole completion"] - slopes["true reverse KL"]) < 1e-5
assert max(slopes[f"{name} per token"] for name in ("k2", "k3 times ρ")) < 0.85 * slopes["true reverse KL"]
assert late > early, "the reward rises"
assert abs(losses[0]) < 1e-4 and losses[-1] > losses[0] + 5e-4, "and so does the loss"
