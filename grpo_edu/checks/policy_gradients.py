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


def score_function_gradient(scores: Tensor, old_scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """(A,), the mean of π/π_old r ∇ log π(a) over samples of an older softmax policy."""
    weights = (scores.softmax(dim=0) / old_scores.softmax(dim=0))[actions]
    return ((weights * rewards)[:, None] * _directions(scores)[actions]).mean(dim=0)


def _directions(scores: Tensor) -> Tensor:
    return torch.eye(len(scores)) - scores.softmax(dim=0)


def _some_pulls(arms: int, samples: int) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        actions = [*range(arms), *(rng.randrange(arms) for _ in range(samples - arms))]
        rewards = [rng.randrange(1, 9) / 4 for _ in actions]
        rng.shuffle(actions)
        return call(numbers(rng, arms), numbers(rng, arms), torch.tensor(actions), torch.tensor(rewards))

    return draw


def _weighted_gradient(
    weights_of: Callable[[Tensor, Tensor, Tensor], Tensor], directions_of: Callable[[Tensor], Tensor] = _directions
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A wrong answer with other weights (n,) of the samples, weights_of(π, π_old, actions), or other directions."""

    def wrong(scores: Tensor, old_scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        weights = weights_of(scores.softmax(dim=0), old_scores.softmax(dim=0), actions)
        return ((weights * rewards)[:, None] * directions_of(scores)[actions]).mean(dim=0)

    return wrong


def _ratios(policy: Tensor, old: Tensor, actions: Tensor) -> Tensor:
    return (policy / old)[actions]


check_score_function_gradient = Exercise(
    score_function_gradient,
    parts=(Part("three arms", 3, _some_pulls(3, 6)), Part("four arms", 1, _some_pulls(4, 9))),
    mistakes={
        "the samples are taken for those of the policy itself": Mistake(
            "The older policy drew some arms too often and others too seldom. What corrects this?",
            _weighted_gradient(lambda policy, old, actions: torch.ones(len(actions))),
        ),
        "the ratio is upside down": Mistake(
            "An arm that the older policy drew too seldom has to count more.",
            _weighted_gradient(lambda policy, old, actions: (old / policy)[actions]),
        ),
        "the gradient is that of the older policy": Mistake(
            "The samples are old. The gradient belongs to the policy that is trained.",
            lambda scores, old_scores, actions, rewards: score_function_gradient(
                old_scores, old_scores, actions, rewards
            ),
            also=(
                lambda scores, old_scores, actions, rewards: (
                    (_ratios(scores.softmax(0), old_scores.softmax(0), actions) * rewards)[:, None]
                    * _directions(old_scores)[actions]
                ).mean(dim=0),
            ),
        ),
        "the scores are divided, not the probabilities": Mistake(
            "What turns scores into probabilities?",
            lambda scores, old_scores, actions, rewards: (
                ((scores / old_scores)[actions] * rewards)[:, None] * _directions(scores)[actions]
            ).mean(dim=0),
        ),
        "the mean is divided by the sum of the ratios": Mistake(
            "That is another estimate, which is biased. Divide by the number of samples.",
            _weighted_gradient(lambda policy, old, actions: (lambda w: w / w.mean())(_ratios(policy, old, actions))),
        ),
        "the samples are added up": Mistake(
            "The gradient is estimated by a *mean* over the samples.",
            lambda *args: score_function_gradient(*args) * len(args[2]),
        ),
        "the probabilities are not subtracted": Mistake(
            "When one score rises, the other probabilities fall.",
            _weighted_gradient(_ratios, lambda scores: torch.eye(len(scores))),
        ),
        "the sign is turned": Mistake(
            "A rewarded action becomes more probable: its entry must be positive.",
            lambda *args: -score_function_gradient(*args),
        ),
        "the rewards are missing": Mistake(
            "Each sample pulls as strongly as it was rewarded.",
            lambda scores, old_scores, actions, rewards: score_function_gradient(
                scores, old_scores, actions, torch.ones_like(rewards)
            ),
        ),
        "there is one gradient per sample": Mistake(
            "Average over the samples, so that one number per arm is left.",
            lambda scores, old_scores, actions, rewards: (
                (_ratios(scores.softmax(0), old_scores.softmax(0), actions) * rewards)[:, None]
                * _directions(scores)[actions]
            ),
        ),
        "the mean reward is subtracted": Mistake(
            "That is a baseline. It is a good idea, but here the plain rewards are asked for.",
            lambda scores, old_scores, actions, rewards: score_function_gradient(
                scores, old_scores, actions, rewards - rewards.mean()
            ),
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


def sample_tokens(logits: Tensor, uniform: Tensor, temperature: float, min_p: float) -> Tensor:
    """(n,), the token of each row, among those with at least min_p times the highest probability."""
    kept = _kept((logits / temperature).softmax(dim=1), min_p)
    return rollout.sample_tokens(kept.log(), uniform.double())[0]


def _kept(probabilities: Tensor, min_p: float) -> Tensor:
    """Probabilities that are too small become 0; the others are as they were."""
    return probabilities * (probabilities >= min_p * probabilities.amax(dim=1, keepdim=True))


def _ends(probabilities: Tensor) -> Tensor:
    ends = probabilities.cumsum(dim=1)
    return ends / ends[:, -1:]


def _some_rows(temperatures: tuple[float, ...], limits: tuple[float, ...]) -> Callable[[random.Random], Call]:
    """Eight rows of five logits; no u is near the end of a piece and no token near the limit."""

    def draw(rng: random.Random) -> Call:
        temperature, min_p = rng.choice(temperatures), rng.choice(limits)
        while True:
            logits = numbers(rng, 8, 5)
            shares = (logits.double() / temperature).softmax(dim=1)
            shares = shares / shares.amax(dim=1, keepdim=True)
            if (shares - min_p).abs().min() > 1e-3:
                break
        ends = _ends(_kept(shares, min_p))
        uniform: list[float] = []
        while len(uniform) < len(logits):
            u = round(rng.uniform(0.02, 0.98), 3)
            if (ends[len(uniform)] - u).abs().min() > 1e-3:
                uniform.append(u)
        return call(logits, torch.tensor(uniform), temperature, min_p)

    return draw


def _by_ends(ends_of: Callable[[Tensor, float, float], Tensor]) -> Callable[..., Tensor]:
    """A wrong answer with other ends (n, V) of the pieces; beyond the last end the last token is taken."""

    def wrong(logits: Tensor, uniform: Tensor, temperature: float, min_p: float) -> Tensor:
        tokens = (ends_of(logits, temperature, min_p) <= uniform[:, None]).sum(dim=1)
        return tokens.clamp(max=logits.shape[1] - 1)

    return wrong


def _kept_of_logits(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    kept = logits >= min_p * logits.amax(dim=1, keepdim=True)
    return _ends((logits / temperature).softmax(dim=1) * kept)


check_sample_tokens = Exercise(
    sample_tokens,
    parts=(
        Part("temperature 1", 2, _some_rows((1.0,), (0.1, 0.25)), draws=16),
        Part("other temperatures", 2, _some_rows((0.5, 2.0, 3.0), (0.1, 0.25, 0.5)), draws=16),
    ),
    mistakes={
        "the most probable token is always taken": Mistake(
            "That is greedy decoding. The token should be drawn by u.",
            lambda logits, uniform, temperature, min_p: logits.argmax(dim=1),
        ),
        "no token is left out": Mistake(
            "What is the last argument for?", _by_ends(lambda logits, t, min_p: _ends((logits / t).softmax(dim=1)))
        ),
        "what is left does not add up to 1": Mistake(
            "The pieces that are left must fill the line from 0 to 1 again.",
            _by_ends(lambda logits, t, min_p: _kept((logits / t).softmax(dim=1), min_p).cumsum(dim=1)),
            also=(
                lambda logits, uniform, t, min_p: (
                    _kept((logits / t).softmax(dim=1), min_p).cumsum(dim=1) <= uniform[:, None]
                ).sum(dim=1),
            ),
        ),
        "the limit is a probability": Mistake(
            "min_p is a share of the *highest* probability of the row.",
            _by_ends(
                lambda logits, t, min_p: _ends(
                    (lambda p: p * (p >= min_p))((logits / t).softmax(dim=1)).clamp(min=1e-9)
                )
            ),
        ),
        "the limit is measured with the highest probability of all rows": Mistake(
            "Each row has a highest probability of its own.",
            _by_ends(
                lambda logits, t, min_p: _ends((lambda p: p * (p >= min_p * p.max()))((logits / t).softmax(dim=1)))
            ),
        ),
        "the limit is asked of the logits": Mistake(
            "Logits may be negative: compare probabilities.", _by_ends(_kept_of_logits)
        ),
        "the limit comes before the temperature": Mistake(
            "First the temperature, then the limit: the temperature changes how far the tokens are apart.",
            _by_ends(
                lambda logits, t, min_p: _ends((logits / t).softmax(dim=1) * (_kept(logits.softmax(dim=1), min_p) > 0))
            ),
        ),
        "the temperature is ignored": Mistake(
            "Divide the logits by the temperature before the softmax.",
            _by_ends(lambda logits, t, min_p: _ends(_kept(logits.softmax(dim=1), min_p))),
        ),
        "the logits are multiplied by the temperature": Mistake(
            "A high temperature makes the probabilities more alike.",
            _by_ends(lambda logits, t, min_p: _ends(_kept((logits * t).softmax(dim=1), min_p))),
        ),
        "the softmax runs over the rows": Mistake(
            "The probabilities of one row add up to 1: dim=1.",
            _by_ends(lambda logits, t, min_p: _ends(_kept((logits / t).softmax(dim=0), min_p))),
        ),
        "the token after the right one is taken": Mistake(
            "Token 0 is drawn when u lies below the first end, so when *no* end is at most u.",
            lambda *args: sample_tokens(*args) + 1,
        ),
        "the pieces are sorted": Mistake(
            "After sorting, a place is no longer the number of a token. Keep the pieces in the vocabulary's order.",
            _by_ends(
                lambda logits, t, min_p: _ends(
                    _kept((logits / t).softmax(dim=1), min_p).sort(dim=1, descending=True).values
                )
            ),
        ),
        "the number among those that are left is returned": Mistake(
            "The number of a token is its place in the whole vocabulary.",
            lambda logits, uniform, t, min_p: (
                lambda kept: ((_ends(kept) <= uniform[:, None]) & (kept > 0)).sum(dim=1)
            )(_kept((logits / t).softmax(dim=1), min_p)),
        ),
        "the result has two dimensions": Mistake(
            "One token per row, shape (n,).", lambda *args: sample_tokens(*args)[:, None]
        ),
    },
)
