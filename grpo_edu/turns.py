"""Rollouts of several turns: an environment replies to the policy inside a completion, and the policy continues.

A conversation is one completion, with two kinds of tokens: those that the policy sampled, and those of the
environment's observations, which are 0 in the rollout's `tool_mask` and so are not in the loss.
`grpo_edu.problems.environments` has two environments and says what their methods are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from grpo_edu.rewards import Naming
from grpo_edu.tensors import LARGEST_REWARD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENVIRONMENT_SECONDS = 60.0  # the longest that an environment may take for the turns that end at one token


# As in Qwen2, without a default system message. An observation is a message of the user, also where TRL calls it a
# tool's. TRL asks that a template can show calls, and uses what it shows only to find the text between two turns.
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- call.function.name + ' ' + (call.function.arguments | tojson) }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
_MESSAGE_END = {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}
_CALL = {"type": "function", "function": {"name": "step", "arguments": {"text": "{content}"}}}
_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {"open_pattern": r"(?=\S)", "repeats": True, "transform": _CALL, **_MESSAGE_END},
        "content": _MESSAGE_END,
    },
}


class Environment(Protocol):
    """The methods that a rollout calls on an environment; it may have two more attributes.

    turn_end: the text of the one token that ends a turn in the middle of a message, such as "]" after a call. Without
    it a turn is a whole message, and the observation is the user's next message.
    get_reward: a method that returns the reward of the conversation, for `environment_reward`. TRL calls it by itself.
    """

    def reset(self, *args: Any, **row: Any) -> str | None:
        """Begin a conversation with the columns of a problem; returns a text to append to the question, or None."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the reply to a turn: observation, reward of this turn, and whether the conversation is over."""


class _NamingEnvironment(Naming):
    kind = "the environment"
    if_late = "look for an endless loop, or for a request without a time limit"
    if_raised = (
        "It needs step(text) -> (observation, reward, done), and should reply to a text that it cannot use with an "
        "observation, because the policy may write anything"
    )


class _NamingReset(_NamingEnvironment):
    if_raised = (
        "It is made as {name}(), and then reset(**row) is called with the columns of a problem; accept what it does "
        "not need with **row"
    )


def environment_reward(
    completions: Sequence[Any], environments: Sequence[Any] | None = None, **kwargs: Any
) -> list[float]:
    """Return the reward of each conversation's environment, `get_reward()`; a reward function for `train`.

    TRL's trainer adds `get_reward()` by itself, so do not pass this function there: it would count the reward twice.

    >>> from grpo_edu.problems.environments import WordGame
    >>> game = WordGame()
    >>> game.reset(answer="CAT"); _ = game.step("CAT")
    >>> environment_reward(["CAT"], environments=[game])
    [1.0]
    """
    if environments is None:
        raise ValueError(
            "environments is None; set state.sampler.environment to a class such as WordGame, and pass state=state to "
            "train"
        )
    for environment in environments[:1]:  # all are of one class
        if not hasattr(environment, "get_reward"):
            raise ValueError(
                f"{type(environment).__name__} has no get_reward(); add this method, which returns the reward of the "
                "conversation, or pass a reward function of your own"
            )
    return [environment.get_reward() for environment in environments]


def reset_environments(
    factory: Callable[[], Environment], rows: Sequence[Mapping[str, Any]], num_generations: int
) -> tuple[list[Environment], list[str]]:
    """Return G environments for each of N problems, and per problem the text that its `reset` adds to the question.

    Raises RuntimeError if the factory or `reset` raises or does not return; ValueError for a factory that cannot be
    called, and where the environments of a group begin differently, because their rewards could not be compared.
    """
    if not callable(factory):
        raise ValueError(
            f"environment must be a class, or a function that makes an environment, got {factory!r}; each conversation "
            "needs one of its own"
        )
    environments: list[Environment] = []
    openings: list[str] = []
    name = getattr(factory, "__name__", type(factory).__name__)
    for row in rows:
        with _NamingReset(name, ENVIRONMENT_SECONDS, lambda: f", in reset, for problem {len(openings)}"):
            group = [factory() for _ in range(num_generations)]
            texts = {environment.reset(**row) or "" for environment in group}
        if len(texts) > 1:
            raise ValueError(
                f"the environment '{name}' began {len(texts)} different conversations for problem {len(openings)}: "
                f"{', '.join(map(repr, sorted(texts)[:2]))}. The completions of a group are compared, so reset must "
                "take all that is random from the columns of the problem, such as a seed"
            )
        environments += group
        openings.append(texts.pop())
    return environments, openings


def use_trl_tool_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let TRL take each message of the policy for a call of the environment's `step`, with the message as its text.

    TRL's `environment_factory` knows tools only, and a model of this course is too small to write their JSON. This sets
    a chat template and a response template for a tokenizer with the end tokens of Qwen2, so that a conversation in TRL
    has the tokens that it has here.

    Raises ValueError for a tokenizer without these tokens.
    """
    missing = {"<|im_start|>", "<|im_end|>"} - tokenizer.get_vocab().keys()
    if missing:
        raise ValueError(f"tokenizer has no token {min(missing)!r}; use a model of this course, or one of Qwen")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.response_template = _RESPONSE


def render_observation(tokenizer: PreTrainedTokenizerBase, observation: str) -> str:
    """Return the text from the end token of the policy's message to the start of its next, with the observation.

    Raises ValueError if the tokenizer's chat template cannot render a second turn.
    """
    from jinja2 import TemplateError

    said, heard = "said-7f3", "heard-9c1"
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": heard},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        _, _, after = text.partition(said)
        if after.count(heard) != 1:
            raise ValueError("it leaves a message out")
        end = min((after.find(token), token) for token in tokenizer.all_special_tokens if token in after)[1]
        between = after[after.index(end) + len(end) :]
        if heard not in between:
            raise ValueError("it has no token that ends a message")
    except (TemplateError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            "tokenizer: its chat template cannot render a conversation of several turns, so the policy could not read "
            f"an observation ({str(error) or type(error).__name__}); use a model whose template can, or an environment "
            "with `turn_end`, whose replies stay inside one message"
        ) from error
    return between.replace(heard, observation)


class Conversations:
    """Writes the observations of environments into the completions of a rollout, behind the turns that they answer.

    All rows are sampled at once, token by token, and each row reads its own environment's tokens where a turn ended.

    Args:
        environments: B environments, of one class, after `reset`.
        ids: (B, C) long, the completions, which are changed in place.
        stop_ids: (S,), the ids that end a message.
        max_turns: a conversation ends with this turn even if its environment continues; None: no limit but C tokens.

    Attributes:
        mask: (B, C) long, 0 for a token of an observation, else 1.
        rewards: B lists with the reward of each turn.
    """

    def __init__(
        self,
        environments: Sequence[Environment],
        tokenizer: PreTrainedTokenizerBase,
        ids: Tensor,
        stop_ids: Tensor,
        max_turns: int | None = None,
    ) -> None:
        if len(environments) != len(ids):
            raise ValueError(f"environments must have {len(ids)} entries, one per completion, got {len(environments)}")
        if len({type(environment) for environment in environments}) > 1:
            raise ValueError("environments must be of one class; train on one kind of conversation at a time")
        if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
            raise ValueError(f"max_turns must be a whole number of at least 1, or None, got {max_turns!r}")
        self.environments, self.tokenizer, self.ids, self.max_turns = environments, tokenizer, ids, max_turns
        self.name = type(environments[0]).__name__
        self.mask = torch.ones_like(ids)
        self.rewards: list[list[float]] = [[] for _ in environments]
        self._starts = [0] * len(environments)  # where the current turn of each row begins
        self._replies: dict[str, list[int]] = {}  # the tokens of each observation, which many rows may share
        self._stop_ids = stop_ids
        marker = getattr(environments[0], "turn_end", None)
        self._marker = None if marker is None else token_id(tokenizer, marker, f"{self.name}.turn_end")
        self._capped = 0
        if marker is None:
            render_observation(tokenizer, "")  # a template without turns is refused before anything is sampled

    def write(self, samples: Tensor, step: int, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of a step, (samples,) long, and which rows are complete with it, (samples,) bool.

        Inside an observation its token takes the place of the sampled one. Where a sampled token ends a turn, the
        environment replies, and its observation is written behind it.
        """
        own = self.mask[samples, step] == 1
        tokens = torch.where(own, sampled, self.ids[samples, step])
        self.ids[samples, step] = tokens
        complete = own & torch.isin(tokens, self._stop_ids)
        ended = own & (tokens == self._marker) if self._marker is not None else complete
        places = ended.nonzero().flatten().tolist()
        if places:
            complete = complete.clone()
            row = -1
            with _NamingEnvironment(self.name, ENVIRONMENT_SECONDS, lambda: self._where(row, step)):
                for place in places:
                    row = int(samples[place])
                    complete[place] = self._turn(row, step + 1)
        return tokens, complete

    def _turn(self, row: int, end: int) -> bool:
        """Let the environment answer the turn that ends before `end`; returns whether the conversation is over."""
        answer = self.environments[row].step(self._text(row, end))
        if not (isinstance(answer, tuple) and len(answer) == 3 and isinstance(answer[0], str)):
            raise TypeError(f"step must return (observation, reward, done) with a text first, got {answer!r}")
        observation, reward, done = answer
        if not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD:
            raise TypeError(f"step must return a number of at most {LARGEST_REWARD:g} as its reward, got {reward!r}")
        self.rewards[row].append(float(reward))
        if done or len(self.rewards[row]) == self.max_turns:
            self._capped += not done
            return True
        if observation not in self._replies:
            text = observation if self._marker is not None else render_observation(self.tokenizer, observation)
            self._replies[observation] = self.tokenizer.encode(text, add_special_tokens=False)
        reply = self._replies[observation][: self.ids.shape[1] - end]
        self.ids[row, end : end + len(reply)] = self.ids.new_tensor(reply)
        self.mask[row, end : end + len(reply)] = 0
        self._starts[row] = end + len(reply)
        return False

    def _text(self, row: int, end: int) -> str:
        return self.tokenizer.decode(self.ids[row, self._starts[row] : end], skip_special_tokens=True)

    def _where(self, row: int, step: int) -> str:
        return f", in step, turn {len(self.rewards[row]) + 1} of completion {row}, {self._text(row, step + 1)[:200]!r}"

    def turn_rewards(self) -> Tensor:
        """Return the reward of each turn of the longest conversation, (B, T) float32, NaN if a row had fewer turns."""
        width = max(1, *map(len, self.rewards))
        table = [row + [math.nan] * (width - len(row)) for row in self.rewards]
        return torch.tensor(table, dtype=torch.float32, device=self.ids.device)

    def warn_if_endless(self, lengths: Tensor) -> None:
        """Warn if no conversation came to its own end. lengths: (B,), 0 for a row that ran out of tokens."""
        cut = self._capped + int((lengths == 0).sum())
        if self._marker is None and cut == len(self.rewards):
            warnings.warn(
                f"no conversation with {self.name} came to its end: all {cut} reached max_turns or "
                "max_completion_length. Raise these, or let `step` return done=True earlier.",
                RuntimeWarning,
                stacklevel=3,
            )


def token_id(tokenizer: PreTrainedTokenizerBase, token: int | str, name: str) -> int:
    """Return the id of one token, given as a text or an id; the ValueError names the argument."""
    encoded = tokenizer.encode(token, add_special_tokens=False) if isinstance(token, str) else [token]
    if len(encoded) != 1 or not 0 <= encoded[0] < len(tokenizer):
        raise ValueError(f"{name}: {token!r} is not a single token of this tokenizer; use one token, or its id")
    return encoded[0]
