"""A token record as a page: how strongly the next update pushes each token of a group, and what the update then did.

`grpo_edu.runs.tokens` makes the records. The page is drawn and computed by JavaScript in `grpo_edu/web`, whose
formulas are compared with `token_pushes`; where no JavaScript runs, the same tokens are shown as a list.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_edu.advantages import group_advantages, rloo_advantages
from grpo_edu.figures.style import COLORS
from grpo_edu.losses import LOSSES, per_token_loss, token_weights, weight_by_rows_given
from grpo_edu.web import json_attribute, read_web


def token_pushes(record: Mapping[str, Any], group: int = 0, **settings: Any) -> tuple[Tensor, Tensor]:
    r"""Return the loss of each token of a group, and how strongly the next update pushes it.

    .. math:: \mathrm{push}_{it} = -\frac{\partial L}{\partial \log \pi(o_{it})}
              = -w_{it} \frac{\partial \ell_{it}}{\partial \log \pi(o_{it})}

    Both come from `grpo_edu.losses`: the loss from `per_token_loss`, the weight w from `token_weights`, the derivative
    from autograd. A positive push makes the token likelier. With one ratio per completion, the sum is over all tokens
    of the completion.

    Args:
        record: the record of a step, from `grpo_edu.runs.tokens`.
        group: its number in the record.
        settings: what differs from the record's settings: loss, scaling, low, high, beta, level; and update, counted
            from 0.

    Returns:
        per_token_loss and pushes, both (G, C), float64, 0 in the padding.

    >>> one = {"reward": 1.0, "advantage": 0.5, "logps": [[-1.0, -2.0], [-0.9, -1.9]]}
    >>> other = {"reward": 0.0, "advantage": -0.5, "logps": [[-1.0], [-1.1]]}
    >>> run = dict(loss="grpo", scaling="none", low=0.2, high=0.2, beta=0.0, level="token")
    >>> record = {"settings": run, "rewards": [1.0, 0.0], "num_tokens": 3, "max_completion_length": 4,
    ...           "groups": [{"index": 0, "completions": [one, other]}]}
    >>> token_pushes(record)[1]
    tensor([[ 0.1250,  0.1250],
            [-0.2500,  0.0000]], dtype=torch.float64)
    """
    asked = {"update": 0, **record["settings"], **settings}
    rows = record["groups"][group]["completions"]
    width = max(1, *(len(row["logps"][0]) for row in rows))

    def table(lists: list[list[float]]) -> Tensor:
        return torch.tensor([[*values, *[0.0] * (width - len(values))] for values in lists], dtype=torch.float64)

    mask = table([row.get("counts") or [1] * len(row["logps"][0]) for row in rows])
    logps = table([row["logps"][asked["update"]] for row in rows]).requires_grad_()
    importance = table([row["importance"] for row in rows]) if "importance" in rows[0] else None
    loss = per_token_loss(
        logps,
        table([row["logps"][0] for row in rows]),
        _advantages(record, group, asked["scaling"]),
        mask,
        ref_per_token_logps=table([row["ref"] for row in rows]) if "ref" in rows[0] else None,
        epsilon=asked["low"],
        epsilon_high=asked["high"],
        beta=asked["beta"],
        loss_type=asked["loss"],
        importance_sampling_level=asked["level"],
        importance_weights=importance,
    ).expand_as(mask)
    weights = _weights(record, mask, asked["loss"])
    (gradient,) = torch.autograd.grad((loss * weights).sum(), logps)
    return loss.detach() * mask, 0.0 - gradient


def _weights(record: Mapping[str, Any], mask: Tensor, loss_type: str) -> Tensor:
    """Return the weights (G, C) of a group in the loss of its whole batch, of which the record may hold only a part."""
    others = len(record["rewards"]) - len(mask)
    whole = torch.cat([mask, torch.zeros(others, mask.shape[1], dtype=mask.dtype)])
    limit, tokens = record["max_completion_length"], record["num_tokens"]
    if LOSSES[loss_type].weight is weight_by_rows_given:  # of the whole batch, whose tokens "dapo" is given
        loss_type = "dapo"
    return token_weights(whole, loss_type=loss_type, max_completion_length=limit, num_items=tokens)[: len(mask)]


def _advantages(record: Mapping[str, Any], group: int, scaling: str) -> Tensor:
    rows = record["groups"][group]["completions"]
    size = len(rows)
    if scaling == "recorded":
        return torch.tensor([row["advantage"] for row in rows], dtype=torch.float64)
    rewards = torch.tensor([torch.nan if one is None else one for one in record["rewards"]], dtype=torch.float64)
    found = (
        rloo_advantages(rewards, size) if scaling == "rloo" else group_advantages(rewards, size, scale_rewards=scaling)
    )
    start = record["groups"][group]["index"] * size
    return found[start : start + size]


def tokens_html(record: Mapping[str, Any], group: int = 0) -> str:
    """Return the tokens of a group as a list, without JavaScript; color and sign show the push of the first update."""
    _, pushes = token_pushes(record, group)
    largest = max(1e-12, pushes.abs().max().item())
    items = []
    for row, one in enumerate(record["groups"][group]["completions"]):
        reward = "–" if one["reward"] is None else f"{one['reward']:.2f}"
        marks = []
        for text, push in zip(one["tokens"], pushes[row].tolist(), strict=False):
            sign, color = ("▲", COLORS[0]) if push > 1e-12 else ("▼", COLORS[1]) if push < -1e-12 else ("", "")
            look = f' style="background:{color}{round(150 * abs(push) / largest):02X}"' if color else ""
            shown = html.escape(text.replace(" ", "␣").replace("\n", "⏎"))
            marks.append(f"<span{look}>{sign}{shown}</span>")
        items.append(f"<li>reward {reward}: <code>{' '.join(marks)}</code></li>")
    prompt = html.escape(record["groups"][group]["prompt"].strip())
    return f'<p style="white-space:pre-wrap">{prompt}</p><ol>{"".join(items)}</ol>'


def first_mixed(record: Mapping[str, Any]) -> int:
    """Return the number of the first group whose rewards differ, or 0."""
    for number, group in enumerate(record["groups"]):
        if len({one["reward"] for one in group["completions"]}) > 1:
            return number
    return 0


def inspector_place(record: Mapping[str, Any]) -> str:
    """The element that the scripts fill: the record, and what is shown where they do not run."""
    return f"<div data-tokens='{json_attribute(record)}'>{tokens_html(record, first_mixed(record))}</div>"


def inspector_html(record: Mapping[str, Any]) -> str:
    """Return the inspector for a notebook's HTML widget, which runs no `<script>`; its style starts it on arrival."""
    return f'{inspector_place(record)}<style onload="{html.escape(_script())}">{read_web("inspector.css")}</style>'


def inspector_page(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return a page with the inspectors of these steps, which needs no other file and no network."""
    parts = [f"<h2>Step {record['step']}</h2>{inspector_place(record)}" for record in records]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>:root{{color-scheme:light dark}}
body{{margin:12px 16px;font-family:system-ui,sans-serif;background:Canvas;color:CanvasText}}
h1{{font-size:18px;margin:0 0 6px}}h2{{font-size:16px;margin:18px 0 6px}}{read_web("inspector.css")}</style></head>
<body><main><h1>{html.escape(title)}</h1>{"".join(parts)}</main>
<script>{_script()}</script></body></html>
"""


def _script() -> str:
    return read_web("formulas.js") + read_web("inspector.js")
