"""A look at what a run will train on, before it trains: the problems, the rendered prompts and the stop tokens.

Most runs that learn nothing show why on this page: the wrong column, a prompt that lacks the chat template, or prompts
that leave no room for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_edu.problems.own import HELDOUT_EVERY, question_key
from grpo_edu.problems.templates import Problem, normalize_text, prompt_options
from grpo_edu.prompts import render_prompt
from grpo_edu.rollout import find_unused_turn_end, stop_token_ids
from grpo_edu.runs.loading import is_user_dataset
from grpo_edu.runs.options import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_RENDERED, _SHOWN = 500, 3  # problems whose prompts are counted, and shown


def first_look(
    request: RunConfig,
    problems: Sequence[Problem],
    heldout: Sequence[Problem],
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Return the page: how many problems, how long in tokens, three rendered prompts, and what ends a completion."""
    counted = problems[:_RENDERED]
    rendered = [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem in counted]
    lengths = sorted(len(ids) for ids in tokenizer(rendered, add_special_tokens=False)["input_ids"])
    longest, context = request.config.max_completion_length, getattr(policy.config, "max_position_embeddings", None)
    room = f"; with up to {longest} tokens of completion, {lengths[-1] + longest} of the model's {context}"
    stop_ids = stop_token_ids(policy, tokenizer).tolist()
    stops = tokenizer.convert_ids_to_tokens(stop_ids)
    divided = [Path(name).name for name in request.data if is_user_dataset(name) and Path(name).is_file()]
    split = ""
    if divided and request.heldout_file is None:
        at_most = f", at most {request.num_heldout} of them" if len(heldout) == request.num_heldout else ""
        split = f" (one in {HELDOUT_EVERY} questions of {' and '.join(divided)}, chosen by their hashes{at_most})"
    lines = [
        f"Problems: {len(problems)} to train on, {len(heldout)} held out{split}",
        f"Prompts: {lengths[0]} to {lengths[-1]} tokens{room if context else ''}",
        f"A completion ends at: {', '.join(map(repr, stops))}",
    ]
    if (turn_end := find_unused_turn_end(tokenizer, stop_ids)) is not None:
        lines.append(
            f"Warning: the chat template ends a turn with {turn_end!r}, which does not end a completion, so "
            "completions will probably be cut off at the length limit. Set `eos_token` in tokenizer_config.json and "
            f"`eos_token_id` in generation_config.json of the model to {turn_end!r}."
        )
    if contradictions := _find_contradictions(problems):
        shown, answers = next(iter(contradictions.items()))
        lines.append(
            f"Warning: {len(contradictions)} of the questions to train on occur with different answers, such as "
            f"{shown[:80]!r} with {', '.join(map(repr, answers))}, and each row accepts its own alone. Correct them, "
            "or put all accepted answers into a column of another name and compare them in a reward of your own."
        )
    if request.num_examples:
        lines.append(f"Solved examples in every prompt: the first {request.num_examples} of the training problems")
    further = dict.fromkeys(name for problem in problems for name in problem.columns)
    if further:
        lines.append(f"Further columns for the rewards: {', '.join(further)}")
    for number, prompt in enumerate(rendered[:_SHOWN], start=1):
        lines += [f"--- prompt {number} of {len(problems)}", prompt]
    return "\n".join(lines) + "\n---\n"


def _find_contradictions(problems: Sequence[Problem]) -> dict[str, list[str]]:
    """Return each question that has several answers, and the answers."""
    answers: dict[str, dict[str, None]] = {}
    for problem in problems:
        answers.setdefault(question_key(problem.prompt), {})[normalize_text(problem.answer)] = None
    return {question: list(found) for question, found in answers.items() if len(found) > 1}
