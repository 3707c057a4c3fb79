assert max(farthest.values()) < 1e-5, "losses and gradients agree with TRL's"
assert all((gap > 1e-3) == (name == "CISPO") for name, gap in gaps_of_slopes.items()), gaps_of_slopes
assert 1000 * min(errors["float64"]) < min(errors["float32"]), "finite differences need float64"
