"""Steps in a process of their own: what they report is true of the training, and failures are said."""

import pytest
from small_policy import save_small_policy

from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.machine.step_process import MeasuredSteps, MemoryCurve, measure_steps

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
CONFIG = GRPOConfig(prompts_per_step=2, num_generations=2, max_completion_length=4, max_steps=2)
# embedding; per layer: q and o with their biases on q, k, v; MLP; two norms; the last norm
NUMBERS = 1000 * 16 + 2 * (16 * 16 * 2 + 16 + 2 * (16 * 8 + 8) + 3 * 16 * 32 + 2 * 16) + 16


@pytest.fixture(scope="module")
def full() -> MeasuredSteps:
    return measure_steps(CONFIG, shape=SHAPE)


def test_a_shape_is_trained_whole(full):
    assert full.trained == full.parameters == NUMBERS
    assert full.startup > 0.5 and full.samples_per_second > 0  # the libraries alone take longer
    assert full.peak > full.libraries > 50_000_000 and full.needed == full.peak - full.libraries
    assert full.grad_norm > 0, "random weights are paid by a reward that does not tie"


def test_stages_come_in_order_and_the_curve_under_its_peak(full):
    names = [name for _, name in full.stages]
    assert names == ["loading", *2 * ("rollout", "learning", "optimizer step")]
    times = [begin for begin, _ in full.stages]
    assert times == sorted(times) and times[0] < 1
    assert full.curve and max(size for _, size in full.curve) <= full.peak


@pytest.mark.long
def test_logits_whole_or_in_chunks_and_passes_give_the_same_step(full):
    config = GRPOConfig(**{**CONFIG.to_dict(), "gradient_accumulation_steps": 2, "gradient_checkpointing": True})
    other = measure_steps(config, shape=SHAPE, whole_logits=True)
    assert other.grad_norm == pytest.approx(full.grad_norm, rel=1e-4)


@pytest.mark.long
def test_adapters_learn_and_nothing_else():
    found = measure_steps(CONFIG, shape=SHAPE, lora_rank=1, dtype="bfloat16")
    # (in + out) of q, k, v, o, gate, up, down, twice
    assert found.trained == 2 * (32 + 24 + 24 + 32 + 48 + 48 + 48)
    assert found.parameters == NUMBERS + found.trained


@pytest.mark.long
def test_supervised_steps_of_a_saved_model(tmp_path):
    folder = save_small_policy(tmp_path / "random")
    found = measure_steps(SupervisedConfig(max_steps=2, prompts_per_step=2), model=str(folder), warm_up=True)
    assert [name for _, name in found.stages] == ["loading", "learning", "optimizer step"] * 1 + [
        "learning",
        "optimizer step",
    ]
    assert found.loss > 1


def test_a_stage_that_goes_on_is_marked_once():
    with MemoryCurve() as memory:
        for stage in ("rollout", "rollout", "learning"):
            memory.mark(stage)
    assert [name for _, name in memory.stages] == ["rollout", "learning"]


def test_a_single_step_is_refused():
    """What is said where the process fails is in test_startup.py, which starts one in the same way."""
    with pytest.raises(ValueError, match="max_steps.*at least 2.*1"):
        measure_steps(GRPOConfig(max_steps=1))
