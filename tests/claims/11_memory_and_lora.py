assert abs(estimated / naive.needed - 1) < 0.25, "estimate and measurement agree within a quarter"
without, chunks, parts_of_8, _, every_switch = measured.values()
assert chunks < 0.7 * without and parts_of_8 < 0.7 * chunks and every_switch < 0.4 * without
assert (changed - reference).abs().max() > 0.1 and (original - reference).abs().max() < 1e-5
assert torch.allclose(merged, changed, atol=1e-3)
assert adapted.A.grad.norm() == 0 and adapted.B.grad.norm() > 0
for kind in ("GRPO", "supervised"):
    assert best[f"{kind}, LoRA"]["learning_rate"] >= 3 * best[f"{kind}, all weights"]["learning_rate"]
