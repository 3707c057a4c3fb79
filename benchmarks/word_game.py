"""Does GRPO learn a game of several turns: ``python -m benchmarks.word_game``, see benchmarks/studies/word_game.md.

The model `wordy` plays a word-guessing game. It is trained with credit by turn, with credit by trajectory, with
shuffled rewards, and on games of one guess. Each run is one line of ``benchmarks/results/word_game.jsonl``.
``--minutes 20`` starts no run after 20 minutes. The same command continues where it stopped, and ``word_game.json``
holds the summary. ``--ship`` makes the model `wordy_trained`, which is seed 0 of credit by turn.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import (
    RESULTS,
    Ledger,
    bits,
    change,
    counted,
    estimate,
    exit_code,
    ledger_options,
    over_seeds_and_problems,
    save,
    save_picture,
    share,
    shuffled,
)
from grpo_edu import GRPOConfig, evaluate, load_policy, train
from grpo_edu.batch import score_by_turn
from grpo_edu.evaluation import crossed_bootstrap
from grpo_edu.models import save_policy
from grpo_edu.problems.environments import WORDS, WordGame, word_game_splits
from grpo_edu.problems.templates import Problem, data_dir
from grpo_edu.rollout import Rollout
from grpo_edu.trainer import Stages, start_training
from grpo_edu.turns import environment_reward
from recipes.pretraining import store_card, with_interval

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

COMMAND = "python -m benchmarks.word_game"
LEDGER = RESULTS / "word_game.jsonl"
BASE = {"max_steps": 20, "prompts_per_step": 8, "num_generations": 8, "max_completion_length": 40}
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = (0, 1, 2, 3, 4)
SELECTION_SEED = 100
SELECTION_GAMES = 150  # of the training games; the other 420 are trained on

TURN, TRAJECTORY, SHUFFLED, SINGLE = "credit by turn", "credit by trajectory", "shuffled rewards", "single turn"
ARMS = (TURN, TRAJECTORY, SINGLE, SHUFFLED)
UNMASKED = "credit by turn, without the mask"  # added after the result; the environment's tokens are in the loss
BEFORE = "before training"
CURVES = ("reward", "grad_norm", "entropy", "frac_reward_zero_std", "completions/clipped_ratio")


def score_without_mask(rollout: Rollout, *arguments: Any) -> Any:
    """Return the scores of credit by turn, with every token of the conversation in the loss."""
    return replace(score_by_turn(rollout, *arguments), loss_mask=rollout.completion_mask)


@cache
def games_of(split: str) -> list[Problem]:
    """Training, selection and held-out games, without a common pair of secret word and opening."""
    splits = word_game_splits()
    if split == "heldout":
        return splits["heldout"]
    return splits["train"][-SELECTION_GAMES:] if split == "selection" else splits["train"][:-SELECTION_GAMES]


def judge(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: str) -> dict[str, str]:
    """Return a 1 for each game that is won and a 0 for the others, sampled and greedily; always with three guesses."""
    found = {}
    for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        played = evaluate(
            model,
            tokenizer,
            games_of(split),
            seed=1,
            temperature=temperature,
            max_completion_length=BASE["max_completion_length"],
            batch_size=150,
            environment=WordGame,
        )
        found[way] = bits(played.correct)
    return found


def trained(
    arm: str, rate: float, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[dict[str, float | None]]]:
    """Return a fresh model after its training run, its tokenizer, and the metrics of the steps."""
    model, tokenizer = load_policy("wordy")
    config = GRPOConfig(**BASE, learning_rate=rate, seed=seed)
    state = start_training(model, tokenizer, games_of("train"), config)
    state.sampler.environment = partial(WordGame, max_turns=1) if arm == SINGLE else WordGame
    stages = {TURN: Stages(score=score_by_turn), UNMASKED: Stages(score=score_without_mask)}.get(arm, Stages())
    reward = shuffled(environment_reward, seed) if arm == SHUFFLED else environment_reward
    steps = train(model, tokenizer, games_of("train"), reward, config, state=state, stages=stages)
    return model, tokenizer, list(steps)


def run(arm: str, rate: float, seed: int, split: str) -> dict[str, Any]:
    """Train a fresh model and let it play."""
    cpu = time.process_time()
    model, tokenizer, history = trained(arm, rate, seed)
    return {
        **judge(model, tokenizer, split),
        "curves": {key: [None if row[key] is None else round(row[key], 4) for row in history] for key in CURVES},
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def best_rate(ledger: Ledger, arm: str) -> float | None:
    """Return the rate that wins most selection games, sampled; of equals, the lowest; None if a run is missing.

    Shuffled rewards have nothing to tune for, so they take the rate of credit by trajectory, from which they differ;
    the runs without the mask take that of credit by turn.
    """
    tuned = {SHUFFLED: TRAJECTORY, UNMASKED: TURN}.get(arm, arm)
    rows = {rate: ledger.find(phase="select", arm=tuned, rate=rate) for rate in RATES}
    found = {rate: share(row["sampled"]) for rate, row in rows.items() if row}
    return max(found, key=lambda rate: (found[rate], -rate)) if len(found) == len(RATES) else None


def missing(ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Yield the runs of the study in their order: the selection, then all arms seed by seed."""
    for rate in RATES:
        for arm in ARMS:
            if arm != SHUFFLED:
                yield {"phase": "select", "arm": arm, "rate": rate, "seed": SELECTION_SEED}
    for seed in SEEDS:
        for arm in ARMS:
            yield {"phase": "report", "arm": arm, "rate": best_rate(ledger, arm), "seed": seed}
    for seed in SEEDS:
        yield {"phase": "report", "arm": UNMASKED, "rate": best_rate(ledger, UNMASKED), "seed": seed}


def by_word(wins: str) -> list[float]:
    """Return the share of held-out games that are won, for each secret word.

    The games of a word are alike, so an interval over words draws whole words. All have equally many games.
    """
    won: dict[str, list[int]] = {word: [] for word in WORDS}
    for game, bit in zip(games_of("heldout"), wins, strict=True):
        won[game.answer].append(int(bit))
    return [sum(games) / len(games) for games in won.values()]


def compare(before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """After − before: over seeds and words, over seeds and games, and McNemar's p-value for each seed."""
    over_games = change(before, after)
    return {
        "over seeds and words": asdict(crossed_bootstrap(*(list(map(by_word, side)) for side in (before, after)))),
        "over seeds and games": over_games["over seeds and problems"],
        "p_value": over_games["p_value"],
    }


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return the selection and each arm's wins and differences, sampled and greedy, on the finished seeds."""
    found: dict[str, Any] = {
        "selection": {
            arm: {f"{row['rate']:g}": share(row["sampled"]) for row in ledger.select(phase="select", arm=arm)}
            for arm in ARMS
        }
    }
    rows = {arm: {row["seed"]: row for row in ledger.select(phase="report", arm=arm)} for arm in ARMS}
    found["seeds"] = seeds = [seed for seed in SEEDS if all(seed in by_seed for by_seed in rows.values())]
    start = ledger.find(phase="start")
    if len(seeds) < 2 or start is None:
        return found
    found["rates"] = {arm: best_rate(ledger, arm) for arm in ARMS}
    for way in ("sampled", "greedy"):
        wins = {arm: [by_seed[seed][way] for seed in seeds] for arm, by_seed in rows.items()}
        wins[BEFORE] = [start[way]] * len(seeds)
        found[way] = {BEFORE: share(start[way])}
        for arm in ARMS:
            each = [share(own) for own in wins[arm]]
            others = [other for other in (BEFORE, TRAJECTORY, SINGLE, SHUFFLED) if other != arm]
            found[way][arm] = {"each": each, **estimate(each)}
            found[way][arm] |= {f"minus {other}": compare(wins[other], wins[arm]) for other in others}
    found["unseen prompts"] = unseen_prompts(start, rows, seeds)
    unmasked = {row["seed"]: row["sampled"] for row in ledger.select(phase="report", arm=UNMASKED)}
    if set(seeds) <= set(unmasked):
        wins = [unmasked[seed] for seed in seeds]
        masked = [rows[TURN][seed]["sampled"] for seed in seeds]
        found[UNMASKED] = {
            "each": [share(own) for own in wins],
            f"minus {BEFORE}": compare([start["sampled"]] * len(seeds), wins),
            f"minus {TURN}": compare(masked, wins),
        }
    curves = {arm: [by_seed[seed]["curves"]["reward"] for seed in seeds] for arm, by_seed in rows.items()}
    found["reward"] = {arm: [sum(step) / len(step) for step in zip(*each, strict=True)] for arm, each in curves.items()}
    return found


def unseen_prompts(start: dict[str, Any], rows: dict[str, dict[int, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the sampled change on the held-out games whose prompt is not that of another game that the model has seen.

    It has seen the games of its start, which are all that are not held out. Two games have the same prompt if their
    given guess gets the same feedback. The interval is over seeds and games, because most secrets have only one
    or two of these games.
    """
    seen = {game.prompt for game in word_game_splits()["train"]}
    kept = [number for number, game in enumerate(games_of("heldout")) if game.prompt not in seen]

    def wins(row: dict[str, Any]) -> str:
        return "".join(row["sampled"][number] for number in kept)

    changes = {
        arm: over_seeds_and_problems([wins(start)] * len(seeds), [wins(by_seed[seed]) for seed in seeds])
        for arm, by_seed in rows.items()
    }
    return {"games": len(kept), **changes}


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Return the statements of the study, written before its reported runs, about sampled games.

    More and fewer mean that the interval over seeds and words excludes 0.
    """
    if found["seeds"] != list(SEEDS):
        return {}  # a statement about five seeds is not judged on fewer
    arms = found["sampled"]

    def interval(arm: str, other: str) -> dict[str, float]:
        return arms[arm][f"minus {other}"]["over seeds and words"]

    return {
        "credit by turn wins more games than the model before training": interval(TURN, BEFORE)["low"] > 0,
        "credit by trajectory wins more games than the model before training": interval(TRAJECTORY, BEFORE)["low"] > 0,
        "shuffled rewards do not win more games than the model before training": interval(SHUFFLED, BEFORE)["low"] <= 0,
        "credit by turn wins more games than training on a single turn": interval(TURN, SINGLE)["low"] > 0,
        "credit by turn wins more games than credit by trajectory": interval(TURN, TRAJECTORY)["low"] > 0,
    }


def picture(found: dict[str, Any]) -> Any:
    """Draw the mean reward of a game against the step, of the arms that play whole games."""
    from grpo_edu.figures.curves import overlaid_curves

    return overlaid_curves(
        {arm: [{"reward": value} for value in found["reward"][arm]] for arm in ARMS if arm != SINGLE}
    )


_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# wordy_trained: the model wordy after learning a word game by GRPO

The model [wordy](../wordy/README.md) after {max_steps} steps of GRPO with credit by turn, {prompts_per_step} games ×
{num_generations} conversations each. It shows what training changed: compare both on the same game.

## Use

`load_policy("wordy_trained")` of the package `grpo_edu`, and the games of
`grpo_edu.problems.environments.word_game_splits()`.

## How it was made

- Command: `{command}`, learning rate {learning_rate:g}, seed {seed}, torch {torch}; a few seconds of one core.
- It is the first of five runs of [the study](../../../docs/studies.md#word-game); it was not chosen by its result.

## What it can do

{n} held-out games, each played once; in brackets the 95% Wilson interval.

| model | games won, sampled | games won, greedy |
|---|---|---|
| wordy | {start_sampled} | {start_greedy} |
| wordy_trained | {sampled} | {greedy} |

## Limits

It knows nothing but this game with these {words} words. The folder holds no code and no pickle: safetensors and JSON
only.

Licence: Apache-2.0.
"""


def card_text(record: dict[str, Any]) -> str:
    """Return the model card of a record that `ship` stores as ``recipe.json``."""
    names = ("start_sampled", "start_greedy", "sampled", "greedy")
    cells = {name: with_interval(record[name]) for name in names}
    return _CARD.format(**{**record, **record["config"], **cells, "n": record["greedy"]["n"]})


def ship(ledger: Ledger) -> None:
    """Repeat the run of credit by turn with the first seed, and store its model as `wordy_trained` with a card."""
    rate = best_rate(ledger, TURN)
    start, row = ledger.find(phase="start"), ledger.find(phase="report", arm=TURN, rate=rate, seed=SEEDS[0])
    if start is None or row is None or rate is None:
        raise SystemExit(f"The study lacks the run with seed {SEEDS[0]} of {TURN}; run {COMMAND} without --ship first.")
    model, tokenizer, _ = trained(TURN, rate, SEEDS[0])
    played = judge(model, tokenizer, "heldout")
    folder = data_dir() / "models" / "wordy_trained"
    save_policy(model, tokenizer, folder, overwrite=True)
    record = {
        "command": f"{COMMAND} --ship",
        "config": {**BASE, "learning_rate": rate, "seed": SEEDS[0]},
        "words": len(WORDS),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    for prefix, wins in (("start_", start), ("", played)):
        for way in ("sampled", "greedy"):
            record[prefix + way] = counted(wins[way])
    store_card(folder, record, card_text(record))
    print(f"saved to {folder}; as in the study: {all(played[way] == row[way] for way in played)}")


def main() -> int:
    """Run what is missing; exit 1 if a statement does not hold."""
    parser = ledger_options(COMMAND, __doc__)
    parser.add_argument("--ship", action="store_true", help="store the model of seed 0 of credit by turn")
    options = parser.parse_args()
    ledger = Ledger(LEDGER, options.minutes)
    if options.ship:
        ship(ledger)
        return 0
    if not ledger.find(phase="start"):
        ledger.add(phase="start", **judge(*load_policy("wordy"), "heldout"))
    for values in missing(ledger):
        if not ledger.wants(**values):
            continue
        split = "selection" if values["phase"] == "select" else "heldout"
        ledger.add(**values, **run(values["arm"], values["rate"], values["seed"], split))
        row = ledger.rows[-1]
        print(f"{values}: {share(row['sampled']):.1%} sampled, {share(row['greedy']):.1%} greedily", flush=True)
    found = summary(ledger)
    judged = verdicts(found)
    save(LEDGER.with_suffix(".json"), COMMAND, {**found, "verdicts": judged})
    if "reward" in found:
        save_picture(LEDGER, picture(found))
    return exit_code(judged)


if __name__ == "__main__":
    raise SystemExit(main())
