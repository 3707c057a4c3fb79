"""Exercises whose last part trains `tiny` with the answer: what counts is the policy that comes out.

It trains only with an answer whose other parts are right. A wrong loss often makes `tiny` better as well, which would
tell a student nothing, and a training takes many seconds.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_edu.checks.core import SLIP_CREDIT, Call, Exercise, Outcome, Part, attempt, trial
from grpo_edu.checks.feedback import Feedback, PartResult
from grpo_edu.checks.inputs import train_tiny
from grpo_edu.evaluation import mcnemar

ALPHA = 0.01  # of McNemar's test; a right answer has p < 1e-3
TRAINED = "a policy that is trained with it"
WAITING = Outcome(problem="not trained", detail="training starts when all other parts are right")


def trained_part(role: str) -> Part:
    """Two points for an answer that makes `tiny` better on held-out problems; see `inputs.train_tiny` for the role."""

    def draw(rng: random.Random) -> Call:
        return Call((role, rng.randrange(1000)), ask=train_tiny)

    return Part(TRAINED, 2, draw, draws=1)


@dataclass(frozen=True, eq=False)
class TrainedExercise(Exercise):
    """An exercise with a `trained_part`, which is judged by the paired test instead of a reference."""

    @functools.cached_property
    def untrained(self) -> Exercise:
        """The same exercise without that part, its last."""
        return Exercise(self.reference, self.parts[:-1], self.mistakes, self.tolerance)

    def may_train(self, found: Sequence[Sequence[Outcome]], seed: int) -> bool:
        """Return True if all parts but the last have the outcomes of the reference on the inputs of a seed."""
        drawn = trial(self.untrained, seed)
        return not any(drawn.failed(found, part) for part in range(len(self.untrained.parts)))

    def _ask(self, answer: Callable, seed: int) -> list[list[Outcome]]:
        """Return the outcomes in each part; the answer trains where the other parts are right."""
        *others, training = trial(self, seed).calls
        found = self._outcomes(answer, others)
        if not self.may_train(found, seed):
            return [*found, [WAITING]]
        print(f"{self.name}: all other parts are right. Now it trains `tiny` for 10 to 30 seconds.", flush=True)
        return [*found, [attempt(answer, training[0])]]

    def judge(
        self, found: Sequence[Sequence[Outcome]], seed: int, credit: float = SLIP_CREDIT, variable: str = ""
    ) -> Feedback:
        """Grade an answer: the trained part by what the policy solves, the others as always."""
        feedback = self.untrained.judge(found[:-1], seed, credit, variable)
        part, outcome = self.parts[-1], found[-1][0]
        if not all(other.passed for other in feedback.parts):
            nothing = feedback.parts[0].mistake == "not written yet"
            waiting = PartResult(part.name, 0, part.points, why=WAITING.detail)
            waiting = replace(waiting, mistake="not written yet", hint=feedback.parts[0].hint) if nothing else waiting
            return replace(feedback, parts=(*feedback.parts, waiting))
        _, drawn = self.calls(part, seed)[0].args
        result = PartResult(
            part.name,
            0,
            part.points,
            given=f"8 steps of 4 × 8 completions with your `{self.name}`, seed {drawn}",
            expected=f"more held-out problems solved than before (McNemar p < {ALPHA})",
        )
        if outcome.problem:
            result = replace(result, got=f"raises {outcome.problem}", why=outcome.detail)
        else:
            result = _judged(result, outcome.value)
        return replace(feedback, parts=(*feedback.parts, result))


def _judged(result: PartResult, value: Any) -> PartResult:
    counts = [value.get(name) for name in ("before", "won", "lost")] if isinstance(value, dict) else []
    before, won, lost = (count if type(count) is int and 0 <= count <= 60 else 0 for count in counts or (0, 0, 0))
    p = mcnemar([False] * won + [True] * lost, [True] * won + [False] * lost).p_value if won + lost else 1.0
    if won > lost and p < ALPHA:
        return replace(result, points=result.max_points)
    got = f"{before} of 60 before, {before + won - lost} after ({won} won, {lost} lost, p = {p:.2g})"
    return replace(result, got=got, why="the policy did not improve")
