"""The model's device: no tensor of a step is made on another one."""

import pytest
import torch

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import evaluate
from grpo_edu.fast.lora import add_lora
from grpo_edu.model_files import choose_device
from grpo_edu.models import load_policy
from grpo_edu.problems.files import load_problems
from grpo_edu.rewards import accuracy_reward, length_reward
from grpo_edu.runs.state import pack_training, read_random_states, restore_training
from grpo_edu.trainer import start_training, train

SETTINGS = {
    "plain": {},
    "reference": {"beta": 0.1},
    "two updates": {"num_iterations": 2, "importance_sampling_level": "sequence"},
    "tokens": {"entropy_coef": 0.1, "loss_type": "dapo"},
    "resampled": {"max_resamples": 2},
    "filters": {"top_p": 0.9, "top_k": 5},
    "memory": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "memory_budget_gib": 100.0},
    "two rewards": {"reward_weights": (1.0, 0.1)},
    "leave one out": {"advantage_estimator": "rloo", "scale_rewards": "none", "mask_truncated_completions": True},
    "batch": {"scale_rewards": "batch", "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "adapters": {"beta": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_tensor_of_a_step_is_made_on_another_device(policy_dir, name):
    """Any tensor that is made without a device would be one of "meta", and fail next to the model's own."""
    model, tokenizer = load_policy(policy_dir)
    if name == "adapters":
        model = add_lora(model, rank=2)
    config = GRPOConfig(max_steps=2, prompts_per_step=2, num_generations=4, max_completion_length=24, **SETTINGS[name])
    problems = load_problems("basic", n=8)
    with torch.device("meta"):
        history = list(train(model, tokenizer, problems, [accuracy_reward, length_reward], config))
        found = evaluate(model, tokenizer, problems, max_completion_length=24)
    assert len(history) == 2 and found.n == 8


def test_a_resumed_optimizer_has_its_states_where_its_weights_are():
    """The count of steps too: a fused AdamW refuses one on another device than the weights."""
    model, tokenizer = load_policy("tiny")
    config = GRPOConfig(max_steps=1, prompts_per_step=2, num_generations=4, max_completion_length=24)
    state = start_training(model, tokenizer, load_problems("basic", n=8), config)
    list(train(model, tokenizer, load_problems("basic", n=8), accuracy_reward, config, state=state))
    stored = pack_training(model, state, read_random_states(state.generator))
    elsewhere = torch.nn.Parameter(torch.empty(1, device="meta"))
    state.optimizer.param_groups[0]["params"][0] = elsewhere
    restore_training(model, state, stored, "state.pt")
    restored = state.optimizer.state[elsewhere]
    assert set(restored) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(value.device.type == "meta" for value in restored.values())


def test_the_device_is_chosen_by_what_is_there_and_by_size(monkeypatch):
    assert choose_device("cpu").type == "cpu"
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose_device("auto", 134_000_000).type == ("cuda" if there else "cpu")
        assert choose_device("auto", 1_000_000).type == "cpu"
    for device, words in (("cuda", "cuda is not available.*cpu"), ("tpu", "'tpu' is unknown.*auto")):
        with pytest.raises(ValueError, match=f"`device`: {words}"):
            choose_device(device)
