"""Wrong answers to exercises of `grpo_edu.checks` that are right on many inputs; each must lose points on every seed.

`python -m grpo_edu.checks` tries them next to the mistakes that the exercises know by name.
"""

from __future__ import annotations

import math

import torch

from grpo_edu.losses import per_token_kl

# ---- the values are right, the gradient is missing ----


def logps_by_loop(logits, input_ids, prompt_length, temperature):
    rows = []
    for row_logits, ids in zip(logits.double() / temperature, input_ids.tolist(), strict=True):
        row = []
        for place in range(prompt_length, len(ids)):
            scores = row_logits[place - 1]
            row.append((scores[ids[place]] - scores.exp().sum().log()).item())
        rows.append(row)
    return torch.tensor(rows)


def clip_without_graph(per_token_logps, old_per_token_logps, advantages, epsilon_low, epsilon_high):
    with torch.no_grad():
        ratio = (per_token_logps - old_per_token_logps).exp()
        gain = advantages[:, None]
        return -torch.min(ratio * gain, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * gain)


def k3_by_list(per_token_logps, ref_per_token_logps):
    pairs = zip(per_token_logps.flatten().tolist(), ref_per_token_logps.flatten().tolist(), strict=True)
    return torch.tensor([math.exp(b - a) - (b - a) - 1 for a, b in pairs]).view_as(per_token_logps)


def k3_by_numpy(per_token_logps, ref_per_token_logps):
    return per_token_kl(torch.from_numpy(per_token_logps.numpy()), ref_per_token_logps)


def k3_of_a_detached_ratio(per_token_logps, ref_per_token_logps):
    apart = ref_per_token_logps - per_token_logps
    return apart.exp().detach() - apart - 1


def aggregate_by_list(per_token_loss, mask, loss_type, max_completion_length, update_rows, update_tokens):
    rows = [row[counted == 1].tolist() for row, counted in zip(per_token_loss, mask, strict=True)]
    tokens = sum(rows, [])
    if loss_type == "grpo":
        return sum(sum(row) / len(row) for row in rows) / update_rows
    return sum(tokens) / (update_tokens if loss_type == "dapo" else update_rows * max_completion_length)


def sequence_detached(per_token_logps, old_per_token_logps, completion_mask):
    change = ((per_token_logps - old_per_token_logps) * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)
    return change.detach().exp()


def chunks_by_item(states, chosen, logits_of, vocab_size, size):
    rows = []
    for state, token in zip(states, chosen.tolist(), strict=True):
        logits = torch.cat([logits_of(state[None], one, one + 1)[0] for one in range(vocab_size)])
        rows.append((logits[token] - logits.logsumexp(dim=0)).item())
    return torch.tensor(rows)


# ---- right except on telling inputs ----


def logps_by_exponentials(logits, input_ids, prompt_length, temperature):
    scores = (logits / temperature).exp()
    chances = scores / scores.sum(dim=-1, keepdim=True)
    return chances[:, prompt_length - 1 : -1].log().gather(2, input_ids[:, prompt_length:, None]).squeeze(2)


def settings_anywhere(lines):
    settings = [line for line in lines if "os.environ" in line]
    return ["import os", *settings, *[line for line in lines if line not in (*settings, "import os")]]


def kl_repaired_where_nan(per_token_logps, ref_per_token_logps, completion_mask):
    kl = per_token_kl(per_token_logps, ref_per_token_logps)
    return (kl.masked_fill(kl.isnan(), 0.0) * completion_mask).sum() / completion_mask.sum()


def ratio_times_mask(per_token_logps, old_per_token_logps, loss_mask):
    return bool(((per_token_logps - old_per_token_logps).abs() * loss_mask).max() < 1e-3)


def counts_without_slack(percent, trials, decimals):
    return [count for count in range(trials + 1) if abs(100 * count / trials - percent) <= 0.5 * 10**-decimals]


def rows_rounded_up(weight, bits):
    scale = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return (weight / scale + 0.5).floor().to(torch.int8), scale


def mean_of_equal_parts(mean_gradient, rows, size):
    parts = rows.tensor_split(math.ceil(len(rows) / size))  # nearly equal parts, which are then weighed alike
    return sum(mean_gradient(part) for part in parts) / len(parts)


def rest_counts_once(mean_gradient, rows, size):
    parts = rows.split(size)
    total = sum(mean_gradient(part) * (size if len(part) == size else 1) for part in parts)
    return total / len(rows)


def equal_chunks(states, chosen, logits_of, vocab_size, size):
    width = vocab_size // math.ceil(vocab_size / size)
    logits = [logits_of(states, first, first + width) for first in range(0, vocab_size - width + 1, width)]
    return torch.cat(logits, dim=1).log_softmax(dim=1).gather(1, chosen.clamp(max=vocab_size - 2)[:, None])[:, 0]


def _least_with(*scores):
    def squares_a_mean(fishers):
        values = [fisher(torch.tensor(scores)[:, None]).item() for fisher in fishers]
        return values.index(min(values))

    return squares_a_mean


WRONG_ANSWERS = {
    "completion_logps": (logps_by_loop, logps_by_exponentials),
    "clipped_loss": (clip_without_graph,),
    "k3": (k3_by_list, k3_by_numpy, k3_of_a_detached_ratio),
    "aggregate": (aggregate_by_list,),
    "sequence_ratio": (sequence_detached,),
    "logps_in_chunks": (chunks_by_item, equal_chunks),
    "mend_script": (settings_anywhere,),
    "batch_kl": (kl_repaired_where_nan,),
    "ratio_is_one": (ratio_times_mask,),
    "possible_counts": (counts_without_slack,),
    "quantize_rows": (rows_rounded_up,),
    "accumulated_gradient": (mean_of_equal_parts, rest_counts_once),
    "squares_a_mean": (_least_with(1.0, 2.0), _least_with(2.0, 2.0, -1.0), _least_with(3.0, 1.0, -0.5)),
}
