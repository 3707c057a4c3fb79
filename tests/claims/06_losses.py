matters = {name: row["low"] > 0 for name, row in study["stored"].items()}
assert {name for name in matters if matters[name]} == {name for name in matters if "ratio" in name or "G = 2" in name}
assert all(row["low"] <= 0 <= row["high"] for name, row in study["stored"].items() if not matters[name])
(difference,) = kl["differences"].values()
assert difference["accuracy"]["low"] > 0.25 and kl["seeds"] == [0, 1, 2, 3, 4]
assert rewards[0] < rewards[1], "the reward is higher where it is hacked"
# ratio and bound apart: neither shows a difference at tuned rates, and the narrow bound needs a higher rate
suggested = {name for name, row in crossed["factors"].items() if not row["low"] <= 0 <= row["high"]}
assert suggested == {"token ratio minus sequence ratio, wide bound"}, "one of five lines"
assert all(rate == 4e-4 for rate in crossed["rates"].values()), "1e-4 suits no arm"
assert all(
    crossed["selection"][f"{ratio} ratio, wide bound"]["0.0001"]
    > crossed["selection"][f"{ratio} ratio, narrow bound"]["0.0001"] + 0.05
    for ratio in ("token", "sequence")
)
