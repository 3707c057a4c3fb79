"""A policy that calls a calculator in the middle of its completion, and problems whose numbers are too large for it.

The calculator is an environment (`grpo_edu.problems.environments.Calculator`): the policy writes `[190+55]`, the
calculator appends `=245.`, and the policy continues. `grpo_edu.turns` says how a reply enters a rollout.
"""

from __future__ import annotations

import dataclasses
import random
import re
from typing import TYPE_CHECKING

from grpo_edu.problems.templates import STORIES, Problem, fill_story, problem_key
from grpo_edu.prompts import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLY = re.compile(r"(?<=\])(=\S*)")  # what the calculator writes after a call


def tool_splits(num_train: int = 400, num_cold: int = 200, num_heldout: int = 300) -> dict[str, list[Problem]]:
    """Stories of the level basic with numbers ten times as large, in splits without a common `problem_key`.

    Every second solution of the split "cold" has no calls, so that a policy that learns from it does both.

    >>> tool_splits(2, 2, 2)["heldout"][1].solution
    '[228+298]=526. [526-284]=242. #### 242'
    """
    rng = random.Random("tool")
    found: dict[str, Problem] = {}
    stories = [
        dataclasses.replace(story, ranges={slot: (10 * low, 10 * high) for slot, (low, high) in story.ranges.items()})
        for story in STORIES["basic"]
    ]
    while len(found) < num_heldout + num_train + num_cold:
        problem = fill_story(rng.choice(stories), "large", rng, largest=5000)
        solution = re.sub(r"(\S+)=", r"[\1]=", problem.solution)
        found.setdefault(problem_key(problem), dataclasses.replace(problem, solution=solution))
    problems = list(found.values())
    cold = problems[num_heldout + num_train :]
    cold[::2] = [dataclasses.replace(p, solution=re.sub(r"[\[\]]", "", p.solution)) for p in cold[::2]]
    return {"heldout": problems[:num_heldout], "train": problems[num_heldout:][:num_train], "cold": cold}


def encode_turns(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> tuple[list[int], list[int]]:
    """Return the token ids of a worked solution after its prompt, and for each 1 if the policy is to write it."""
    ids = tokenizer.encode(render_prompt(tokenizer, problem.prompt), add_special_tokens=False)
    is_target = [0] * len(ids)
    for part in _REPLY.split(problem.solution):
        part_ids = tokenizer.encode(part, add_special_tokens=False)
        ids += part_ids
        is_target += [int(not part.startswith("="))] * len(part_ids)
    return [*ids, tokenizer.eos_token_id], [*is_target, 1]
