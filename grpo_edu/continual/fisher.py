"""Fisher information: how much the predictions of a model would change if one weight did.

The diagonal of the Fisher matrix holds one number per weight, the mean square of the *score*, which is the gradient of
a log-probability. Whose probability, and over what the mean goes, is where implementations part ways
(van de Ven 2025, arXiv 2502.11756); `fisher_diagonal` has four of those ways under their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.config import check_numbers
from grpo_edu.continual.examples import encode_examples, target_logits
from grpo_edu.tensors import at_least_float32

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_edu.problems.templates import Problem
    from grpo_edu.rollout import Rollout

FISHER_KINDS = ("true", "sampled", "empirical", "batched-empirical")
Example = tuple[Tensor, Tensor]
Forward = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def solution_examples(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[Example]:
    """Worked solutions as examples: (L,) token ids of prompt and solution, and whether each is of the solution."""
    rows = encode_examples(tokenizer, [(problem, problem.solution) for problem in problems])
    return [(torch.tensor(ids), torch.arange(len(ids)) >= start) for ids, start in rows]


def rollout_examples(rollout: Rollout) -> list[Example]:
    """Return a policy's own completions as examples, each (L,) token ids and whether each is of the completion."""
    examples = []
    for row in range(len(rollout.prompts)):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] != 0]
        completion = rollout.completion_ids[row][rollout.completion_mask[row] != 0]
        ids = torch.cat([prompt, completion])
        examples.append((ids, torch.arange(len(ids)) >= len(prompt)))
    return examples


def target_forward(model: nn.Module, ids: Tensor, is_target: Tensor) -> tuple[Tensor, Tensor]:
    """Return a causal language model's logits (T, V) for the T target tokens of one example, and their labels (T,)."""
    return target_logits(model, ids[None], is_target[None])


def fisher_diagonal(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    kind: str = "sampled",
    forward: Forward = target_forward,
    tail: float = 0.0,
    batch_size: int = 32,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    r"""Return the diagonal of the Fisher information of a model's predictions, a mean over predicted tokens.

    With the score :math:`g_t(v) = \nabla_\theta \log p_\theta(v \mid \text{context } t)` and T contexts in all:

    - "true": :math:`\frac1T \sum_t \sum_v p(v)\, g_t(v)^2`, the expectation over the model's own distribution.
    - "sampled": the same with v drawn from p, one draw per token. Unbiased. The scores of an example's tokens are
      summed before they are squared: the products of two tokens' scores have mean 0, since each score has.
    - "empirical": as "sampled", with the tokens of the data in place of drawn ones. It is no Fisher information
      unless the model fits the data: where it does not, it holds the loss's own gradient too. Since the scores of an
      example are summed before they are squared, and the products of two tokens do not vanish here, it is the usual
      empirical Fisher (a mean of squares over tokens) only for examples of one token.
    - "batched-empirical": the square of a batch's *mean* gradient, what a loop over a data loader gives. Gradients
      of different examples cancel before they are squared, so it is too small by about the batch size, and wrong.

    Kirkpatrick et al. 2017 (arXiv 1612.00796), van de Ven 2025 (arXiv 2502.11756). To second order, a small change
    d of the weights moves the predictions by KL ≈ ½ Σ F d² (plus the terms off the diagonal, which are left out).

    Every example has its own backward pass. (For the tiny model and one CPU core that took 21 ms an example, against
    33 ms with `torch.func.vmap`, for which CPU attention has no batching rule.)

    Args:
        model: gives `forward` its logits; weights that want no gradient are left out. It runs in eval mode.
        examples: pairs of tensors that `forward` takes; for a language model see `solution_examples`.
        kind: one of `FISHER_KINDS`.
        forward: (model, *example) → logits (T, V) and labels (T,). The default is for causal language models.
        tail: for "true", the probability that may be left out at each token: the unlikeliest labels, as long as their
            probabilities sum to at most this. 0 takes all V, one backward pass each.
        batch_size: for "batched-empirical", examples a batch.
        generator: for "sampled", the source of the draws.

    Returns:
        parameter name → tensor of its shape, nats per token and squared unit of the weight; never negative.

    Raises:
        ValueError: no examples, an example without labels, an unknown kind, tail outside [0, 1), batch_size < 1, or
            a model without a weight that wants a gradient.

    >>> coin = nn.Linear(1, 2, bias=False)  # two logits, both 0: p = (1/2, 1/2)
    >>> _ = nn.init.zeros_(coin.weight)
    >>> example = torch.ones(1, 1), torch.tensor([0])
    >>> fisher_diagonal(coin, [example], kind="true", forward=lambda model, x, y: (model(x), y))
    {'weight': tensor([[0.2500],
            [0.2500]])}
    """
    weights = _check_arguments(model, examples, kind, tail, batch_size)
    fisher, mean = (  # in at least float32, because squares of small gradients vanish in half precision
        {name: torch.zeros_like(at_least_float32(weight)) for name, weight in weights.items()} for _ in range(2)
    )
    num_labels = 0
    was_training = model.training
    model.eval()
    try:
        for number, example in enumerate(examples, start=1):
            logits, labels = forward(model, *example)
            if not len(labels):
                raise ValueError(f"examples: number {number - 1} has nothing to predict; leave it out")
            num_labels += len(labels)
            logps = at_least_float32(logits).log_softmax(dim=-1)
            if kind == "true":
                _add_expected_squares(fisher, logps, weights, tail)
            elif kind == "sampled":
                drawn = torch.multinomial(logps.detach().exp(), 1, generator=generator)
                _add(fisher, logps.gather(-1, drawn).sum(), weights, power=2)
            elif kind == "empirical":
                _add(fisher, logps.gather(-1, labels[:, None]).sum(), weights, power=2)
            else:
                _add(mean, logps.gather(-1, labels[:, None]).sum(), weights, power=1)
                if number % batch_size == 0 or number == len(examples):
                    size = (number - 1) % batch_size + 1
                    for name, gradient in mean.items():
                        # (Σg/size)², which stands for each of the batch's `size` examples
                        fisher[name].addcmul_(gradient, gradient, value=1 / size)
                        gradient.zero_()
    finally:
        model.train(was_training)
    return {name: total / num_labels for name, total in fisher.items()}


def lightning_fisher(model: nn.Module) -> dict[str, Tensor]:
    """Return a stand-in for Fisher information that looks at no data: a contrast, not an estimate.

    0.1 · m · Var(W) + 0.01 · |θ| for a weight θ of the matrix W, with m by the layer's name: 10 for an embedding, 5
    for attention, 2 for a feed-forward part, 1 for a norm, 1.5 otherwise. This is the "Lightning Fisher" of a public
    project that promised elastic weight consolidation in seconds. It needs no backward pass, and knows of no task.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer.weight.data = torch.tensor([[1.0, 3.0]])  # variance 2, m = 1.5
    >>> lightning_fisher(layer)
    {'weight': tensor([[0.3100, 0.3300]])}
    """
    factors = {"embed": 10.0, "attn": 5.0, "mlp": 2.0, "norm": 1.0}
    weights = _trainable(model)
    fisher = {}
    for name, weight in weights.items():
        weight = weight.detach()
        factor = next((factor for part, factor in factors.items() if part in name), 1.5)
        variance = weight.var() if weight.numel() > 1 else weight.new_zeros(())
        fisher[name] = 0.1 * factor * variance + 0.01 * weight.abs()
    return fisher


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not weights:
        raise ValueError("model: no parameter wants a gradient; load it with load_policy, not frozen or quantized")
    return weights


def _check_arguments(
    model: nn.Module, examples: Sequence[Example], kind: str, tail: float, batch_size: int
) -> dict[str, Tensor]:
    """Check what can be checked before the first forward pass; returns the weights that want a gradient."""
    if kind not in FISHER_KINDS:
        raise ValueError(f"kind: {kind!r} is unknown; choose one of {', '.join(FISHER_KINDS)}")
    if not len(examples):
        raise ValueError("examples is empty: a Fisher needs data; give at least one example")
    check_numbers(tail=tail, batch_size=batch_size)
    return _trainable(model)


def _add(
    total: dict[str, Tensor], value: Tensor, weights: dict[str, Tensor], *, power: int, keep: bool = False
) -> None:
    """Add the gradient of `value`, or its square, to `total`."""
    gradients = torch.autograd.grad(value, list(weights.values()), retain_graph=keep, allow_unused=True)
    for name, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            total[name].add_(gradient.to(total[name].dtype) ** power)


def _add_expected_squares(total: dict[str, Tensor], logps: Tensor, weights: dict[str, Tensor], tail: float) -> None:
    """Add Σ_t Σ_v p(v) g_t(v)², label by label."""
    probabilities = logps.detach().exp()
    ranked, order = probabilities.sort(dim=-1, descending=True)
    left_out = (1 - ranked.cumsum(dim=-1) + ranked) <= tail  # this label and all behind it weigh at most `tail`
    for token, rank in (~left_out).nonzero().tolist():
        label = order[token, rank]
        # the square of √p·g is p·g²
        _add(total, probabilities[token, label].sqrt() * logps[token, label], weights, power=2, keep=True)
