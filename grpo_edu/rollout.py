"""Rollout: sample G completions of each of N prompts and keep what a policy-gradient step needs of them.

A rollout is B = N·G samples, those of a group adjacent. `generate` reads every prompt once (module `decoding`), then
draws one token a sample and step until each has emitted a stop token. Samples that agree so far are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.sampling import sample_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rollout:
    """B = N·G sampled completions, P prompt tokens and C completion tokens wide. All tensors are detached."""

    prompts: list[str]  # B rendered prompts: each of the N repeated G times
    completions: list[str]  # B decoded completions, without special tokens
    prompt_ids: Tensor  # (B, P) long, left-padded
    prompt_mask: Tensor  # (B, P) long, 1 for a token, 0 for padding
    completion_ids: Tensor  # (B, C) long, right-padded; C is the longest completion of the batch
    completion_mask: Tensor  # (B, C) long, 1 through the first stop token, inclusive
    sampling_per_token_logps: Tensor  # (B, C) float32, nats; 0 at padding
    is_truncated: Tensor  # (B,) bool: the room ended before a stop token came
    num_generations: int  # G

    def __post_init__(self) -> None:
        rows = len(self.prompts)
        if self.num_generations < 1 or rows % self.num_generations:
            raise ValueError(f"prompts: {rows} rows do not divide into groups of {self.num_generations}")
        if len(self.completions) != rows:
            raise ValueError(f"completions: expected {rows}, one a prompt, got {len(self.completions)}")
        prompt_shape, completion_shape = (
            (rows, self.prompt_ids.shape[-1]),
            (rows, self.completion_ids.shape[-1]),
        )
        wanted = {
            "prompt_ids": prompt_shape,
            "prompt_mask": prompt_shape,
            "completion_ids": completion_shape,
            "completion_mask": completion_shape,
            "sampling_per_token_logps": completion_shape,
            "is_truncated": (rows,),
        }
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(getattr(self, name).shape)}")


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
    min_p: float = 0.0,
    stop_tokens: Sequence[int | str] = (),
    generator: torch.Generator | None = None,
) -> Rollout:
    """Sample `num_generations` completions of every prompt.

    Token t of a row is drawn from softmax(logits_t / temperature), after the filters if there are any: the
    distribution of transformers' `generate`, several times faster.

    Args:
        model: a causal language model. It runs in eval mode, without gradient, and is left in the mode it
            came in.
        tokenizer: its tokenizer; must have a pad token.
        prompts: N rendered prompts (`prompts.render_prompt`); no special tokens are added to them.
        num_generations: G, completions a prompt (1 is allowed: an evaluation needs no group).
        max_completion_length: most tokens a completion may have.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_p, top_k, min_p: filters, see `sampling.filter_logits`; off by default.
        stop_tokens: tokens, by id or by their text, that end a completion as well as the tokenizer's and model's own.
        generator: the source of all randomness; one seeded alike gives the same rollout.

    Returns:
        A `Rollout` of B = N·G rows. Its `sampling_per_token_logps` are log-probabilities under the model at
        this temperature (1 when greedy) *before* the filters: what `logprobs.per_token_logps` computes, so
        that the ratio of a first update is 1 (but for rounding).

    Raises:
        ValueError: an argument is out of range, a prompt does not fit the model's context, a stop token is none,
            the tokenizer has no pad or stop token, or the model's logits are not finite.
    """
    from grpo_edu.decoding import TreeDecoder  # imports transformers

    _check_arguments(num_generations, max_completion_length, temperature, top_p, top_k, min_p)
    stop_ids = stop_token_ids(model, tokenizer, stop_tokens)
    prompt_ids, prompt_mask = encode_prompts(model, tokenizer, prompts, max_completion_length=max_completion_length)
    shape = (len(prompts) * num_generations, max_completion_length)
    ids, logps = prompt_ids.new_full(shape, tokenizer.pad_token_id), torch.zeros(shape, device=model.device)
    lengths = prompt_ids.new_zeros(shape[0])  # 0: still running
    # One uniform number a token, drawn beforehand: what a sample draws does not depend on which others still run.
    source = generator.device if generator is not None else "cpu"
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=source).to(model.device)

    sample = partial(sample_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)

    with _inference(model):
        decoder = TreeDecoder(model, prompt_ids, prompt_mask, shape[0], max_completion_length)
        samples = torch.arange(shape[0], device=model.device)  # those that still run
        rows = samples // num_generations  # the decoder's row that each of them is in
        for step in range(max_completion_length):
            tokens, logps[samples, step] = sample(decoder.logits, uniform[samples, step], rows=rows)
            ids[samples, step] = tokens
            stopped = torch.isin(tokens, stop_ids)
            if stopped.any():
                lengths[samples[stopped]] = step + 1
                samples, rows, tokens = (part[~stopped] for part in (samples, rows, tokens))
            if not len(samples) or step + 1 == max_completion_length:
                break
            rows = decoder.step(rows, tokens)
    if not torch.isfinite(logps).all():
        raise ValueError("model: its logits are not finite; the training diverged (try a smaller learning rate)")
    return _rollout(tokenizer, prompts, prompt_ids, prompt_mask, ids, logps, lengths, num_generations)


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int | str] = ()
) -> Tensor:
    """Ids that end a completion, (S,) long: the tokenizer's EOS, those of the model's generation config, `stop_tokens`.

    Raises:
        ValueError: there are none, or one of `stop_tokens` is no single token of the tokenizer.
    """
    if isinstance(stop_tokens, str):
        raise ValueError(f"stop_tokens: must be a list of tokens, got the string {stop_tokens!r}")
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, Sequence) else [named])} - {None}
    for stop in stop_tokens:
        found = tokenizer.encode(stop, add_special_tokens=False) if isinstance(stop, str) else [stop]
        if len(found) != 1 or not 0 <= found[0] < len(tokenizer):
            raise ValueError(f"stop_tokens: {stop!r} is no single token of this tokenizer; give one token, or its id")
        ids.update(found)
    if not ids:
        raise ValueError("tokenizer: has no EOS token, so no completion could end; set tokenizer.eos_token")
    return torch.tensor(sorted(ids), device=model.device)


def encode_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_completion_length: int,
) -> tuple[Tensor, Tensor]:
    """Tokenize N rendered prompts and pad them on the left: ids and mask, each (N, P) long.

    Raises:
        ValueError: no prompts, not strings, one without tokens, one that leaves no room for a completion, no
            pad token.
    """
    if isinstance(prompts, str) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts: must be a list of rendered strings; see grpo_edu.prompts.render_prompt")
    if not prompts:
        raise ValueError("prompts: is empty; give at least one")
    if tokenizer.pad_token_id is None:
        raise ValueError("tokenizer: has no pad token; set tokenizer.pad_token to one that never ends a completion")
    encoded = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    context = getattr(model.config, "max_position_embeddings", None)
    for index, prompt in enumerate(encoded):
        if not prompt:
            raise ValueError(f"prompts[{index}]: has no tokens; render it with grpo_edu.prompts.render_prompt")
        if context and len(prompt) + max_completion_length > context:
            raise ValueError(
                f"prompts[{index}]: {len(prompt)} tokens and a completion of up to {max_completion_length} exceed "
                f"the model's context of {context}; shorten the prompt or lower max_completion_length"
            )
    width = max(map(len, encoded))
    padded = [[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in encoded]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in encoded]
    return torch.tensor(padded, device=model.device), torch.tensor(mask, device=model.device)


def _check_arguments(
    num_generations: int,
    max_completion_length: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
) -> None:
    checks = {
        f"num_generations: must be at least 1, got {num_generations}": num_generations >= 1,
        f"max_completion_length: must be at least 1, got {max_completion_length}": max_completion_length >= 1,
        f"temperature: must be 0 (greedy) or positive, got {temperature}": 0 <= temperature < float("inf"),
        f"top_p: must be above 0 and at most 1 (off), got {top_p}": 0 < top_p <= 1,
        f"top_k: must be at least 0 (off), got {top_k}": top_k >= 0,
        f"min_p: must be from 0 (off) to 1, got {min_p}": 0 <= min_p <= 1,
    }
    for message, holds in checks.items():
        if not holds:
            raise ValueError(message)


@contextmanager
def _inference(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode and no autograd inside; every submodule's own mode restored after, also when interrupted."""
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
) -> Rollout:
    """Trim (B, max_completion_length) to the longest completion and decode; a length of 0 means truncated."""
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
    )
