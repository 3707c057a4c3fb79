assert 0.01 < clipped.sum() / data[2].sum() < 0.1, "few tokens are clipped after eight updates"
assert data[0][clipped].exp().median() < 0.9 < data[0][free].exp().median(), "the clipped tokens are the uncertain ones"
assert cosines[1, 3] > 0.9999, "BNPO and Dr. GRPO have the same direction in one undivided batch"
assert cosines[0, 1] > cosines[0, 4] + 0.1, "the clip of CISPO changes the direction more than the average does"
assert all(study["verdicts"].values()), "the stored study holds what the text says of it"
assert max(abs(means[name] - means["GRPO"]) for name in means if name != "GSPO") < 0.01 < means["GRPO"] - means["GSPO"]
