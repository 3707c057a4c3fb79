"""Sample G completions for each of N prompts, and keep what a policy-gradient step needs of them.

A rollout has B = N·G rows, and the rows of a group are adjacent. `generate` processes each prompt once and then draws
one token per completion and step until a stop token. While completions of a group are still identical, they are
computed only once (`grpo_edu.fast.decoding`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_edu.config import COUNT, GRPOConfig, field_bounds, require
from grpo_edu.fast.cores import FreeCores
from grpo_edu.fast.lora import has_adapters, merge_lora
from grpo_edu.fast.memory import large_blocks_kept
from grpo_edu.prompts import text_after_answer
from grpo_edu.tensors import widest_float_dtype
from grpo_edu.turns import Conversations, Environment, reset_environments, token_id

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draw one token per sample by inverting the cumulative distribution.

    token = the first v with Σ_{w ≤ v} p(w) > u, where u ~ U[0, 1) and p = softmax(logits / temperature), filtered.
    The sum is computed in float64, because in float32 the unlikely tokens of a large vocabulary would be lost.

    Args:
        logits: (n, V), not yet divided by the temperature.
        uniform: (m,) float64 in [0, 1), one number per sample; the sum has its type.
        rows: (m,) long, the row of `logits` for each sample; None: one sample per row, so m = n.
        temperature: 0 selects the most likely token.
        top_p, top_k: see `filter_logits`.

    Returns:
        Tokens (m,) long, and their log-probabilities (m,) float32 in nats, at this temperature (1 if it is 0), before
        filtering.

    >>> logits = torch.log(torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]]))
    >>> tokens, logps = sample_tokens(logits, torch.tensor([0.1, 0.6], dtype=torch.float64))
    >>> tokens.tolist(), [round(p, 3) for p in logps.exp().tolist()]
    ([0, 2], [0.2, 0.5])
    """
    scaled = logits.float() / temperature if temperature not in (0, 1) else logits.float()
    logps = torch.log_softmax(scaled, dim=-1)
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    if temperature == 0:
        tokens = logps.argmax(dim=-1)[rows]
    else:
        tokens = invert_cdf(filter_logits(logps, top_k=top_k, top_p=top_p).exp(), uniform, rows)
    return tokens, logps[rows, tokens]


def filter_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Set the logits (n, V) of tokens that must not be sampled to -inf, with the order and definitions of transformers.

    `top_k` keeps the k most likely tokens, and those that tie with the last of them (0 is off). Then `top_p` keeps the
    smallest set of the most likely tokens with a total probability of at least p (1 is off; nucleus sampling, arXiv
    1904.09751). The most likely token is always kept. The logits are already divided by the temperature.

    >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    >>> filter_logits(logits, top_p=0.7).exp().round(decimals=2)
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        removed[:, -1] = False
        logits = logits.masked_fill(removed.scatter(1, order, removed), float("-inf"))
    return logits


def invert_cdf(probabilities: Tensor, uniform: Tensor, rows: Tensor) -> Tensor:
    """Return the first v with Σ_{w ≤ v} p(w) > u · Σ_w p(w) for each sample, in two stages, which save most of the sum.

    The first stage finds the block of 256 tokens in which the sum passes u, and the second the token in this block.

    Args:
        probabilities: (n, V), at least 0; after filtering they do not sum to 1.
        uniform: (m,), see `sample_tokens`.
        rows: (m,) long, the row of `probabilities` for each sample.

    Returns:
        (m,) long, each with a probability above 0.

    >>> invert_cdf(torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([0.4, 0.5], dtype=torch.float64), torch.tensor([0, 0]))
    tensor([0, 2])
    """
    size, dtype = 256, uniform.dtype
    blocks = torch.nn.functional.pad(probabilities, (0, -probabilities.shape[1] % size)).unflatten(1, (-1, size))
    ends = blocks.sum(dim=2, dtype=dtype).cumsum(dim=1)[rows]  # (m, blocks), of each block
    threshold = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, threshold, right=True).clamp(max=ends.shape[1] - 1)  # (m, 1)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = before + blocks[rows, block.squeeze(1)].cumsum(dim=1, dtype=dtype)  # (m, 256)
    below_last = torch.nextafter(inside[:, -1:], torch.zeros((), dtype=dtype, device=inside.device))
    place = torch.searchsorted(inside, torch.minimum(threshold, below_last), right=True)  # the two sums may round apart
    return (block * size + place).squeeze(1).clamp(max=probabilities.shape[1] - 1)  # NaN is found by the caller


@dataclass(frozen=True)
class Rollout:
    """B = N·G sampled completions with at most P prompt tokens and C completion tokens. All tensors are detached."""

    prompts: list[str]  # B rendered prompts: each of the N prompts G times
    completions: list[str]  # B decoded completions, without special tokens
    prompt_ids: Tensor  # (B, P) long, left-padded
    prompt_mask: Tensor  # (B, P) long, 1 for a token, 0 for padding
    completion_ids: Tensor  # (B, C) long, right-padded; no completion is longer than C
    completion_mask: Tensor  # (B, C) long, 1 up to and including the first stop token
    sampling_per_token_logps: Tensor  # (B, C) float32, nats; 0 at padding
    is_truncated: Tensor  # (B,) bool: the limit was reached before a stop token
    num_generations: int  # G
    tool_mask: Tensor | None = None  # (B, C) long, as in TRL: 0 for a token of the environment, else 1; None: no such
    turn_rewards: Tensor | None = None  # (B, T) float32, of each turn, NaN if a row had fewer; None: no environment
    environments: Sequence[Environment] | None = None  # B, as the conversations left them

    @property
    def policy_mask(self) -> Tensor:
        """(B, C) long, 1 for the tokens that the policy wrote: no padding, and no token of an environment."""
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    @property
    def turn_ids(self) -> Tensor:
        """(B, C) long, the turn of each token, counted from 0: how many observations began before it or at it."""
        if self.tool_mask is None:
            return torch.zeros_like(self.completion_ids)
        by_policy = self.tool_mask != 0
        begins = torch.zeros_like(by_policy)
        begins[:, 1:] = by_policy[:, :-1] & ~by_policy[:, 1:]
        return begins.long().cumsum(dim=1)

    def __post_init__(self) -> None:
        rows = len(self.prompts)
        if self.num_generations < 1 or rows % self.num_generations:
            raise ValueError(f"prompts has {rows} rows, not a multiple of num_generations = {self.num_generations}")
        if len(self.completions) != rows:
            raise ValueError(f"completions must have {rows} entries, one per prompt, got {len(self.completions)}")
        prompt_shape, completion_shape = (rows, self.prompt_ids.shape[-1]), (rows, self.completion_ids.shape[-1])
        shapes = dict.fromkeys(("prompt_ids", "prompt_mask"), prompt_shape)
        shapes |= dict.fromkeys(("completion_ids", "completion_mask", "sampling_per_token_logps"), completion_shape)
        shapes |= {} if self.tool_mask is None else {"tool_mask": completion_shape}
        shapes |= {} if self.turn_rewards is None else {"turn_rewards": (rows, self.turn_rewards.shape[-1])}
        for name, shape in (shapes | {"is_truncated": (rows,)}).items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(getattr(self, name).shape)}")


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    num_generations: int,
    max_completion_length: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_tokens: Sequence[int | str] = (),
    environments: Sequence[Environment] | None = None,
    max_turns: int | None = None,
    pack_weights: bool = True,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Sample `num_generations` completions of every prompt.

    Token t of a completion is drawn from softmax(logits_t / temperature), after filtering. This is the distribution of
    transformers' `generate`, several times faster.

    Args:
        model: a causal language model. It is used in eval mode without gradient, and then put back into its own mode.
        tokenizer: its tokenizer, with a pad token.
        prompts: N rendered prompts (`grpo_edu.prompts.render_prompt`); no special tokens are added to them.
        num_generations: G, completions per prompt. It may be 1, because an evaluation needs no groups.
        max_completion_length: the largest number of tokens in a completion.
        temperature, top_p, top_k: see `sample_tokens`; without filters by default.
        stop_tokens: ids or texts of further tokens that end a completion.
        environments: B environments after `reset`, one per completion (`grpo_edu.turns`). Their observations
            count towards max_completion_length.
        max_turns: the largest number of turns with an environment; None: no limit but the number of tokens.
        pack_weights: sample from a packed copy of a large model's weights where there is plenty of memory, see
            `grpo_edu.fast.packed_weights`.
        generator: random number generator; the same random seed gives the same rollout.

    Returns:
        A `Rollout` of B = N·G rows. Its `sampling_per_token_logps` are the log-probabilities at this temperature (1 if
        it is 0) *before* filtering, as `grpo_edu.fast.packing.per_token_logps` computes them. The importance ratio of
        the first update is therefore 1, apart from rounding.

    Raises:
        ValueError: an argument is out of range, a prompt is too long for the model's context, an entry of `stop_tokens`
            is not a token, the tokenizer has no pad or stop token, the model's logits are not finite, or the chat
            template has no turns for an environment's observations.
        RuntimeError: an environment raised an exception, or did not return.
    """
    from grpo_edu.fast.decoding import TreeDecoder  # imports transformers
    from grpo_edu.fast.packed_weights import packed_weights

    filters: dict[str, Any] = dict(top_p=top_p, top_k=top_k)
    for name, value in {"max_completion_length": max_completion_length, **filters}.items():
        field_bounds(GRPOConfig)[name].check(name, value)
    COUNT.check("num_generations", num_generations)
    require("temperature", temperature, 0 <= temperature < inf, "must be 0 (greedy) or positive")
    if isinstance(model, str):
        raise ValueError(f"model must be a loaded model, got the name {model!r}; load it with load_policy")
    stop_ids = stop_token_ids(model, tokenizer, stop_tokens)
    prompt_ids, prompt_mask = encode_prompts(model, tokenizer, prompts, max_completion_length=max_completion_length)
    shape = (len(prompts) * num_generations, max_completion_length)
    ids, logps = prompt_ids.new_full(shape, tokenizer.pad_token_id), torch.zeros(shape, device=model.device)
    conversations = None if environments is None else Conversations(environments, tokenizer, ids, stop_ids, max_turns)
    lengths = prompt_ids.new_zeros(shape[0])  # 0: not yet complete
    # One uniform number per token is drawn in advance, so that no sample depends on which others are complete.
    source = generator.device if generator is not None else "cpu"
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device=source)
    uniform = drawn.to(model.device, widest_float_dtype(model.device))
    packed = packed_weights(model, *shape, active=pack_weights)
    with _inference(model), FreeCores() as cores, large_blocks_kept(model), packed:
        decoder = TreeDecoder(model, prompt_ids, prompt_mask, max_completion_length, shape[0])
        samples = torch.arange(shape[0], device=model.device)  # those that are not yet complete
        rows = samples // num_generations  # the row of the decoder for each of them
        for step in range(max_completion_length):
            cores.look()
            tokens, logps[samples, step] = sample_tokens(
                decoder.logits, uniform[samples, step], rows=rows, temperature=temperature, **filters
            )
            if conversations is not None:
                tokens, stopped = conversations.write(samples, step, tokens)
            else:
                ids[samples, step], stopped = tokens, torch.isin(tokens, stop_ids)
            if stopped.any():
                lengths[samples[stopped]] = step + 1
                samples, rows, tokens = (part[~stopped] for part in (samples, rows, tokens))
            if not len(samples) or step + 1 == max_completion_length:
                break
            rows = decoder.step(rows, tokens)
        del decoder  # and its cache, before `large_blocks_kept` returns to the system what is free
    if not torch.isfinite(logps).all():
        raise ValueError("model: the logits are not finite, so training has diverged; try a smaller learning_rate")
    if conversations is not None:
        logps = logps * conversations.mask  # the policy did not choose what the environment wrote
        conversations.warn_if_endless(lengths)
    return _rollout(tokenizer, prompts, prompt_ids, prompt_mask, ids, logps, lengths, num_generations, conversations)


@dataclass
class Sampler:
    """Samples the rollouts of a training run from its policy, with the sampling settings of the config.

    `grpo_edu.quantization.rollouts` has samplers whose samples come from a quantized copy or from older weights.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: GRPOConfig
    environment: Callable[[], Environment] | None = None  # makes the environment of a conversation, as in TRL
    max_turns: int | None = None

    def policy(self) -> PreTrainedModel:
        """Return the model that samples."""
        return self.model

    def merged_policy(self) -> PreTrainedModel:
        """Return the policy, or a copy of it with merged adapters if it has some."""
        return merge_lora(copy.deepcopy(self.model)) if has_adapters(self.model) else self.model

    def reset(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Environment] | None, list[str]]:
        """Environments for the completions of these problems, and a text for each that is appended to its question."""
        if self.environment is None:
            return None, [""] * len(rows)
        return reset_environments(self.environment, rows, self.config.num_generations)

    def generate(
        self,
        prompts: Sequence[str],
        generator: torch.Generator | None,
        environments: Sequence[Environment] | None = None,
    ) -> Rollout:
        """`num_generations` completions of each rendered prompt."""
        config = self.config
        return generate(
            self.policy(),
            self.tokenizer,
            prompts,
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            environments=environments,
            max_turns=self.max_turns,
            pack_weights=config.memory_budget_gib is None,
            generator=generator,
        )

    def importance_weights(self, old_per_token_logps: Tensor, rollout: Rollout, rows: Tensor) -> Tensor | None:
        """Weights (B, C) of the loss of these rows if another policy sampled; None if the trained policy itself did."""
        return None

    def metrics(self, old_per_token_logps: Tensor, rollout: Rollout) -> dict[str, float]:
        """Metrics of the difference between the policy that sampled and the one that is trained; here there is none."""
        return {}


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int | str] = ()
) -> Tensor:
    """Ids (S,) that end a completion: `stop_tokens`, the tokenizer's EOS and those of the model's generation config.

    Raises:
        ValueError: there are none, or an entry of `stop_tokens` is not exactly one token of the tokenizer.
    """
    if isinstance(stop_tokens, str):
        raise ValueError(f"stop_tokens must be a list of tokens, got the string {stop_tokens!r}")
    ids = end_token_ids(tokenizer, getattr(model, "generation_config", None))
    ids |= {token_id(tokenizer, stop, "stop_tokens") for stop in stop_tokens}
    if not ids:
        raise ValueError("tokenizer has no EOS token, so no completion could end; set tokenizer.eos_token")
    return torch.tensor(sorted(ids), device=model.device)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> set[int]:
    """Return the ids of the tokenizer's EOS and of a model's generation config, as far as there are any."""
    eos = getattr(generation_config, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(eos if isinstance(eos, Sequence) else [eos])} - {None}


def find_unused_turn_end(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> str | None:
    """Return the token that ends a turn in the chat template if it is not one of `stop_ids`, otherwise None.

    A model that was trained with such a template writes that token and never one that ends its completion, so every
    completion is cut off.
    """
    after = tokenizer(text_after_answer(tokenizer), add_special_tokens=False)["input_ids"][:1]
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    if not after or after[0] not in special or after[0] in stop_ids:
        return None
    return str(tokenizer.convert_ids_to_tokens(after)[0])


def encode_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, max_completion_length: int
) -> tuple[Tensor, Tensor]:
    """Tokenize N rendered prompts and pad them on the left; returns ids and mask, each (N, P) long.

    Raises:
        ValueError: `prompts` is empty or not a list of strings, a prompt has no tokens or is too long for the model's
            context, or the tokenizer has no pad token.
    """
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts must be a list of rendered strings; see grpo_edu.prompts.render_prompt")
    if not prompts:
        raise ValueError("prompts is empty; pass at least one")
    if tokenizer.pad_token_id is None:
        raise ValueError("tokenizer has no pad token; set tokenizer.pad_token to one that never ends a completion")
    encoded = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    context = getattr(model.config, "max_position_embeddings", None)
    for index, prompt in enumerate(encoded):
        if not prompt:
            raise ValueError(f"prompts[{index}] has no tokens; render it with grpo_edu.prompts.render_prompt")
        if context and len(prompt) + max_completion_length > context:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens, which with a completion of up to {max_completion_length} "
                f"exceed the model's context of {context}; shorten the prompt or lower max_completion_length"
            )
    width = max(map(len, encoded))
    padded = [[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in encoded]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in encoded]
    return torch.tensor(padded, device=model.device), torch.tensor(mask, device=model.device)


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """A context in eval mode and without autograd, after which each submodule has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def _rollout(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    ids: Tensor,
    logps: Tensor,
    lengths: Tensor,
    num_generations: int,
    conversations: Conversations | None,
) -> Rollout:
    """Trim (B, max_completion_length) to the longest completion and decode it; a length of 0 means truncated."""
    is_truncated = lengths == 0
    lengths = lengths.masked_fill(is_truncated, ids.shape[1])
    longest = int(lengths.max())
    mask = torch.arange(longest, device=ids.device) < lengths[:, None]
    written = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
    return Rollout(
        prompts=[prompt for prompt in prompts for _ in range(num_generations)],
        completions=tokenizer.batch_decode(written, skip_special_tokens=True),
        prompt_ids=prompt_ids.repeat_interleave(num_generations, dim=0),
        prompt_mask=prompt_mask.repeat_interleave(num_generations, dim=0),
        completion_ids=ids[:, :longest].contiguous(),
        completion_mask=mask.long(),
        sampling_per_token_logps=logps[:, :longest].contiguous(),
        is_truncated=is_truncated,
        num_generations=num_generations,
        tool_mask=None if conversations is None else conversations.mask[:, :longest].contiguous(),
        turn_rewards=None if conversations is None else conversations.turn_rewards(),
        environments=None if conversations is None else conversations.environments,
    )
