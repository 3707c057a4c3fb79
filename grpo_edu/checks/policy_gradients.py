"""Exercises on policy gradients: expected reward, score function, REINFORCE loss, best baseline and sampling."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu import rollout
from grpo_edu.checks.core import Call, Exercise, Mistake, Part, call
from grpo_edu.checks.inputs import gradient_of, numbers
from grpo_edu.checks.trained import TrainedExercise, trained_part

# ---- inputs ----


def some_probabilities(rng: random.Random, actions: int) -> list[float]:
    """Different probabilities in fortieths."""
    while True:
        cuts = [0, *sorted(rng.sample(range(1, 40), actions - 1)), 40]
        shares = [high - low for low, high in zip(cuts, cuts[1:], strict=False)]
        if len({*shares}) == actions:
            return [share / 40 for share in shares]


# ---- expected_reward ----


def expected_reward(first: Tensor, second: Tensor, rewards: Tensor) -> Tensor:
    """Σ π(i) π(j | i) r(i, j), over all completions of two tokens i and j."""
    return (first[:, None] * second * rewards).sum()


def _two_tokens(tokens: int) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        first = torch.tensor(some_probabilities(rng, tokens))
        second = torch.tensor([some_probabilities(rng, tokens) for _ in range(tokens)])
        rewards = torch.tensor([[rng.randrange(-2, 5) / 2 for _ in range(tokens)] for _ in range(tokens)])
        rewards[0] += 1  # the first token always matters
        return call(first, second, rewards)

    return draw


check_expected_reward = Exercise(
    expected_reward,
    parts=(
        Part("a vocabulary of two tokens", 2, _two_tokens(2)),
        Part("a vocabulary of four tokens", 1, _two_tokens(4)),
    ),
    mistakes={
        "the first token's probabilities belong to the second token": Mistake(
            "`first * second` multiplies the columns. Which index of `second` is the first token?",
            lambda first, second, rewards: (first * second * rewards).sum(),
        ),
        "the first token's probabilities are missing": Mistake(
            "A completion's probability is π(first) · π(second | first).",
            lambda first, second, rewards: (second * rewards).sum(),
            also=(lambda first, second, rewards: (second * rewards).sum(dim=1).mean(),),
        ),
        "the second token's probabilities are missing": Mistake(
            "A completion's probability is π(first) · π(second | first).",
            lambda first, second, rewards: (first[:, None] * rewards).sum(),
            also=(lambda first, second, rewards: first @ rewards.mean(dim=1),),
        ),
        "every completion counts equally": Mistake(
            "Weight each reward with the probability of its completion.", lambda first, second, rewards: rewards.mean()
        ),
        "the probabilities are added": Mistake(
            "That both tokens are drawn has the *product* of their probabilities.",
            lambda first, second, rewards: ((first[:, None] + second) * rewards).sum(),
        ),
        "only the most probable completion counts": Mistake(
            "The expected reward is a mean over *all* completions.",
            lambda first, second, rewards: rewards.flatten()[(first[:, None] * second).argmax()],
        ),
        "it is not added up": Mistake(
            "One number: add up over both tokens.",
            lambda first, second, rewards: first[:, None] * second * rewards,
            also=(lambda first, second, rewards: first * (second * rewards).sum(dim=1),),
        ),
        "it is the mean of the products": Mistake(
            "The probabilities are the weights already: add up, without dividing by the number of completions.",
            lambda first, second, rewards: (first[:, None] * second * rewards).mean(),
        ),
        "rows and columns of `second` are exchanged": Mistake(
            "Row i of `second` holds the probabilities *after* token i.",
            lambda first, second, rewards: (first[:, None] * second.T * rewards).sum(),
        ),
    },
)


# ---- score_function_gradient ----


def score_function_gradient(scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """(A,), the mean of r ∇ log π(a) over the samples, for a softmax policy."""
    directions = torch.eye(len(scores)) - scores.softmax(dim=0)
    return (rewards[:, None] * directions[actions]).mean(dim=0)


def _some_pulls(arms: int, samples: int) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        actions = [*range(arms), *(rng.randrange(arms) for _ in range(samples - arms))]
        rewards = [rng.randrange(1, 9) / 4 for _ in actions]
        rng.shuffle(actions)
        return call(numbers(rng, arms), torch.tensor(actions), torch.tensor(rewards))

    return draw


def _mean_direction(directions_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A wrong answer with another matrix (A, A) of directions."""
    return lambda scores, actions, rewards: (rewards[:, None] * directions_of(scores)[actions]).mean(dim=0)


check_score_function_gradient = Exercise(
    score_function_gradient,
    parts=(Part("three arms", 3, _some_pulls(3, 6)), Part("four arms", 1, _some_pulls(4, 9))),
    mistakes={
        "the samples are added up": Mistake(
            "The gradient is estimated by a *mean* over the samples.",
            lambda *args: score_function_gradient(*args) * len(args[1]),
        ),
        "the probabilities are not subtracted": Mistake(
            "When one score rises, the other probabilities fall.",
            _mean_direction(lambda scores: torch.eye(len(scores))),
        ),
        "the sign is turned": Mistake(
            "A rewarded action becomes more probable: its entry must be positive.",
            lambda *args: -score_function_gradient(*args),
        ),
        "the rewards are missing": Mistake(
            "Each sample pulls as strongly as it was rewarded.",
            lambda scores, actions, rewards: score_function_gradient(scores, actions, torch.ones_like(rewards)),
        ),
        "the probabilities are not multiplied by the reward": Mistake(
            "The reward multiplies the whole vector ∇ log π(a), also its negative entries.",
            lambda scores, actions, rewards: (
                rewards[:, None] * torch.eye(len(scores))[actions] - scores.softmax(dim=0)
            ).mean(dim=0),
        ),
        "the scores are taken for probabilities": Mistake(
            "What turns scores into probabilities?", _mean_direction(lambda scores: torch.eye(len(scores)) - scores)
        ),
        "log-probabilities are subtracted": Mistake(
            "The derivative of a log-softmax contains the probabilities themselves.",
            _mean_direction(lambda scores: torch.eye(len(scores)) - scores.log_softmax(dim=0)),
        ),
        "it is the gradient of π, without the logarithm": Mistake(
            "Actions are drawn with π already, so each sample contributes ∇ log π(a) = ∇π(a) / π(a).",
            _mean_direction(
                lambda scores: scores.softmax(dim=0)[:, None] * (torch.eye(len(scores)) - scores.softmax(dim=0))
            ),
        ),
        "there is one gradient per sample": Mistake(
            "Average over the samples, so that one number per arm is left.",
            lambda scores, actions, rewards: (
                rewards[:, None] * (torch.eye(len(scores)) - scores.softmax(dim=0))[actions]
            ),
        ),
        "the mean reward is subtracted": Mistake(
            "That is a baseline. It is a good idea, but here the plain rewards are asked for.",
            lambda scores, actions, rewards: score_function_gradient(scores, actions, rewards - rewards.mean()),
        ),
        "it is the mean over the arms": Mistake(
            "Rows are samples and columns are arms: average over the rows, dim=0.",
            lambda scores, actions, rewards: (
                rewards[:, None] * (torch.eye(len(scores)) - scores.softmax(dim=0))[actions]
            ).mean(dim=1),
        ),
    },
)


# ---- reinforce_loss ----


def reinforce_loss(logps: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """−mean((r − b) log π), whose gradient is minus the REINFORCE estimate."""
    return -((rewards - baseline) * logps).mean()


def _some_samples(rng: random.Random) -> Call:
    samples = rng.choice([3, 4, 5])
    rewards = torch.tensor([rng.randrange(-4, 9) / 4 for _ in range(samples)])
    return call(numbers(rng, samples, low=-3.0, high=-0.1), rewards, rng.choice([0.3, 0.7, 1.4]))


def _its_gradient(rng: random.Random) -> Call:
    one = _some_samples(rng)
    return Call(one.args, ask=gradient_of)


check_reinforce_loss = TrainedExercise(
    reinforce_loss,
    parts=(Part("the loss", 2, _some_samples), Part("its gradient", 2, _its_gradient), trained_part("reinforce")),
    mistakes={
        "the sign is turned": Mistake(
            "An optimizer minimizes the loss, but the expected reward should rise.",
            lambda logps, rewards, b: ((rewards - b) * logps).mean(),
        ),
        "the baseline is missing": Mistake(
            "Subtract the baseline from every reward.", lambda logps, rewards, b: -(rewards * logps).mean()
        ),
        "the baseline is added": Mistake(
            "The advantage says how much better a reward is *than* the baseline.",
            lambda logps, rewards, b: -((rewards + b) * logps).mean(),
        ),
        "the baseline is subtracted from the loss": Mistake(
            "The baseline belongs to the reward: r − b, before it is multiplied.",
            lambda logps, rewards, b: -(rewards * logps - b).mean(),
            also=(lambda logps, rewards, b: -(rewards * logps).mean() - b,),
        ),
        "the samples are added up": Mistake("Take the mean.", lambda logps, r, b: -((r - b) * logps).sum()),
        "it is made of probabilities": Mistake(
            "The logarithm belongs into the loss: ∇ log π, not ∇π.",
            lambda logps, rewards, b: -((rewards - b) * logps.exp()).mean(),
        ),
        "the mean of the rewards is the baseline": Mistake(
            "Use the baseline that is handed in.",
            lambda logps, rewards, b: -((rewards - rewards.mean()) * logps).mean(),
        ),
        "there is one loss per sample": Mistake(
            "A loss is one number.", lambda logps, rewards, b: -(rewards - b) * logps
        ),
        "two means are multiplied": Mistake(
            "Multiply sample by sample, then take the mean.",
            lambda logps, rewards, b: -(rewards - b).mean() * logps.mean(),
        ),
    },
)


# ---- best_baseline ----


def best_baseline(probabilities: Tensor, rewards: Tensor) -> Tensor:
    """E[|g|² R] / E[|g|²], with g the gradient of log π(a) for the scores of a softmax: one at a, minus π."""
    grad_logp = torch.eye(len(probabilities)) - probabilities
    weights = probabilities * grad_logp.square().sum(dim=1)
    return weights @ rewards / weights.sum()


def _some_policy(answers: int, shift: float) -> Callable[[random.Random], Call]:
    """A policy of twentieths, and rewards that differ, all larger by `shift`."""

    def draw(rng: random.Random) -> Call:
        while True:
            cuts = [0, *sorted(rng.sample(range(1, 20), answers - 1)), 20]
            shares = [high - low for low, high in zip(cuts, cuts[1:], strict=False)]
            rewards = [rng.randrange(-2, 5) / 2 for _ in shares]
            if len(set(shares)) > 1 and len(set(rewards)) > 1:
                return call(torch.tensor(shares) / 20, torch.tensor(rewards) + shift)

    return draw


def _weighted_by(weights_of: Callable[[Tensor], Tensor]) -> Callable:
    """A mean of the rewards with other weights."""

    def wrong(probabilities, rewards):
        weights = weights_of(probabilities)
        return weights @ rewards / weights.sum()

    return wrong


def _lengths(probabilities: Tensor) -> Tensor:
    return (torch.eye(len(probabilities)) - probabilities).norm(dim=1)


check_best_baseline = Exercise(
    best_baseline,
    parts=(
        Part("policies of three answers and of four", 3, lambda rng: _some_policy(rng.choice([3, 4]), 0.0)(rng)),
        Part("each reward is 10 higher", 1, _some_policy(3, 10.0)),
    ),
    mistakes={
        "it is the expected reward": Mistake(
            "A good baseline, but not the best: an answer with a long gradient counts for more.",
            _weighted_by(lambda p: p),
        ),
        "the probabilities are missing": Mistake(
            "Both means are over answers as the policy draws them.", _weighted_by(lambda p: _lengths(p) ** 2)
        ),
        "the length of the gradient is not squared": Mistake(
            "|g|² is the sum of the squares of its entries.", _weighted_by(lambda p: p * _lengths(p))
        ),
        "only one entry of the gradient is taken": Mistake(
            "The other answers' scores have a gradient as well: −π for each of them.",
            _weighted_by(lambda p: p * (1 - p) ** 2),
        ),
        "columns are added up, not rows": Mistake(
            "Row a of eye − probabilities is answer a's gradient: sum(dim=1).",
            _weighted_by(lambda p: p * (torch.eye(len(p)) - p).square().sum(dim=0)),
        ),
        "below, the probabilities are missing": Mistake(
            "E[|g|²] is a mean as well: weigh |g|² with the probabilities.",
            lambda p, rewards: (p * _lengths(p) ** 2) @ rewards / (_lengths(p) ** 2).sum(),
        ),
        "it is not divided by the mean of |g|²": Mistake(
            "Were all rewards 1, what would the baseline have to be?",
            lambda p, rewards: (p * _lengths(p) ** 2) @ rewards,
        ),
        "it is the plain mean of the rewards": Mistake(
            "The policy does not draw all answers equally often.", lambda p, rewards: rewards.mean()
        ),
    },
)


# ---- sample_tokens ----


def sample_tokens(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """(n,), the token of each row: the first whose cumulative probability is larger than u."""
    return rollout.sample_tokens(logits, uniform.double(), temperature=temperature)[0]


def _some_rows(temperatures: tuple[float, ...]) -> Callable[[random.Random], Call]:
    """Eight rows of four logits; no u lies near the end of a piece, so that rounding does not decide."""

    def draw(rng: random.Random) -> Call:
        temperature = rng.choice(temperatures)
        logits = numbers(rng, 8, 4)
        ends = (logits.double() / temperature).softmax(dim=1).cumsum(dim=1)
        uniform: list[float] = []
        while len(uniform) < len(logits):
            u = round(rng.uniform(0.02, 0.98), 3)
            if (ends[len(uniform)] - u).abs().min() > 1e-3:
                uniform.append(u)
        return call(logits, torch.tensor(uniform), temperature)

    return draw


def _by_ends(ends_of: Callable[[Tensor, float], Tensor]) -> Callable[[Tensor, Tensor, float], Tensor]:
    """A wrong answer with other ends (n, V) of the pieces; beyond the last end the last token is taken."""

    def wrong(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
        tokens = (ends_of(logits, temperature) <= uniform[:, None]).sum(dim=1)
        return tokens.clamp(max=logits.shape[1] - 1)

    return wrong


check_sample_tokens = Exercise(
    sample_tokens,
    parts=(
        Part("temperature 1", 2, _some_rows((1.0,))),
        Part("other temperatures", 2, _some_rows((0.3, 0.5, 2.0, 3.0))),
    ),
    mistakes={
        "the most probable token is always taken": Mistake(
            "That is greedy decoding. The token should be drawn by u.",
            lambda logits, uniform, temperature: logits.argmax(dim=1),
        ),
        "the temperature is ignored": Mistake(
            "Divide the logits by the temperature before the softmax.",
            _by_ends(lambda logits, temperature: logits.softmax(dim=1).cumsum(dim=1)),
        ),
        "the logits are multiplied by the temperature": Mistake(
            "A high temperature makes the probabilities more alike.",
            _by_ends(lambda logits, temperature: (logits * temperature).softmax(dim=1).cumsum(dim=1)),
        ),
        "the probabilities are divided by the temperature": Mistake(
            "Divide the *logits*: after the softmax it is too late, the probabilities no longer add up to 1.",
            _by_ends(lambda logits, temperature: (logits.softmax(dim=1) / temperature).cumsum(dim=1)),
            also=(
                lambda logits, uniform, temperature: (
                    (logits.softmax(dim=1) / temperature).cumsum(dim=1) <= uniform[:, None]
                ).sum(dim=1),
            ),
        ),
        "the cumulative sum is missing": Mistake(
            "A piece begins where the one before it ends.", _by_ends(lambda logits, t: (logits / t).softmax(dim=1))
        ),
        "the softmax is missing": Mistake(
            "Logits are no probabilities: the pieces must add up to 1.",
            _by_ends(lambda logits, temperature: (logits / temperature).cumsum(dim=1)),
        ),
        "the softmax runs over the rows": Mistake(
            "The probabilities of one row add up to 1: dim=1.",
            _by_ends(lambda logits, temperature: (logits / temperature).softmax(dim=0).cumsum(dim=1)),
        ),
        "the token after the right one is taken": Mistake(
            "Token 0 is drawn when u lies below the first end, so when *no* end is at most u.",
            lambda *args: sample_tokens(*args) + 1,
        ),
        "the token before the right one is taken": Mistake(
            "Count all ends that are at most u.", lambda *args: sample_tokens(*args) - 1
        ),
        "ends above u are counted": Mistake(
            "Count the ends that u has already passed.",
            lambda logits, uniform, temperature: 4 - sample_tokens(logits, uniform, temperature),
        ),
        "the pieces are sorted": Mistake(
            "After sorting, a place is no longer the number of a token. Keep the pieces in the vocabulary's order.",
            _by_ends(
                lambda logits, temperature: (
                    (logits / temperature).softmax(dim=1).sort(dim=1, descending=True).values.cumsum(dim=1)
                )
            ),
        ),
        "one u serves all rows": Mistake(
            "Row i is drawn with `uniform[i]`: `uniform[:, None]` is a column.",
            lambda logits, uniform, temperature: sample_tokens(
                logits, uniform[:1].expand(len(uniform)).clone(), temperature
            ),
        ),
        "the result has two dimensions": Mistake(
            "One token per row, shape (n,).", lambda *args: sample_tokens(*args)[:, None]
        ),
    },
)
