"""Compute the log-probabilities of a whole group in one row, in which the prompt is processed only once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from grpo_edu.fast.chunked_logps import check_model, score_states
from grpo_edu.fast.packing import block_mask, pack_groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shared_prefix_logps(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    num_generations: int,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The result of `grpo_edu.logprobs.per_token_logps`, with each prompt processed once per group.

    A group becomes one row without padding in between: the prompt, then its completions (Prefix Grouper,
    https://arxiv.org/abs/2506.05433). Completions share common prefixes too, so that the row is a tree. If completions
    differ late, as those of a confident policy do, this saves most of the tokens (Tree Training,
    https://arxiv.org/abs/2511.00413). Each token has the position id of its own prompt and completion, and a mask hides
    the other completions in the group from it.

    The mask grows with N · L² for N groups with rows of L tokens, and so does the cost of attention. If the completions
    of a group have many thousands of tokens, pass a part of the group at a time.

    Args:
        model: a causal language model of transformers with "sdpa" or "eager" attention.
        prompt_ids: (B, P), left-padded, a group's rows adjacent and equal.
        prompt_mask: (B, P).
        completion_ids: (B, C), right-padded.
        completion_mask: (B, C).
        num_generations: G >= 1, completions per prompt.
        temperature, chunk_size, with_entropy: as for `per_token_logps`.

    Returns:
        as `per_token_logps`.

    Raises:
        ValueError: as `per_token_logps`; also if B is not a multiple of G, the prompts of a group differ, or the model
            does not support a block mask (see `grpo_edu.fast.packing.block_mask`).

    >>> import torch
    >>> from grpo_edu.logprobs import per_token_logps
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_hidden_layers=1, **sizes))
    >>> prompt, completion = torch.tensor([[0, 7], [0, 7]]), torch.tensor([[5, 6, 2], [9, 2, 0]])
    >>> batch = prompt, prompt.sign(), completion, completion.sign()
    >>> torch.allclose(shared_prefix_logps(model, *batch, num_generations=2), per_token_logps(model, *batch))
    True
    """
    decoder, head = check_model(model, temperature, chunk_size)
    rows = pack_groups(prompt_ids, prompt_mask, completion_ids, completion_mask, num_generations)
    hidden = decoder(
        input_ids=rows.input_ids,
        attention_mask=block_mask(model, rows.seen_until),
        position_ids=rows.position_ids,
        use_cache=False,
    ).last_hidden_state
    return score_states(head, hidden, rows, completion_ids, completion_mask, temperature, chunk_size, with_entropy)
