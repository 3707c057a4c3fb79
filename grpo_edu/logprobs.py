"""Log-probabilities of sampled tokens, which a policy-gradient loss differentiates.

`logps_from_logits` is the definition. `per_token_logps` computes the log-probabilities of completions under a model,
each after its own copy of the prompt. `group_logps`, which the trainer uses, returns the same numbers but processes
each prompt only once per group if the model allows it (`grpo_edu.fast.packing`). All functions raise ValueError
for shapes that do not match.
"""

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_edu.fast.chunked_logps import at_least_float32, check_model, score_states
from grpo_edu.fast.packing import block_mask_obstacle, pack_groups, packed_lengths, shared_prefix_logps

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def logps_from_logits(logits: Tensor, ids: Tensor) -> Tensor:
    r"""The log-probability of each sampled token.

    .. math:: \log \pi(o_t) = z_{o_t} - \log \sum_v e^{z_v}

    Args:
        logits: (B, C, V), already shifted (row t predicts token t) and divided by the temperature. Any leading
            dimensions are allowed. Half precision is converted to float32.
        ids: (B, C), token ids below V.

    Returns:
        (B, C), nats.

    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 100.0]]])
    >>> logps_from_logits(logits, torch.tensor([[0, 1], [1, 1]]))
    tensor([[-0.6931, -0.6931],
            [-1.3133,  0.0000]])
    """
    if logits.ndim < 2 or ids.shape != logits.shape[:-1]:
        raise ValueError(f"ids must have the shape of logits {tuple(logits.shape)} without V, got {tuple(ids.shape)}")
    logits = at_least_float32(logits)
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)


def entropies(logits: Tensor) -> Tensor:
    r"""The entropy of the distribution from which each token is sampled.

    .. math:: H_t = -\sum_v p_v \log p_v, \quad p = \mathrm{softmax}(z)

    Args:
        logits: (B, C, V), already shifted and divided by the temperature; -inf for tokens that cannot be sampled.

    Returns:
        (B, C), nats, from 0 (certain) to log V (uniform).

    >>> entropies(torch.tensor([[[0.0, 0.0], [1.0, 0.0]], [[3.0, 0.0], [200.0, 0.0]]]))
    tensor([[0.6931, 0.5822],
            [0.1909, 0.0000]])
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must be (B, C, V), got {tuple(logits.shape)}")
    return torch.special.entr(at_least_float32(logits).softmax(dim=-1)).sum(dim=-1)


def per_token_logps(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The log-probability log π(o_t | prompt, o_<t) of every completion token under a model.

    The result depends only on the tokens whose mask is 1. The amount and the content of the padding have no influence,
    because padding is moved to the end of the row, where a causal model does not see it.

    Args:
        model: a causal language model of transformers.
        prompt_ids: (B, P), left-padded.
        prompt_mask: (B, P), 1 for tokens of the prompt.
        completion_ids: (B, C), right-padded.
        completion_mask: (B, C), 1 up to and including the first EOS; a row may be all zeros.
        temperature: of the sampling; logits are divided by it.
        chunk_size: number of tokens whose logits are in memory at the same time; None: 128 MiB of logits. With several
            chunks, the backward pass computes the logits of each chunk again instead of keeping them.
        with_entropy: also return the entropies.

    Returns:
        (B, C), nats, 0 in the padding, with gradient. With ``with_entropy`` a pair of this and the entropies (B, C),
        nats, 0 in the padding, with gradient.

    Raises:
        ValueError: the shapes do not match, a completion mask has gaps, a prompt is empty, the temperature is not
            positive, or the model is not a causal language model or rescales its logits.

    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1)
    >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_hidden_layers=1, **sizes))
    >>> prompt, completion = torch.tensor([[0, 7], [3, 4]]), torch.tensor([[5, 6, 2], [9, 2, 0]])
    >>> per_token_logps(model, prompt, prompt.sign(), completion, completion.sign()).shape
    torch.Size([2, 3])
    """
    decoder, head = check_model(model, temperature, chunk_size)
    rows = pack_groups(prompt_ids, prompt_mask, completion_ids, completion_mask, 1)
    hidden = decoder(
        input_ids=rows.input_ids, attention_mask=torch.ones_like(rows.input_ids), use_cache=False
    ).last_hidden_state
    source = rows.source
    return score_states(head, hidden, source, completion_ids, completion_mask, temperature, chunk_size, with_entropy)


def group_logps(
    model: "PreTrainedModel",
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    *,
    num_generations: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probabilities of `per_token_logps`, computed with one pass over each prompt per group if possible.

    If the model does not support the mask that `shared_prefix_logps` needs, the function warns and calls
    `per_token_logps`. The arguments and the result are those of `shared_prefix_logps`.
    """
    batch = prompt_ids, prompt_mask, completion_ids, completion_mask
    width = int(packed_lengths(prompt_mask, completion_mask, num_generations).max())
    obstacle = block_mask_obstacle(model, width)
    if not obstacle:
        return shared_prefix_logps(
            model, *batch, num_generations=num_generations, temperature=temperature, with_entropy=with_entropy
        )
    warning = f"{obstacle}; each prompt is processed once per completion, which is slower"
    warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return per_token_logps(model, *batch, temperature=temperature, with_entropy=with_entropy)
