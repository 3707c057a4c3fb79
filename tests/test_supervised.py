"""Supervised fine-tuning: it learns, in place, alike for one seed, and its loss has the three parts it says."""

import copy

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from torch.testing import assert_close

from grpo_edu.adapters import add_lora
from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.corpus import encode_examples, pad_examples
from grpo_edu.pretraining import target_loss
from grpo_edu.problems import make_problems
from grpo_edu.supervised import finetune

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
    config = SupervisedConfig(max_steps=40, prompts_per_step=6, learning_rate=1e-3)
    history = list(finetune(model, tokenizer, PROBLEMS, config))
    assert [row["step"] for row in history] == list(range(1, 41))
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert {"loss", "grad_norm", "learning_rate", "num_tokens", "step_time"} <= history[0].keys()
    assert not {"kl", "penalty"} & history[0].keys()


def test_the_first_loss_is_the_mean_cross_entropy_of_the_solutions_alone(policy):
    model, tokenizer = policy
    rows = encode_examples(tokenizer, [(problem, problem.solution) for problem in PROBLEMS])
    with torch.no_grad():
        expected = target_loss(model, *pad_examples(rows, tokenizer.pad_token_id)).item()
    (first,) = finetune(model, tokenizer, PROBLEMS, SupervisedConfig(max_steps=1, prompts_per_step=6))
    assert first["loss"] == pytest.approx(expected, rel=1e-5)


def test_one_step_is_one_adamw_step_down_the_gradient_of_loss_and_penalty(policy):
    model, tokenizer = policy
    by_hand = copy.deepcopy(model)
    config = SupervisedConfig(max_steps=1, prompts_per_step=6, learning_rate=1e-3, max_grad_norm=1e9)
    list(finetune(model, tokenizer, PROBLEMS, config, penalty=lambda net: 0.1 * net.lm_head.weight.square().sum()))
    rows = encode_examples(tokenizer, [(problem, problem.solution) for problem in PROBLEMS])
    loss = target_loss(by_hand, *pad_examples(rows, tokenizer.pad_token_id))
    (loss + 0.1 * by_hand.lm_head.weight.square().sum()).backward()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-3, weight_decay=0.0)
    optimizer.step()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert (ours - theirs).abs().mean() < 1e-6  # where a gradient is near 0, Adam's sign may go either way


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
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
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


def test_too_few_problems_and_a_frozen_model_are_refused(policy):
    model, tokenizer = policy
    with pytest.raises(ValueError, match="problems: 1 are fewer than prompts_per_step = 2"):
        next(finetune(model, tokenizer, PROBLEMS[:1], SupervisedConfig(**SMALL)))
    with pytest.raises(ValueError, match="no parameter wants a gradient"):
        next(finetune(model.requires_grad_(False), tokenizer, PROBLEMS, SupervisedConfig(**SMALL)))


def test_adapters_learn_alone(policy):
    model, tokenizer = policy
    frozen = weights(model)
    lora = add_lora(model, rank=2)
    config = SupervisedConfig(max_steps=20, prompts_per_step=6, learning_rate=1e-2)
    history = list(finetune(lora, tokenizer, PROBLEMS, config))
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    kept = [weight for name, weight in lora.named_parameters() if "lora_" not in name]
    assert all(torch.equal(one, other) for one, other in zip(kept, frozen, strict=True))
