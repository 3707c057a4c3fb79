"""The recipe of the model `wordy`: ``python -m recipes.word_game``.

A small model is trained from scratch on games of two kinds of players (`play_demonstration`). It first sees careful
players only, whose every guess agrees with all feedback so far. In a short second stage most players are careless and
guess any legal word. Afterwards the model has both habits and plays carelessly most of the time, so reinforcement
learning has something to choose from.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.continual.examples import pad_examples
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.environments import WORDS, WordGame, fitting_words, word_game_splits
from grpo_edu.problems.templates import Problem, data_dir
from grpo_edu.prompts import render_prompt
from grpo_edu.turns import render_observation, use_trl_tool_template
from recipes.corpus import PretrainingConfig
from recipes.pretraining import (
    build_model,
    build_optimizers,
    learning_rate_factor,
    sampled_and_greedy,
    store_card,
    target_loss,
    with_interval,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COMMAND = "python -m recipes.word_game"
CONFIG = PretrainingConfig(
    hidden_size=64, intermediate_size=192, num_layers=3, max_positions=512, steps=600, warmup_steps=30
)
GAMES = 48  # per step
LATE_STEPS, LATE_RATE = 60, 0.15  # the second stage; its learning rates begin at this share of the first stage's peak
CAREFUL_PLAYERS = 0.3  # their share in the second stage
LENGTH = 40  # tokens; three guesses and two replies have 36


def play_demonstration(problem: Problem, rng: random.Random, careful: float = 1.0) -> list[tuple[str, str]]:
    """Return the turns of a game, (guess, observation).

    A guess is, with probability `careful`, a random word that agrees with all feedback so far, otherwise any word.
    """
    game, done = WordGame(), False
    game.reset(**problem.row())
    opening, feedback = problem.prompt.split()
    known = [(opening, feedback)]
    while not done:
        guess = rng.choice(fitting_words(known) if rng.random() < careful else WORDS)
        observation, _, done = game.step(guess)
        known.append((guess, observation))
    return known[1:]


def encode_game(
    tokenizer: PreTrainedTokenizerBase, problem: Problem, turns: list[tuple[str, str]]
) -> tuple[list[int], list[int]]:
    """Return the token ids of a game, and 1 for those of the guesses, which the policy is to learn."""
    ids = tokenizer.encode(render_prompt(tokenizer, problem.prompt, None), add_special_tokens=False)
    is_target = [0] * len(ids)
    for number, (guess, observation) in enumerate(turns, 1):
        turn = [*tokenizer.encode(guess, add_special_tokens=False), tokenizer.eos_token_id]
        ids, is_target = ids + turn, is_target + [1] * len(turn)
        if number < len(turns):
            reply = tokenizer.encode(render_observation(tokenizer, observation), add_special_tokens=False)
            ids, is_target = ids + reply, is_target + [0] * len(reply)
    return ids, is_target


def rate_factor(step: int) -> float:
    """Return the share of the peak learning rate in a step; each stage falls linearly, the first after a rise."""
    if step <= CONFIG.steps:
        return learning_rate_factor(step / CONFIG.steps, CONFIG.warmup_steps / CONFIG.steps)
    return LATE_RATE * (CONFIG.steps + LATE_STEPS + 1 - step) / LATE_STEPS


def learn_games(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> list[float]:
    """Train `model` in place on demonstrations, in two stages; returns the loss of each step."""
    optimizers, rng, losses = build_optimizers(model, CONFIG), random.Random(CONFIG.seed), []
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    started = time.perf_counter()
    model.train()
    for step in range(1, CONFIG.steps + LATE_STEPS + 1):
        if step == CONFIG.steps + 1:  # the first stage's averages of gradients are of other games
            optimizers = build_optimizers(model, CONFIG)
        rows = []
        for problem in rng.choices(problems, k=GAMES):
            careful = 1.0 if step <= CONFIG.steps else float(rng.random() < CAREFUL_PLAYERS)
            rows.append(encode_game(tokenizer, problem, play_demonstration(problem, rng, careful)))
        ids, _ = pad_examples([(row, 0) for row, _ in rows], tokenizer.pad_token_id)
        is_target, _ = pad_examples([(row, 0) for _, row in rows], 0)
        loss = target_loss(model, ids, is_target.bool())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * rate_factor(step)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if step % 60 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    model.eval()
    return losses


_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# wordy: a Qwen2 of {parameters:,} parameters that plays a word game carelessly

A language model for teaching reinforcement learning with several turns on a CPU. It was trained from scratch on a
word-guessing game with {words} words of three letters and three guesses
(`grpo_edu.problems.environments.WordGame`). It has seen careful players, who use the feedback, and careless ones, who
do not, and it mostly plays like the careless ones. So GRPO has something to find.

## Use

`load_policy("wordy")` of the package `grpo_edu`, and the games of `grpo_edu.problems.environments.word_game_splits()`.
TRL's trainer plays the same games with it: a message is then a call of `step` (notebook 16).

## How it was made

- Command: `{command}`, seed {seed}, torch {torch}; about three minutes of one core. The tokenizer is that of `tiny`.
- Architecture: Qwen2, {num_layers} layers of {hidden_size}, {num_heads} heads, {num_kv_heads} key-value heads,
  feed-forward {intermediate_size}.
- Data: games from the {num_train:,} training pairs of secret word and opening, {games} for each step. In the first
  {steps:,} steps each guess is a random word that agrees with all feedback so far. In the last {late_steps} steps this
  holds for {careful_players:.0%} of the players, and the others guess any legal word. The environment's tokens
  are not learned.
- Optimizer: Muon for the layers' matrices ({muon_learning_rate}), AdamW for the rest ({learning_rate}); in the last
  {late_steps} steps {late_rate:.0%} of these rates, falling to zero. Mean loss of the last 50 steps: {loss:.3f}.

## What it can do

{n} held-out games, each played once (the studies sample again); in brackets the 95% Wilson interval.

| games won, sampled | games won, greedy |
|---|---|
| {sampled} | {greedy} |

## Limits

It is made to be trained further, and it knows nothing but this game. Every secret word occurs in training, with other
openings. The folder holds no code and no pickle: safetensors and JSON only.

Licence: Apache-2.0.
"""


def card_text(record: dict[str, Any]) -> str:
    """Return the model card of a record that `main` stores as ``recipe.json``."""
    cells = {name: with_interval(record[name]) for name in ("sampled", "greedy")}
    return _CARD.format(**{**record, **record["config"], **cells, "n": record["greedy"]["n"]})


def main(arguments: list[str] | None = None) -> int:
    """Train, save, evaluate on the held-out games and write the card."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--output", type=Path, default=data_dir() / "models" / "wordy", help="model folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a folder that holds a model")
    options = parser.parse_args(arguments)
    _, tokenizer = load_policy("tiny")
    use_trl_tool_template(tokenizer)
    model, splits = build_model(CONFIG, tokenizer), word_game_splits()
    losses = learn_games(model, tokenizer, splits["train"])
    settings = {"max_completion_length": LENGTH, "batch_size": 150, "environment": WordGame}
    found = sampled_and_greedy(model, tokenizer, splits["heldout"], **settings)
    for way, result in found.items():
        print(f"{way}: {with_interval(result)}", flush=True)
    save_policy(model, tokenizer, options.output, overwrite=options.overwrite)
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "steps", "warmup_steps")
    config = asdict(CONFIG)
    record = {
        "command": COMMAND,
        "config": {name: config[name] for name in (*names, "learning_rate", "muon_learning_rate", "seed")},
        "parameters": model.num_parameters(),
        "words": len(WORDS),
        "games": GAMES,
        "late_steps": LATE_STEPS,
        "late_rate": LATE_RATE,
        "careful_players": CAREFUL_PLAYERS,
        "num_train": len(splits["train"]),
        "loss": round(sum(losses[-50:]) / 50, 4),
        "torch": torch.__version__,
        "machine": platform.machine(),
        **found,
    }
    store_card(options.output, record, card_text(record))
    print(f"saved to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
