assert (advantages - group_advantages(rewards, G)).abs().max() < 1e-6
assert (mine - rloo_advantages(rewards, G)).abs().max() < 1e-6

# equal rewards: any rounding of their mean must not become an advantage
assert group_advantages(same, 16, eps=1e-8).abs().max() == 0

# larger groups tie less often; one p for all predicts too few ties, each question's own p the measured share
shares = [share for share, _, _ in measured]
assert shares == sorted(shares, reverse=True)
assert one_p[2] < measured[2][1]
assert all(abs(expected - share) < 0.08 for expected, share in zip(each_p, shares, strict=True))
assert 16 < sampled <= 96 and len(kept) == 16

# the exact enumeration, symmetric in p
assert all(abs(factor - 1) < 1e-9 for factor in factors["RLOO"])
assert all(abs(factor - 7 / 8) < 1e-9 for factor in factors["centered (Dr. GRPO)"])
scaled = factors["scaled (GRPO)"]
assert abs(scaled[0] - scaled[4]) < 1e-9 and abs(scaled[1] - scaled[3]) < 1e-9 and scaled[0] > scaled[1] > scaled[2]

# the stored study: each way gains more than 30 points on every seed, and the four with G = 8 end close together
solved = {name: [run["after"]["k"] for run in study["runs"] if run["name"] == name] for name in study["ways"]}
assert min(min(numbers) for numbers in solved.values()) - study["before"]["k"] > 90
of_eight = [number for name, numbers in solved.items() if "G = 2" not in name for number in numbers]
assert max(of_eight) - min(of_eight) <= 5
