"""Exercises on policy gradients: expected reward, score function, REINFORCE loss, best baseline and sampling."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.inputs import gradient_of, mask_of, numbers
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
    changes="""
        the first token's probabilities are applied to the second token: first[:, None] * second -> first * second
            `first * second` multiplies column j of `second` by `first[j]`. Which index of `second` is the first token?
        the first token's probabilities are missing: first[:, None] * second -> second
            A completion's probability is π(first) · π(second | first).
            or: (second * rewards).sum(dim=1).mean()
        the second token's probabilities are missing: first[:, None] * second -> first[:, None]
            A completion's probability is π(first) · π(second | first).
            or: first @ rewards.mean(dim=1)
        every completion counts equally: rewards.mean()
            Weight each reward by the probability of its completion.
        the probabilities are added: first[:, None] * second * rewards -> (first[:, None] + second) * rewards
            The probability that both tokens are drawn is the *product* of their probabilities.
        only the most probable completion counts: rewards.flatten()[(first[:, None] * second).argmax()]
            The expected reward is a mean over *all* completions.
        the terms are not added up: first[:, None] * second * rewards
            The expected reward is one number: sum over both tokens.
            or: first * (second * rewards).sum(dim=1)
        the mean of the products is returned, not the sum: .sum() -> .mean()
            The probabilities are already the weights of the mean, so do not divide by the number of completions.
        rows and columns of `second` are swapped: * second * -> * second.T *
            Row i of `second` holds the probabilities *after* token i.
    """,
)


# ---- score_function_gradient ----


def score_function_gradient(scores: Tensor, old_scores: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """(A,), the mean of π/π_old r ∇ log π(a) over samples of an older softmax policy."""
    policy, old_policy = scores.softmax(dim=0), old_scores.softmax(dim=0)
    ratios = (policy / old_policy)[actions]
    directions = torch.eye(len(scores)) - policy
    return ((ratios * rewards)[:, None] * directions[actions]).mean(dim=0)


def _some_pulls(arms: int, samples: int) -> Callable[[random.Random], Call]:
    def draw(rng: random.Random) -> Call:
        actions = [*range(arms), *(rng.randrange(arms) for _ in range(samples - arms))]
        rewards = [rng.randrange(1, 9) / 4 for _ in actions]
        rng.shuffle(actions)
        return call(numbers(rng, arms), numbers(rng, arms), torch.tensor(actions), torch.tensor(rewards))

    return draw


check_score_function_gradient = Exercise(
    score_function_gradient,
    parts=(Part("three arms", 3, _some_pulls(3, 6)), Part("four arms", 1, _some_pulls(4, 9))),
    changes="""
        the ratio of the two policies is missing: ratios * rewards -> rewards
            The older policy drew some arms too often and others too rarely. What corrects for this?
        the ratio is inverted: policy / old_policy -> old_policy / policy
            An arm that the older policy drew too rarely has to count more.
        the gradient is that of the older policy: score_function_gradient(old_scores, old_scores, actions, rewards)
            The samples come from the older policy, but the gradient is that of the policy that is trained.
            or: torch.eye(len(scores)) - policy -> torch.eye(len(scores)) - old_policy
        the scores are divided, not the probabilities: policy / old_policy -> scores / old_scores
            What turns scores into probabilities?
        the sum is divided by the sum of the ratios: ratios * rewards -> ratios / ratios.mean() * rewards
            That is a different estimate, which is biased. Divide by the number of samples.
        the samples are added up, not averaged: .mean(dim=0) -> .sum(dim=0)
            The gradient is estimated by a *mean* over the samples.
        the probabilities are not subtracted: torch.eye(len(scores)) - policy -> torch.eye(len(scores))
            When the score of one action rises, the probabilities of all other actions fall.
        the sign is wrong: ratios * rewards -> -ratios * rewards
            A rewarded action becomes more probable, so its entry must be positive.
        the rewards are missing: ratios * rewards -> ratios
            The gradient of each sample is weighted by its reward.
        there is one gradient per sample: .mean(dim=0) -> .clone()
            Average over the samples, so that one number per arm is left.
        the mean reward is subtracted: ratios * rewards -> ratios * (rewards - rewards.mean())
            That is a baseline. It is a good idea, but use the plain rewards here.
    """,
)


# ---- reinforce_loss ----


def reinforce_loss(logps: Tensor, mask: Tensor, rewards: Tensor, baseline: float) -> Tensor:
    """−mean((r − b) log π) over completions, whose gradient is minus the REINFORCE estimate."""
    completions = (logps * mask).sum(dim=1)
    return -((rewards - baseline) * completions).mean()


def _some_samples(rng: random.Random) -> Call:
    """Completions of different lengths, with random numbers in the padding."""
    samples = rng.choice([3, 4, 5])
    rewards = torch.tensor([rng.randrange(-4, 9) / 4 for _ in range(samples)])
    mask = mask_of([4, *(rng.randrange(1, 4) for _ in range(samples - 1))], 4)
    return call(numbers(rng, samples, 4, low=-3.0, high=-0.1), mask, rewards, rng.choice([0.3, 0.7, 1.4]))


check_reinforce_loss = TrainedExercise(
    reinforce_loss,
    parts=(
        Part("the loss", 2, _some_samples),
        Part("its gradient", 2, _some_samples, ask=gradient_of),
        trained_part("reinforce"),
    ),
    changes="""
        the sign is wrong: -((rewards -> ((rewards
            An optimizer minimizes the loss, but the expected reward should rise.
        the baseline is missing: rewards - baseline -> rewards
            Subtract the baseline from every reward.
        the baseline is added: rewards - baseline -> rewards + baseline
            The advantage says how much better a reward is *than* the baseline.
        the baseline is subtracted from the loss: (rewards - baseline) * completions -> rewards * completions - baseline
            Subtract the baseline from the reward, r − b, before you multiply.
            or: reinforce_loss(logps, mask, rewards, 0.0) - baseline
        the samples are added up, not averaged: .mean() -> .sum()
            Take the mean over the completions.
        padding counts: logps * mask -> logps
            Only tokens with mask 1 belong to the completion.
        the log-probabilities of the tokens are averaged: .sum(dim=1) -> .sum(dim=1) / mask.sum(dim=1)
            A completion's probability is a product over its tokens. What is the logarithm of a product?
        the sum is divided by the number of tokens: .mean() -> .sum() / mask.sum()
            Divide by the number of completions.
            or: .mean() -> .sum() / mask.numel()
        probabilities are used instead of log-probabilities: logps * mask -> logps.exp() * mask
            The loss contains log π, because REINFORCE needs ∇ log π and not ∇π.
            or: * completions) -> * completions.exp())
        the mean reward is used as the baseline: rewards - baseline -> rewards - rewards.mean()
            Use the baseline that is passed in.
        there is one loss per sample: .mean() -> .clone()
            A loss is one number.
        two means are multiplied: baseline) * completions).mean() -> baseline).mean() * completions.mean())
            Multiply for each completion first, then take the mean.
        two faults are left, in what is added up and in where the mean is taken:
            logps * mask -> logps.exp() * mask;
            baseline) * completions).mean() -> baseline).mean() * completions.mean())
            What is the logarithm of a product? And is a mean of products the product of the means?
        two faults are left, in the sign and in where the mean is taken:
            -((rewards -> ((rewards; baseline) * completions).mean() -> baseline).mean() * completions.mean())
            Should the loss rise or fall when a good completion becomes more likely? Is a mean of products the product
            of the means?
        two faults are left, in the sign and in what is added up:
            -((rewards -> ((rewards; logps * mask -> logps.exp() * mask
            Should the loss rise or fall when a good completion becomes more likely? What is the logarithm of a product?
        all three faults are left:
            logps * mask -> logps.exp() * mask;
            -((rewards - baseline) * completions).mean() -> (rewards - baseline).mean() * completions.mean()
            Go through the function by hand for the worked example, as the larger hint of the task says.
    """,
)


# ---- best_baseline ----


def best_baseline(probabilities: Tensor, rewards: Tensor) -> Tensor:
    """E[|g|² R] / E[|g|²], with g the gradient of log π(a) for the scores of a softmax: one at a, minus π."""
    grad_logp = torch.eye(len(probabilities)) - probabilities
    weights = probabilities * grad_logp.square().sum(dim=1)
    return weights @ rewards / weights.sum()


def _some_policy(answers: int, shift: float) -> Callable[[random.Random], Call]:
    """Return a function that draws a policy of twentieths, and rewards that differ, all larger by `shift`."""

    def draw(rng: random.Random) -> Call:
        while True:
            cuts = [0, *sorted(rng.sample(range(1, 20), answers - 1)), 20]
            shares = [high - low for low, high in zip(cuts, cuts[1:], strict=False)]
            rewards = [rng.randrange(-2, 5) / 2 for _ in shares]
            if len(set(shares)) > 1 and len(set(rewards)) > 1:
                return call(torch.tensor(shares) / 20, torch.tensor(rewards) + shift)

    return draw


check_best_baseline = Exercise(
    best_baseline,
    parts=(
        Part("policies of three answers and of four", 3, lambda rng: _some_policy(rng.choice([3, 4]), 0.0)(rng)),
        Part("each reward is 10 higher", 1, _some_policy(3, 10.0)),
    ),
    changes="""
        the expected reward is returned: probabilities @ rewards
            That is a good baseline, but not the best one: an answer with a long gradient has to count for more.
        the probabilities are missing: probabilities * grad_logp.square() -> grad_logp.square()
            Both expectations are over the answers that the policy draws, so weight each answer by its probability.
        the length of the gradient is not squared: grad_logp.square().sum(dim=1) -> grad_logp.norm(dim=1)
            |g|² is the sum of the squares of the gradient's entries.
        only one entry of the gradient is used: grad_logp.square().sum(dim=1) -> (1 - probabilities) ** 2
            The gradient has an entry for the score of every answer. It is −π for each of the other answers.
        columns are added up, not rows: sum(dim=1) -> sum(dim=0)
            An answer's gradient is one row of the matrix of directions. Which sum gives one number for each row?
        the probabilities are missing in the denominator: / weights.sum() -> / grad_logp.square().sum()
            E[|g|²] is an expectation as well: weight |g|² by the probabilities.
        the sum is not divided by E[|g|²]: weights @ rewards / weights.sum() -> weights @ rewards
            If all rewards were 1, the baseline would have to be 1 as well.
        the unweighted mean of the rewards is returned: rewards.mean()
            The policy does not draw all answers equally often.
    """,
)


# ---- sample_tokens ----


def sample_tokens(logits: Tensor, uniform: Tensor, temperature: float, min_p: float) -> Tensor:
    """(n,), the token of each row, among those with at least min_p times the highest probability."""
    shares = (logits / temperature).softmax(dim=1)
    kept = shares * (shares >= min_p * shares.amax(dim=1, keepdim=True))
    ends = kept.cumsum(dim=1) / kept.sum(dim=1, keepdim=True)
    return (ends <= uniform[:, None]).sum(dim=1).clamp(max=logits.shape[1] - 1)


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
        kept = shares * (shares >= min_p)
        ends = kept.cumsum(dim=1) / kept.sum(dim=1, keepdim=True)
        uniform: list[float] = []
        while len(uniform) < len(logits):
            u = round(rng.uniform(0.02, 0.98), 3)
            if (ends[len(uniform)] - u).abs().min() > 1e-3:
                uniform.append(u)
        return call(logits, torch.tensor(uniform), temperature, min_p)

    return draw


check_sample_tokens = Exercise(
    sample_tokens,
    parts=(
        Part("temperature 1", 2, _some_rows((1.0,), (0.1, 0.25)), draws=16),
        Part("other temperatures", 2, _some_rows((0.5, 2.0, 3.0), (0.1, 0.25, 0.5)), draws=16),
    ),
    changes="""
        the most probable token is always taken: logits.argmax(dim=1)
            That is greedy decoding. Use u to draw the token.
        no token is left out: shares * (shares >= min_p * shares.amax(dim=1, keepdim=True)) -> shares
            The last argument, `min_p`, decides which tokens are left out.
        the remaining probabilities do not add up to 1:
            kept.cumsum(dim=1) / kept.sum(dim=1, keepdim=True) -> kept.cumsum(dim=1)
            The remaining pieces must fill the line from 0 to 1 again.
            or: .clamp(max=logits.shape[1] - 1) -> .long(); / kept.sum(dim=1, keepdim=True) -> / 1
        `min_p` is used as a probability: min_p * shares.amax(dim=1, keepdim=True) -> min_p
            `min_p` is a share of the *highest* probability in the row.
        the limit uses the highest probability of all rows: shares.amax(dim=1, keepdim=True) -> shares.max()
            Each row has its own highest probability.
        the limit is applied to the logits:
            shares >= min_p * shares.amax(dim=1, keepdim=True) -> logits >= min_p * logits.amax(dim=1, keepdim=True)
            Logits may be negative, so compare probabilities.
        the limit is applied before the temperature:
            shares >= min_p * shares.amax(dim=1, keepdim=True) -> (logits - logits.amax(1, keepdim=True)).exp() >= min_p
            Divide by the temperature first, because it changes how far apart the probabilities are.
        the temperature is ignored: logits / temperature -> logits
            Divide the logits by the temperature before the softmax.
        the logits are multiplied by the temperature: logits / temperature -> logits * temperature
            A high temperature makes the probabilities more alike.
        the softmax is taken over the rows: .softmax(dim=1) -> .softmax(dim=0)
            The probabilities of one row add up to 1: dim=1.
        the token after the right one is taken: sample_tokens(logits, uniform, temperature, min_p) + 1
            Token 0 is drawn if u lies below the first end. In this case *no* end is less than or equal to u.
        the pieces are sorted: kept.cumsum(dim=1) -> kept.sort(dim=1, descending=True).values.cumsum(dim=1)
            After sorting, a position is no longer the id of a token. Keep the order of the vocabulary.
        the position among the remaining tokens is returned:
            (ends <= uniform[:, None]).sum(dim=1) -> ((ends <= uniform[:, None]) & (kept > 0)).sum(dim=1)
            The id of a token is its position in the whole vocabulary.
        the result has two dimensions: sample_tokens(logits, uniform, temperature, min_p)[:, None]
            Return one token per row, shape (n,).
    """,
)
