"""What notebook 16 claims on every computer."""

assert torch.cosine_similarity(masked, unmasked, dim=0) < 0.6
assert torch.cosine_similarity(masked, turn_gradient, dim=0) > 0.9
assert by_env.sum() > rollout.policy_mask.sum()
assert results["with the mask"].k > before.k + 75
assert results["with the mask"].k > results["without the mask"].k + 45
