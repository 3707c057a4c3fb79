assert largest["policy mask"] == 0 < largest["completion mask"]
assert gap < 1e-4, "log-probabilities while sampling are those of a plain forward pass"
assert by_tool.any(dim=1).sum() >= 5 and (authors.count(0), rollout.tool_mask.shape[0]) == (6, 32)
assert mean_surprise["tool"] > 6.9, "the digits of a large sum are not to be guessed"
assert Calculator().step("[__import__('os').getcwd()]").observation == "=?."
