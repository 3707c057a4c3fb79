assert cosines[1, 3] > 0.9999, "BNPO and Dr. GRPO have the same direction in one undivided batch"
assert 1000 * min(errors["float64"]) < min(errors["float32"]), "finite differences need float64"
