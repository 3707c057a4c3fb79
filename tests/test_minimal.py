"""GRPO in one file against the trainer: losses, gradients and weights of each step, on the same samples."""

import ast
import random
import runpy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from toy_policy import PROBLEMS, late_letters, make_model, weights

from grpo_edu import minimal
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import Problem
from grpo_edu.rewards import accuracy_reward
from grpo_edu.rollout import Rollout
from grpo_edu.trainer import start_training, train

SIZES = {"max_steps": 3, "prompts_per_step": 3, "num_generations": 4, "max_completion_length": 5, "learning_rate": 1e-2}
SETTINGS = {
    "the defaults": {},
    "kl": {"beta": 0.1},
    "three updates, clipped": {"num_iterations": 3, "epsilon": 0.05},
    "dapo, kl, two updates": {"loss_type": "dapo", "beta": 0.2, "num_iterations": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
}


@dataclass
class Replayed:
    """A sampler for the trainer that hands out the completions which `minimal` sampled, in their order."""

    tokenizer: object
    groups: list = field(default_factory=list)  # (length of the prompt, ids, mask) of each group

    def reset(self, rows):
        return None, [""] * len(rows)

    def generate(self, prompts, generator, environments=None):
        groups, self.groups = self.groups[: len(prompts)], self.groups[len(prompts) :]
        rows = [(ids[row], mask[row], size) for size, ids, mask in groups for row in range(len(ids))]
        most = max(size for _, _, size in rows)
        longest = max(len(mask) for _, mask, _ in rows)
        prompt_ids, completion_ids = torch.zeros(len(rows), most).long(), torch.zeros(len(rows), longest).long()
        prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
        for row, (ids, mask, size) in enumerate(rows):
            prompt_ids[row, most - size :], prompt_mask[row, most - size :] = ids[:size], 1
            completion_ids[row, : len(mask)], completion_mask[row, : len(mask)] = ids[size:], mask
        return Rollout(
            prompts=[prompt for prompt in prompts for _ in range(len(rows) // len(prompts))],
            completions=self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True),
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids * completion_mask,
            completion_mask=completion_mask,
            sampling_per_token_logps=torch.zeros_like(completion_mask, dtype=torch.float32),
            is_truncated=~(completion_ids * completion_mask == 1).any(dim=1),
            num_generations=len(rows) // len(prompts),
        )

    def importance_weights(self, old, rollout, rows):
        return None

    def metrics(self, old, rollout):
        return {}


def gradients_of(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def train_minimal(model, tokenizer, options, monkeypatch):
    """Metrics, gradients and weights of each step; the problems in the order of their use; a sampler that replays."""
    replayed, chosen, sample_group, sample = Replayed(tokenizer), [], minimal.sample_group, random.sample

    def keep_group(model, prompt, *arguments):
        replayed.groups.append((len(prompt), *sample_group(model, prompt, *arguments)))
        return replayed.groups[-1][1:]

    def keep_problems(problems, count):
        chosen.extend(found := sample(problems, count))
        return found

    monkeypatch.setattr(minimal, "sample_group", keep_group)
    monkeypatch.setattr(minimal.random, "sample", keep_problems)
    problems = [{"prompt": problem.prompt, "answer": problem.answer} for problem in PROBLEMS]
    run = minimal.train(model, tokenizer, problems, lambda text, answer: late_letters([text])[0], seed=3, **options)
    steps = [(metrics, gradients_of(model), weights(model)) for metrics in run]
    return steps, [Problem(**problem, level="toy", solution="") for problem in chosen], replayed


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_every_step_is_that_of_the_trainer(tokenizer, monkeypatch, options):
    model = make_model()
    expected = weights(model)
    steps, problems, replayed = train_minimal(model, tokenizer, {**SIZES, **options}, monkeypatch)
    config = GRPOConfig(**SIZES, **options, shuffle_dataset=False)
    other = make_model()
    state = start_training(other, tokenizer, problems, config)
    state.sampler = replayed
    run = train(other, tokenizer, problems, late_letters, config, state=state)
    for (metrics, gradients, after), of_the_trainer in zip(steps, run, strict=True):
        assert metrics["reward"] == pytest.approx(of_the_trainer["reward"])
        if config.num_iterations == 1:  # else the trainer reports the mean over the updates
            assert metrics["loss"] == pytest.approx(of_the_trainer["loss"], abs=1e-7)
            assert metrics["grad_norm"] == pytest.approx(of_the_trainer["grad_norm"], rel=1e-5)
        assert_close(gradients, gradients_of(other), atol=1e-6, rtol=0.0)
        assert_close(after, weights(other), atol=1e-6, rtol=0.0)
        assert any((after[name] - before).abs().max() > 1e-3 for name, before in expected.items())
        expected = after
    if config.num_iterations > 1:
        assert of_the_trainer["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_nothing_is_learned_from_the_rounding_of_equal_rewards(tokenizer, scale_rewards):
    """In float32 the mean of eight rewards of 0.1 is not 0.1."""
    rewards = torch.full((8,), 0.1)
    assert (rewards != rewards.mean()).any() and minimal.group_advantages(rewards, scale_rewards).eq(0.0).all()
    model, problems = make_model(), [{"prompt": "q1", "answer": "1"}] * 4
    before = weights(model)
    options = {**SIZES, "num_generations": 8, "scale_rewards": scale_rewards}
    list(minimal.train(model, tokenizer, problems, lambda text, answer: 0.1, **options))
    assert all(torch.equal(weights(model)[name], before[name]) for name in before)


def test_a_sampled_token_has_the_probability_of_the_model(tokenizer):
    """Of many completions of one token, each token is sampled about as often as the model says."""
    torch.manual_seed(0)
    model, prompt = make_model(), torch.tensor([3, 4])
    ids, mask = minimal.sample_group(model, prompt, 4000, 1, eos_id=1)
    share = torch.bincount(ids[:, 2], minlength=15) / 4000
    expected = model(prompt[None]).logits[0, -1].softmax(dim=0).detach()
    assert mask.shape == (4000, 1) and (share - expected).abs().max() < 0.04 and expected.max() > 0.1


def test_a_completion_ends_with_its_first_end_token(tokenizer):
    torch.manual_seed(0)
    ids, mask = minimal.sample_group(make_model(), torch.tensor([3, 4]), 64, 6, eos_id=1)
    ended = (ids[:, 2:] == 1).int()
    assert torch.equal(mask, (ended.cumsum(dim=1) - ended == 0).long()) and mask.sum() < mask.numel()
    assert (ids[:, 2:][mask == 0] == 1).all()


@pytest.mark.parametrize("text", ["2+3=5. #### 5", "5", "#### 5 #### 6", "#### 6", "#### 5\n", "", "####"])
def test_the_reward_is_that_of_the_package_on_plain_answers(text):
    assert [minimal.accuracy(text, "5")] == accuracy_reward([text], ["5"])


@pytest.mark.slow
def test_the_command_trains_the_tiny_model(monkeypatch):
    def stop(line):
        raise KeyboardInterrupt(line)

    monkeypatch.setattr("sys.argv", ["minimal"])
    monkeypatch.setattr("builtins.print", stop)
    with pytest.raises(KeyboardInterrupt) as first_step:
        runpy.run_path(minimal.__file__, run_name="__main__")
    words = str(first_step.value).split()
    values = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert values["step"] == 1 and 0 < values["reward"] < 1 and values["grad_norm"] > 0.1


def test_it_fits_on_a_page_and_takes_only_the_prompt_from_the_package():
    source = Path(minimal.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    imported = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.startswith("grpo_edu")] == ["grpo_edu.prompts"]
