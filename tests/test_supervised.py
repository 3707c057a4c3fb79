"""Supervised fine-tuning: it learns, in place, alike for one seed, and its loss has the three parts it says."""

import copy

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing import assert_close

from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.continual.examples import encode_examples, pad_examples
from grpo_edu.continual.supervised import finetune
from grpo_edu.fast.lora import add_lora
from grpo_edu.fast.optimizers import parameters_of
from grpo_edu.problems.templates import make_problems
from recipes.pretraining import target_loss

PROBLEMS = make_problems("basic", 6, seed=0)
SMALL = {"prompts_per_step": 2, "learning_rate": 1e-3, "seed": 3}


@pytest.fixture
def policy():
    tokenizer = byte_tokenizer()
    return random_model(tokenizer, max_position_embeddings=1024), tokenizer


def weights(model):
    return [weight.detach().clone() for weight in model.parameters()]


def test_it_learns_the_solutions_and_yields_a_dict_a_step(policy):
    model, tokenizer = policy
    config = SupervisedConfig(max_steps=15, prompts_per_step=6, learning_rate=3e-3)
    history = list(finetune(model, tokenizer, PROBLEMS, config))
    assert [row["step"] for row in history] == list(range(1, 16))
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert {"loss", "grad_norm", "learning_rate", "num_tokens", "step_time"} <= history[0].keys()
    assert not {"kl", "penalty"} & history[0].keys()


@pytest.fixture
def gradients():
    """A list that gets, at each call of an optimizer, how many weights hold a gradient."""
    held = []

    def count(optimizer, *_):
        held.append(sum(weight.grad is not None for weight in parameters_of(optimizer)))

    hook = register_optimizer_step_pre_hook(count)
    yield held
    hook.remove()


def solutions(tokenizer):
    rows = encode_examples(tokenizer, [(problem, problem.solution) for problem in PROBLEMS])
    return pad_examples(rows, tokenizer.pad_token_id)


def test_the_first_loss_is_the_mean_cross_entropy_of_the_solutions_alone(policy):
    model, tokenizer = policy
    with torch.no_grad():
        expected = target_loss(model, *solutions(tokenizer)).item()
    (first,) = finetune(model, tokenizer, PROBLEMS, SupervisedConfig(max_steps=1, prompts_per_step=6))
    assert first["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e9, 0.1])
def test_two_steps_are_adamw_steps_down_the_clipped_gradient_of_loss_and_penalty(policy, gradients, max_grad_norm):
    model, tokenizer = policy
    by_hand = copy.deepcopy(model)
    config = SupervisedConfig(max_steps=2, prompts_per_step=6, max_grad_norm=max_grad_norm)

    def penalty(net):
        return 0.1 * net.lm_head.weight.square().sum()

    list(finetune(model, tokenizer, PROBLEMS, config, penalty=penalty))
    assert max(gradients) == len(list(model.parameters()))
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        (target_loss(by_hand, *solutions(tokenizer)) + penalty(by_hand)).backward()
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), max_grad_norm)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert (ours - theirs).abs().mean() < 1e-6  # where a gradient is near 0, Adam's sign may go either way


def test_gradient_checkpointing_changes_the_memory_and_not_the_weights(policy):
    model, tokenizer = policy
    results, kept = [], []
    for checkpointing in (False, True):
        learner, saved = copy.deepcopy(model), []
        config = SupervisedConfig(max_steps=2, prompts_per_step=6, gradient_checkpointing=checkpointing)

        def pack(tensor, saved=saved):
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            list(finetune(learner, tokenizer, PROBLEMS, config))
        results.append(torch.cat([weight.flatten() for weight in weights(learner)]))
        kept.append(sum(saved))
    assert_close(results[0], results[1], atol=1e-6, rtol=0)
    assert kept[1] < kept[0]


def test_the_same_seed_gives_the_same_weights_and_another_one_others(policy):
    model, tokenizer = policy
    results = []
    for seed in (3, 3, 4):
        learner = copy.deepcopy(model)
        list(finetune(learner, tokenizer, PROBLEMS, SupervisedConfig(**{**SMALL, "max_steps": 2, "seed": seed})))
        results.append(torch.cat([weight.flatten() for weight in weights(learner)]))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_beta_holds_the_predictions_near_the_start(policy):
    model, tokenizer = policy
    kls = []
    for beta in (1e-9, 10.0):
        learner = copy.deepcopy(model)
        history = list(finetune(learner, tokenizer, PROBLEMS, SupervisedConfig(**SMALL, max_steps=8, beta=beta)))
        assert history[0]["kl"] == pytest.approx(0, abs=1e-6)
        kls.append(history[-1]["kl"])
    assert 0 < kls[1] < kls[0] / 3


def test_an_endless_gradient_leaves_the_weights_alone(policy):
    model, tokenizer = policy
    before = weights(model)
    training = finetune(
        model, tokenizer, PROBLEMS, SupervisedConfig(**SMALL), penalty=lambda net: net.lm_head.weight.sum() * torch.inf
    )
    with pytest.raises(FloatingPointError, match="learning_rate"):
        next(training)
    assert_close(weights(model), before, atol=0, rtol=0)


@pytest.mark.parametrize("field", ["max_steps", "prompts_per_step", "learning_rate", "beta", "lr_scheduler_type"])
def test_a_bad_setting_is_refused_in_the_words_of_grpo_config(field):
    bad = "steep" if field == "lr_scheduler_type" else -1
    with pytest.raises(ValueError) as ours:
        SupervisedConfig(**{field: bad})
    with pytest.raises(ValueError) as theirs:
        GRPOConfig(**{field: bad})
    assert str(ours.value) == str(theirs.value) and str(ours.value).startswith(field)


def test_a_setting_that_cannot_be_honoured_is_not_accepted():
    with pytest.raises(TypeError, match="memory_budget_gib"):
        SupervisedConfig(memory_budget_gib=1.0)


def test_too_few_problems_and_a_frozen_model_are_refused(policy):
    model, tokenizer = policy
    with pytest.raises(ValueError, match="problems.*1.*prompts_per_step"):
        next(finetune(model, tokenizer, PROBLEMS[:1], SupervisedConfig(**SMALL)))
    with pytest.raises(ValueError, match="load_policy"):
        next(finetune(model.requires_grad_(False), tokenizer, PROBLEMS, SupervisedConfig(**SMALL)))


@pytest.mark.slow
def test_adapters_learn_alone(policy):
    model, tokenizer = policy
    frozen = weights(model)
    lora = add_lora(model, rank=2)
    config = SupervisedConfig(max_steps=20, prompts_per_step=6, learning_rate=1e-2)
    history = list(finetune(lora, tokenizer, PROBLEMS, config))
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    kept = [weight for name, weight in lora.named_parameters() if "lora_" not in name]
    assert all(torch.equal(one, other) for one, other in zip(kept, frozen, strict=True))
