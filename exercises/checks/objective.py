"""Exercises on the GRPO objective: completion masks, log-probabilities, clipping and KL."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from grpo_edu.checks.core import Call, Exercise, Part, call
from grpo_edu.checks.inputs import gradient_of, numbers
from grpo_edu.checks.trained import TrainedExercise, trained_part

# ---- completion_mask ----
ENDS, PAD = [7, 5], 0


def completion_mask(completion_ids: Tensor, eos_token_ids: list[int] | int) -> Tensor:
    """(B, C), 1 through the first of the end tokens inclusive; all ones if there is no end token."""
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids))
    ends_before = is_eos.cumsum(dim=1) - is_eos.long()
    return (ends_before == 0).long()


def _some_completions(rng: random.Random) -> Call:
    """Return a row without an end token, and rows that end with each of the two, padded with 0 or with an end token."""
    rows = [[rng.randrange(1, 5) for _ in range(6)]]
    for end, padding in ((ENDS[0], PAD), (ENDS[1], PAD), (ENDS[0], ENDS[1]), (ENDS[1], ENDS[1])):
        length = rng.randrange(1, 5)
        rows.append([*(rng.randrange(1, 5) for _ in range(length)), end, *[padding] * (5 - length)])
    rng.shuffle(rows)
    return call(torch.tensor(rows), rng.sample(ENDS, 2))


check_completion_mask = Exercise(
    completion_mask,
    parts=(
        Part(
            "ends at different places, and none at all",
            3,
            _some_completions,
            always=(call(torch.tensor([[3, 9, 2, 0], [9, 5, 1, 7], [7, 2, 2, 4]]), [2, 4, 0]),),  # other end tokens
        ),
    ),
    changes="""
        only the first end token of the list is used: completion_mask(completion_ids, eos_token_ids[:1])
            Any token of the list ends a completion.
        only the last end token of the list is used: completion_mask(completion_ids, eos_token_ids[-1:])
            Any token of the list ends a completion. Does a later one overwrite what was found before?
        the end token is masked out: ends_before == 0 -> is_eos.cumsum(dim=1) == 0
            The mask goes through the first end token, *inclusive*, because stopping has to be learned as well.
        padding counts up to a second end token: ends_before == 0 -> is_eos.cumsum(dim=1) <= 1
            `cumsum` counts the position itself: it is 1 at the first end token and after it as well. Count those
            *before* a position.
        ones and zeros are swapped: ends_before == 0 -> ends_before > 0
            The mask is 1 if a token counts.
        end tokens are counted along the batch: completion_mask(completion_ids.T, eos_token_ids).T
            A row is a completion, so use dim=1.
        all end tokens count, and everything between them: ends_before == 0 -> is_eos.flip(1).cumsum(dim=1).flip(1) > 0
            The mask is 1 through the *first* end token only.
        a completion without an end token gets a single 1:
            ends_before == 0 -> torch.arange(is_eos.shape[1]) <= is_eos.int().argmax(dim=1)[:, None]
            `argmax` of a row of zeros is 0. If there is no end token, every token counts.
        only end tokens are masked out: ends_before == 0 -> ~is_eos
            What follows the first end token is not part of the completion.
        only padding is masked out: ends_before == 0 -> completion_ids != PAD
            The pad token may be an end token, too, so go by the first end token.
        the mask is shifted by one: ends_before == 0 -> torch.nn.functional.pad(ends_before == 0, (1, -1))
            The first token of a completion counts, too.
        a completion without an end token is masked out:
            ends_before == 0 -> (ends_before == 0) & is_eos.any(dim=1, keepdim=True)
            If there is no end token, every token counts.
    """,
)


# ---- completion_logps ----
def completion_logps(logits: Tensor, input_ids: Tensor, prompt_length: int, temperature: float) -> Tensor:
    """(B, C), the log-probability of each completion token; row t of the logits predicts token t + 1."""
    rows, ids = logits[:, prompt_length - 1 : -1] / temperature, input_ids[:, prompt_length:]
    logps = rows.log_softmax(dim=-1)
    return logps.gather(2, ids[:, :, None]).squeeze(2)


def _logits(rng: random.Random, rows: int, length: int, prompt: int) -> Call:
    vocabulary = 5
    ids = torch.tensor([[rng.randrange(vocabulary) for _ in range(length)] for _ in range(rows)])
    return call(numbers(rng, rows, length, vocabulary), ids, prompt, rng.choice([0.5, 0.8, 1.5, 2.0]))


def _few_logits(rng: random.Random) -> Call:
    rows, tokens = rng.choice([(1, 3), (3, 1)])
    return _logits(rng, rows, tokens + 2, 2)


LARGE_LOGITS = call(
    torch.tensor([[[100.0, -100.0, 0.0], [-80.0, 90.0, 100.0], [0.0, 0.0, 0.0]]]), torch.tensor([[0, 1, 0]]), 1, 0.8
)

check_completion_logps = Exercise(
    completion_logps,
    parts=(
        Part("prompts of one token to three", 2, lambda rng: _logits(rng, 2, 6, rng.randrange(1, 4))),
        Part("one row, or one completion token; large logits", 1, _few_logits, draws=12, always=(LARGE_LOGITS,)),
        Part("the gradient", 1, lambda rng: _logits(rng, 2, 4, 2), ask=gradient_of),
    ),
    changes="""
        the logits at the token itself are used: logits[:, prompt_length - 1 : -1] -> logits[:, prompt_length:]
            The logits at one token predict the next token.
        the temperature is ignored: completion_logps(logits, input_ids, prompt_length, 1.0)
            The tokens were drawn from softmax(logits / temperature).
        the logits are multiplied by the temperature: -1] / temperature -> -1] * temperature
            A temperature above 1 makes the probabilities more alike.
        the log-probabilities are divided by the temperature:
            -1] / temperature -> -1]; log_softmax(dim=-1) -> log_softmax(dim=-1) / temperature
            The probabilities must still add up to 1, so divide by the temperature before the step that ensures this.
        the prompt is scored as well: completion_logps(logits, input_ids, 1, temperature)
            Only completion tokens were sampled.
        logits are returned, not log-probabilities: rows.log_softmax(dim=-1) -> rows
            What makes the probabilities of a row add up to 1?
        probabilities are returned, not log-probabilities: log_softmax -> softmax
            A log-probability is never positive.
        the exponentials of large logits overflow:
            rows.log_softmax(dim=-1) -> (rows.exp() / rows.exp().sum(dim=-1, keepdim=True)).log()
            exp(100) is too large for fp32. `log_softmax` subtracts the largest logit before it takes exponentials.
            or: log_softmax(dim=-1) -> softmax(dim=-1).log()
        the first completion token is missing: completion_logps(logits, input_ids, prompt_length, temperature)[:, 1:]
            The last token of the prompt predicts it.
        the ids are shifted as well: input_ids[:, prompt_length:] -> input_ids[:, prompt_length - 1 : -1]
            Only the logits begin one position earlier: the ids are those of the completion.
        the most likely token is scored: logps.gather(2, ids[:, :, None]).squeeze(2) -> logps.amax(dim=-1)
            Use the token in `input_ids`, not the most likely one.
        one number per completion is returned:
            completion_logps(logits, input_ids, prompt_length, temperature).sum(dim=1)
            Return one number per token. The loss adds them up later.
        both the logits and the ids begin one position early:
            -1] / temperature -> ] / temperature; input_ids[:, prompt_length:] -> input_ids[:, prompt_length - 1 :]
            The ids are those of the completion. The logits that predict them begin one position earlier.
        the sign is wrong: -completion_logps(logits, input_ids, prompt_length, temperature)
            A log-probability is never positive.
        `squeeze()` removes other dimensions as well: squeeze(2) -> squeeze()
            With one row or one token, `squeeze()` removes that dimension, too. Say which one to remove: `squeeze(2)`.
        the softmax is taken over the wrong dimension: rows.log_softmax(dim=-1) -> rows.log_softmax(dim=1)
            The probabilities add up to 1 over the vocabulary, which is dim=-1.
            or: rows.log_softmax(dim=-1) -> (logits / temperature).log_softmax(dim=1)[:, prompt_length - 1 : -1]
    """,
)


# ---- clipped_loss ----
def clipped_loss(
    per_token_logps: Tensor, old_per_token_logps: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float
) -> Tensor:
    """(B, C), −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) with ρ = exp(logp − old)."""
    gain = advantages[:, None]
    ratio = (per_token_logps - old_per_token_logps).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.min(ratio * gain, clipped * gain)


def _some_policies(rng: random.Random) -> Call:
    """No log-probability is above 0."""
    old = numbers(rng, 4, 3, low=-3.0, high=-0.7)
    change = numbers(rng, 4, 3, low=-0.6, high=0.6)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0]) * round(rng.uniform(0.5, 1.5), 1)
    return call(old + change, old, advantages, *rng.choice([(0.1, 0.3), (0.2, 0.4), (0.3, 0.1), (0.4, 0.2)]))


def _first_update(rng: random.Random) -> Call:
    old = numbers(rng, 2, 3, low=-3.0, high=-0.5)
    return call(old, old.clone(), numbers(rng, 2), 0.2, 0.28)


check_clipped_loss = TrainedExercise(
    clipped_loss,
    parts=(
        Part("both signs, inside and outside the bounds", 3, _some_policies, draws=12),
        Part("the first update, where the ratio is 1", 1, _first_update),
        Part("the gradient", 1, _some_policies, ask=gradient_of),
        trained_part("token loss"),
    ),
    changes="""
        the `min` is missing: torch.min(ratio * gain, clipped * gain) -> clipped * gain
            Clipping alone also stops a token that has to move back. Take the smaller of the two gains.
        `min` is taken before the ratio is multiplied by the advantage:
            (ratio * gain, clipped * gain) -> (ratio, clipped) * gain
            Where the advantage is negative, the smaller ratio is the larger gain: multiply both first.
        the clipped ratio is not multiplied by the advantage: clipped * gain -> clipped
            The minimum is of two gains: ρ A and clip(ρ) A.
        the product is clipped, not the ratio: clipped * gain -> (ratio * gain).clamp(1 - epsilon_low, 1 + epsilon_high)
            Clip ρ first, then multiply by the advantage.
        epsilon_low and epsilon_high are swapped:
            clamp(1 - epsilon_low, 1 + epsilon_high) -> clamp(1 - epsilon_high, 1 + epsilon_low)
            Which of the two says how far the ratio may rise?
        both bounds use the same epsilon: 1 + epsilon_high -> 1 + epsilon_low
            The ratio may rise by one amount and fall by another.
            or: 1 - epsilon_low -> 1 - epsilon_high
        the bounds lie around 0: clamp(1 - epsilon_low, 1 + epsilon_high) -> clamp(-epsilon_low, epsilon_high)
            A ratio is near 1, and so are its bounds.
        nothing is clipped: torch.min(ratio * gain, clipped * gain) -> ratio * gain
            Once a token's ratio has left the bounds, the loss must not push it any further.
        `max` is used in place of `min`, or the minus sign is inside `min`: torch.min -> torch.max
            The objective is the *smaller* of two gains.
        the sign is missing: -torch.min -> torch.min
            An optimizer minimizes the loss, but the objective should become large.
        the ratio is inverted:
            clipped_loss(old_per_token_logps, per_token_logps, advantages, epsilon_low, epsilon_high)
            The policy that is trained is in the numerator, the one that sampled in the denominator.
        the ratio has no exponential:
            (per_token_logps - old_per_token_logps).exp() -> per_token_logps - old_per_token_logps
            These are *log*-probabilities: what undoes a logarithm?
    """,
)


# ---- k3 ----
def k3(per_token_logps: Tensor, ref_per_token_logps: Tensor) -> Tensor:
    """(B, C), exp(d) − d − 1 with d = ref − logp."""
    d = ref_per_token_logps - per_token_logps
    return d.exp() - d - 1


def _two_policies(rng: random.Random) -> Call:
    """No log-probability is above 0, that of the reference neither."""
    logps = numbers(rng, 2, 3, low=-4.0, high=-1.6)
    return call(logps, logps + numbers(rng, 2, 3, low=-1.5, high=1.5))


def _equal_policies(rng: random.Random) -> Call:
    logps = numbers(rng, 2, 3, low=-3.0, high=-0.2)
    return call(logps, logps.clone())


check_k3 = Exercise(
    k3,
    parts=(
        Part("two policies", 2, _two_policies),
        Part("a policy and itself", 1, _equal_policies),
        Part("the gradient", 1, _two_policies, ask=gradient_of),
    ),
    changes="""
        the two policies are swapped: k3(ref_per_token_logps, per_token_logps)
            In k3, the ratio is reference over policy.
        k1 is returned: d.exp() - d - 1 -> -d
            k1 can be negative for a single token; k3 cannot.
        d alone is returned: d.exp() - d - 1 -> d
            d is negative where the token is more likely under the policy. k3 is never negative.
        the 1 is added: d - 1 -> d + 1
            What must the result be if both policies are the same?
        k2 is returned: d.exp() - d - 1 -> d.square() / 2
            k2 is half the square of d. k3 has an exponential.
        the 1 is missing: d - 1 -> d
            What must the result be if both policies are the same?
        the linear term has the wrong sign: - d - 1 -> + d - 1
            Near 0, exp(d) is about 1 + d, and k3 subtracts exactly that.
    """,
)
