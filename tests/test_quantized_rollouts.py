"""Quantized rollouts: weights by hand, and a training whose sampler is a rounded copy of the policy."""

import copy
import inspect
import math
import textwrap
import types
from dataclasses import replace

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from torch.testing import assert_close
from toy_policy import (
    PROBLEMS,
    late_letters,
    make_batch,
    make_model,
    sgd,
    training_state,
    update_policy,
    weights,
    word_tokenizer,
)

from grpo_edu.advantages import degenerate_groups
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.lora import add_lora, has_adapters, merge_lora
from grpo_edu.fast.packing import per_token_logps
from grpo_edu.problems.templates import Problem
from grpo_edu.quantization.model import quantization_scheme, quantize_model
from grpo_edu.quantization.rollouts import QuantizedSampler, mismatch_metrics, truncated_importance_weights
from grpo_edu.scale.trl_backend import trl_settings
from grpo_edu.trainer import start_training, train

SMALL = {"num_generations": 4, "prompts_per_step": 4, "max_completion_length": 5, "max_steps": 2}
KEYS = [
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
]


def test_weights_undo_what_the_sampler_does():
    """On average over what π_q draws, weight × anything is what π would have given (without a cap)."""
    policy, sampler = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    value = torch.tensor([3.0, -1.0, 7.0])
    w = truncated_importance_weights(policy.log()[None], sampler.log()[None], 10.0)[0]
    assert_close((sampler * w * value).sum(), (policy * value).sum())
    assert_close(w, torch.tensor([1.25, 0.75, 1.0]))
    capped = truncated_importance_weights(policy.log()[None], sampler.log()[None], 1.1)[0]
    assert_close(capped, torch.tensor([1.1, 0.75, 1.0]))


def test_weights_carry_no_gradient_and_refuse_what_does_not_fit():
    logps = torch.zeros(2, 3, requires_grad=True)
    assert not truncated_importance_weights(logps, torch.zeros(2, 3), 3.0).requires_grad
    with pytest.raises(ValueError, match="^sampling_per_token_logps: expected shape"):
        truncated_importance_weights(logps, torch.zeros(2, 2), 3.0)


def of_trl(mode, trained, sampled, mask, cap):
    """The statements of TRL's own trainer that make the weights, with `mode` as its setting."""
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.index(" " * 16 + "mask = completion_mask if tool_mask is None")
    end = source.index("# Compute the per-token log probabilities for the reference model")
    body = textwrap.dedent(source[start:end])
    names = {f"vllm_importance_sampling_{name}": value for name, value in (("mode", mode), ("clip_max", cap))}
    trainer = types.SimpleNamespace(**names, vllm_importance_sampling_clip_min=None)
    space = {"self": trainer, "torch": torch, "math": math, "completion_mask": mask, "tool_mask": None}
    space |= {"old_per_token_logps": trained, "sampling_per_token_logps": sampled}
    exec(body, space)
    return space["vllm_importance_sampling_ratio"]


def test_the_weights_are_those_of_trl():
    generator = torch.Generator().manual_seed(0)
    trained, sampled = (torch.randn(64, 5, generator=generator) - 2 for _ in range(2))
    mask = (torch.arange(5) < torch.randint(1, 6, (64, 1), generator=generator)).long()
    ours = truncated_importance_weights(trained, sampled, 2.0)
    assert_close(torch.where(mask == 1, ours, 1.0), of_trl("token_truncate", trained, sampled, mask, 2.0))
    assert (ours == 2.0).any(), "some weights were above the limit"


OTHER_SAMPLERS = {"quantized": {"rollout_quantization": "int8-weight"}, "older": {"rollout_lag": 1}}


@pytest.mark.parametrize("sampler", OTHER_SAMPLERS)
def test_the_trainer_uses_the_weights(sampler):
    """One SGD step against the weights put in by hand, and the metrics of these weights."""
    batch = make_batch(make_model(), word_tokenizer(), GRPOConfig(**SMALL))
    r = batch.rollout
    shift = torch.linspace(-1, 1, r.sampling_per_token_logps.numel()).view_as(r.sampling_per_token_logps)
    object.__setattr__(r, "sampling_per_token_logps", r.sampling_per_token_logps - shift)
    settings = {**OTHER_SAMPLERS[sampler], "max_grad_norm": 0.0, "importance_sampling_clip_max": 1.5}
    model = make_model()
    before = weights(model)
    config = GRPOConfig(**SMALL, **settings)
    metrics = update_policy(model, batch, sgd(model), config)
    change = {name: value - before[name] for name, value in weights(model).items()}
    model = make_model()
    logps = per_token_logps(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask)
    difference = (logps.detach() - r.sampling_per_token_logps) * r.completion_mask
    w = difference.exp().clamp(max=1.5)
    lengths = r.completion_mask.sum(dim=1, keepdim=True)
    surrogate = (w * batch.advantages[:, None] * logps * r.completion_mask / lengths).sum() / len(lengths)
    gradients = torch.autograd.grad(surrogate, list(model.parameters()))
    for moved, gradient in zip(change.values(), gradients, strict=True):
        assert_close(moved, gradient, atol=1e-6, rtol=1e-5)
    assert metrics["sampling/importance_sampling_ratio/max"] <= 1.5


def test_mismatch_of_nothing_is_nothing():
    assert mismatch_metrics(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), cap=3.0) == {}


def test_the_update_weighs_each_token_and_the_uncorrected_one_does_not():
    """One SGD step of the trainer against the weights put in by hand."""
    tokenizer = word_tokenizer()
    batch = make_batch(make_model(), tokenizer, GRPOConfig(**SMALL))
    shift = torch.linspace(-1, 2, batch.rollout.sampling_per_token_logps.numel())
    object.__setattr__(
        batch.rollout,
        "sampling_per_token_logps",
        batch.rollout.sampling_per_token_logps - shift.view_as(batch.rollout.sampling_per_token_logps),
    )
    r = batch.rollout
    changes, metrics = {}, {}
    for name, corrected in {"corrected": True, "naive": False}.items():
        config = GRPOConfig(
            **SMALL,
            rollout_quantization="int8-weight",
            importance_sampling_correction=corrected,
            max_grad_norm=0.0,
            importance_sampling_clip_max=3.0,
        )
        model = make_model()
        before = weights(model)
        metrics[name] = update_policy(model, batch, sgd(model), config)
        changes[name] = {key: weights(model)[key] - before[key] for key in before}
    model = make_model()
    logps = per_token_logps(model, r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask)
    lengths = r.completion_mask.sum(dim=1, keepdim=True)
    w = (logps.detach() - r.sampling_per_token_logps).exp().clamp(max=3.0)
    for name, weight in {"corrected": w, "naive": torch.ones_like(w)}.items():
        surrogate = (weight * batch.advantages[:, None] * logps * r.completion_mask / lengths).sum() / len(lengths)
        gradients = torch.autograd.grad(surrogate, list(model.parameters()), retain_graph=True)
        for change, gradient in zip(changes[name].values(), gradients, strict=True):
            assert_close(change, gradient, atol=1e-6, rtol=1e-5)
    weighted = {name for name in metrics["corrected"] if "importance_sampling_ratio" in name}
    assert len(weighted) == 3 and metrics["corrected"].keys() - weighted == metrics["naive"].keys()
    assert all(metrics["naive"][name] == pytest.approx(metrics["corrected"][name]) for name in KEYS[:2])
    assert metrics["corrected"]["sampling/importance_sampling_ratio/max"] == pytest.approx(3.0)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "bf16"])
def test_a_training_refreshes_its_sampler_each_step_and_measures_the_mismatch(scheme, monkeypatch):
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, sharpness=3.0, stop_ids=range(0, 256, 16))
    samplers = []

    quantized = QuantizedSampler.policy

    def watched(sampler):
        samplers.append(quantized(sampler))
        return samplers[-1]

    monkeypatch.setattr(QuantizedSampler, "policy", watched)
    problems = [Problem(f"say {n}", str(n), "toy", f"#### {n}") for n in range(6)]

    def lengths(completions, completion_ids, **kwargs):
        return [float(sum(ids) % 7) for ids in completion_ids]

    config = GRPOConfig(**SMALL, rollout_quantization=scheme, learning_rate=1e-2)
    steps = list(train(model, tokenizer, problems, lengths, config))
    assert [quantization_scheme(sampler) for sampler in samplers] == [scheme, scheme]
    first, second = (dict(sampler.named_parameters())["model.norm.weight"] for sampler in samplers)
    assert not torch.equal(first, second)  # the second has learned what the policy has
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for metrics in steps:
        assert 0 < metrics[KEYS[0]] <= metrics[KEYS[1]] < 1
        assert metrics[KEYS[2]] <= metrics[KEYS[3]] <= metrics[KEYS[4]] <= 3.0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_weights_that_sample_are_as_many_steps_old_as_asked(lag):
    """Each step's samples have the log-probabilities of the policy after the step that the definition names."""
    tokenizer = word_tokenizer()
    config = GRPOConfig(**{**SMALL, "max_steps": 5}, rollout_lag=lag, learning_rate=0.05)
    model = make_model()
    state = start_training(model, tokenizer, PROBLEMS, config)
    after, prompts = [copy.deepcopy(model)], []
    for metrics in train(model, tokenizer, PROBLEMS, late_letters, config, state=state):
        r, step = state.batch.rollout, state.step
        batch = r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask
        logps = [per_token_logps(one, *batch).detach() for one in after]
        sampler = max(0, step - 1 - lag)
        assert_close(logps[sampler].float(), r.sampling_per_token_logps, atol=1e-5, rtol=0)
        if step - 1 > sampler:  # and no other policy has them
            assert not torch.allclose(logps[step - 1].float(), r.sampling_per_token_logps, atol=1e-3)
        learned = r.completion_mask * ~degenerate_groups(state.batch.rewards, 4).repeat_interleave(4)[:, None]
        gap = ((logps[step - 1] - r.sampling_per_token_logps).abs() * learned).sum() / learned.sum()
        assert metrics.get("sampling/sampling_logp_difference/mean", 0.0) == pytest.approx(gap.item(), abs=1e-4)
        assert len(state.ahead) == min(lag, config.max_steps - step)
        after.append(copy.deepcopy(model))
        prompts.append(r.prompts)
    straight, now = start_training(make_model(), tokenizer, PROBLEMS, replace(config, rollout_lag=0)), make_model()
    same = train(now, tokenizer, PROBLEMS, late_letters, replace(config, rollout_lag=0), state=straight)
    assert prompts == [straight.batch.rollout.prompts for _ in same]  # the lag changes no problem's turn


def by_length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def test_a_copy_with_4_bits_per_tensor_is_much_further_away_than_one_with_8():
    """Every matrix has at most 15 values, and the training continues with a mismatch that int8 does not have."""
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, sharpness=3.0, hidden_size=64, intermediate_size=96, stop_ids=range(0, 256, 16))
    copied = quantize_model(model, "int4-tensor")
    layer = copied.model.layers[0].mlp.up_proj.parts().dequantize()
    top = model.model.layers[0].mlp.up_proj.weight.abs().max().item()
    assert len(layer.unique()) <= 15 and layer.abs().max().item() == pytest.approx(top, rel=1e-5)
    assert quantization_scheme(copied) == "int4-tensor" and copied.lm_head.parts().bits == 8
    problems = [Problem(f"say {n}", str(n), "toy", f"#### {n}") for n in range(6)]
    gaps = {}
    for scheme in ("int4-tensor", "int8-weight"):
        config = GRPOConfig(**SMALL, rollout_quantization=scheme)
        policy = copy.deepcopy(model)
        steps = list(train(policy, tokenizer, problems, by_length, config))
        gaps[scheme] = steps[0]["sampling/sampling_logp_difference/mean"]
    assert gaps["int4-tensor"] > 5 * gaps["int8-weight"] > 0


def test_without_quantization_the_policy_itself_samples():
    config = GRPOConfig(**SMALL)
    model, tokenizer = make_model(), word_tokenizer()
    sampler = training_state(model, sgd(model), config).sampler
    assert sampler.policy() is model
    batch = make_batch(model, tokenizer, config)
    logps = batch.rollout.sampling_per_token_logps
    assert sampler.importance_weights(logps, batch.rollout, torch.arange(len(logps))) is None
    assert not [key for key in update_policy(model, batch, sgd(model), config) if key.startswith("sampling/")]


def test_trl_trains_without_quantized_or_older_rollouts():
    with pytest.raises(ValueError, match="^rollout_quantization: 'bf16' .*TRL"):
        trl_settings(GRPOConfig(rollout_quantization="bf16"))
    with pytest.raises(ValueError, match="^rollout_lag: 2 .*TRL"):
        trl_settings(GRPOConfig(rollout_lag=2))


def test_a_policy_with_adapters_samples_from_a_copy_with_merged_ones():
    model = add_lora(make_model(dtype=torch.float32), rank=2)
    for weight in model.parameters():
        weight.data += 0.1 * weight.requires_grad
    before = weights(model)
    sampler = QuantizedSampler(model, word_tokenizer(), GRPOConfig(**SMALL, rollout_quantization="bf16"))
    merged = merge_lora(copy.deepcopy(model)).bfloat16()
    ids = torch.tensor([[3, 4, 7, 9]])
    with torch.no_grad():
        assert_close(sampler.policy()(ids).logits, merged(ids).logits)
    assert all(torch.equal(now, before[name]) for name, now in weights(model).items())
    assert has_adapters(model)
