assert sum(a != b for a, b in zip(base, same, strict=True)) < 20 < sum(a != b for a, b in zip(base, other, strict=True))
assert min(kept["Wald"]) < 40 and min(kept["Wilson"]) > 80
