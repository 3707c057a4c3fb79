"""A curriculum on disk: runs in a row. Its state is saved after each, so that a curriculum that was stopped goes on.

config.json            what was asked for, and a fingerprint of the model that it starts from
stage-K/               the model after stage K, for `load_policy`, and its metrics; of the last stage the metrics only
state.pt               evaluations and metrics so far, the weights, and what protects the tasks so far; after the last
                       stage the first two alone
model/                 the model after the last stage
matrix.json, matrix.png, summary.md
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_edu import __version__
from grpo_edu.continual.curriculum import Progress, run_curriculum
from grpo_edu.continual.ewc import Anchor
from grpo_edu.continual.forgetting import AccuracyMatrix
from grpo_edu.continual.stages import Curriculum, curriculum_from_dict
from grpo_edu.evaluation import Evaluation
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.templates import Problem
from grpo_edu.runs.folder import RunFolder, model_source
from grpo_edu.runs.loading import load_split
from grpo_edu.runs.log import write_log
from grpo_edu.runs.recording import sigterm_interrupts
from grpo_edu.runs.state import (
    check_same_data,
    check_same_model,
    data_fingerprint,
    fingerprint,
    load_state,
    save_state,
    warn_of_other_versions,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_STOPS = (KeyboardInterrupt, ArithmeticError, MemoryError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class CurriculumResult:
    """What a curriculum did. output: its folder. seconds: of this call, without stages that were done before."""

    output: Path
    curriculum: Curriculum
    matrix: AccuracyMatrix
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {
            **self.matrix.to_dict(),
            "protection": asdict(self.curriculum.protection),
            "methods": [stage.method for stage in self.curriculum.stages],
            "seed": self.curriculum.stages[0].config.seed,
            "seconds": round(self.seconds, 2),
            "output": str(self.output),
        }


def start_curriculum(
    curriculum: Curriculum,
    model: str | Path = "tiny",
    *,
    n: int = 100,
    data_path: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    command: str = "",
    bars: bool = True,
) -> CurriculumResult:
    """Run a curriculum from its beginning, and save it in a folder.

    Args:
        curriculum: stages and protection, see `stages.load_curriculum`.
        model: as for `load_policy`, or the folder of an earlier run.
        n: held-out problems per task.
        data_path: folder of GSM8K's files, for stages that train on it.
        output: the folder; None makes a new one in runs/. overwrite: replace the run that it holds.
        command: what was typed, for the record. bars: show progress bars.

    Raises:
        ValueError, OSError: input that is not valid, or a stage that broke. A note of the error says how to resume.
    """
    started = time.perf_counter()
    folder = RunFolder(output) if output else RunFolder.unused(f"curriculum-{Path(model).name}")
    folder.check(overwrite=overwrite)
    source = model_source(model)
    folder.check_apart(source)
    problems = [_stage_problems(curriculum, split, data_path, n) for split in ("train", "heldout")]
    policy, tokenizer = load_policy(source)
    folder.check_room(sum(weight.nbytes for weight in policy.parameters()) * _num_copies(curriculum))
    config = {
        "grpo_edu": __version__,
        "command": command,
        "model": str(model),
        "fingerprint": fingerprint(policy),
        "data_fingerprints": _data_fingerprints(problems),
        "n": n,
        "data_path": None if data_path is None else str(data_path),
        "curriculum": curriculum.to_dict(),
    }
    with sigterm_interrupts(), folder.begin(config, overwrite=overwrite):
        return _go_on(folder, curriculum, policy, tokenizer, problems, Progress(), started, bars)


def _num_copies(curriculum: Curriculum) -> int:
    """Return how many copies of the weights the folder may hold: models, and two states while one replaces another."""
    stages, protection = len(curriculum.stages), curriculum.protection
    anchors = stages - 1 if protection.method in ("ewc", "l2") else 0
    if protection.online:
        anchors = min(anchors, 1)
    return stages + 2 * (1 + 2 * anchors)  # an anchor has a Fisher and weights


def resume_curriculum(
    output: str | Path, model: str | Path | None = None, *, curriculum: Curriculum | None = None, bars: bool = True
) -> CurriculumResult:
    """Resume a curriculum after the last stage that was done, with the same result as without the stop.

    On the same computer and with the same number of threads it is the same bit for bit (`resume_training`).

    Args:
        output: its folder.
        model, curriculum: what it was started with, or None; anything else is refused.

    Raises:
        ValueError: the folder holds no curriculum, or one with another model, other problems or other stages, or its
            state is damaged or of another version.
        BlockingIOError: another process is writing it.
    """
    started = time.perf_counter()
    folder = RunFolder(output)
    config = folder.read_config("curriculum", "curriculum")
    stored = curriculum_from_dict(config["curriculum"])
    if curriculum is not None and curriculum != stored:
        raise ValueError(f"`resume`: {folder.path} was started with other stages or protection; leave them out.")
    if not folder.state.is_file() and (folder.path / "stage-0.json").is_file():
        raise ValueError(
            f"`resume`: the curriculum in {folder.path} was started by grpo_edu {config['grpo_edu']}, whose stages "
            "this version cannot read; resume it with that version, or start it again."
        )
    policy, tokenizer = load_policy(model_source(model or config["model"]))
    check_same_model(config["fingerprint"], fingerprint(policy), folder.path)
    problems = [_stage_problems(stored, split, config["data_path"], config["n"]) for split in ("train", "heldout")]
    check_same_data(config.get("data_fingerprints"), _data_fingerprints(problems), folder.path)
    with sigterm_interrupts(), folder.resume():
        progress = Progress()
        if folder.state.is_file():
            state = load_state(folder.state)
            warn_of_other_versions(state["versions"])
            policy.load_state_dict(state["weights"] or policy.state_dict())
            progress = read_progress(state)
        return _go_on(folder, stored, policy, tokenizer, problems, progress, started, bars)


def read_progress(state: Mapping[str, Any]) -> Progress:
    """Return how far a curriculum had come when its state was saved."""
    rows = [[Evaluation(**part) for part in row] for row in state["rows"]]
    return Progress(rows, state["histories"], [Anchor(**anchor) for anchor in state["anchors"]])


def _stage_problems(curriculum: Curriculum, split: str, data_path: str | Path | None, n: int) -> list[list[Problem]]:
    """The training problems of each stage, or `n` held-out problems of each."""
    sets = []
    for stage in curriculum.stages:
        path = data_path if "gsm8k" in stage.data else None
        count = n if split == "heldout" else stage.num_problems
        sets.append(load_split(stage.data, split, data_path=path, n=count))
    return sets


def _data_fingerprints(problems: Sequence[list[list[Problem]]]) -> dict[str, str]:
    """A hash of the training problems of all stages, and one of the held-out problems."""
    train, heldout = ([problem for stage in split for problem in stage] for split in problems)
    return {"train": data_fingerprint(train), "heldout": data_fingerprint(heldout)}


def _go_on(
    folder: RunFolder,
    curriculum: Curriculum,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[list[list[Problem]]],
    progress: Progress,
    started: float,
    bars: bool,
) -> CurriculumResult:
    """Run the stages that are left, save each of them, and write the result."""
    total = len(curriculum.stages)
    try:
        for done in run_curriculum(policy, tokenizer, curriculum, *problems, progress=progress, bars=bars):
            _save_stage(folder, done, total, policy, tokenizer)
    except _STOPS as error:
        folder.note_kept(error, f"{progress.stages_done} of {total} stages")
        raise
    matrix = progress.matrix([stage.name for stage in curriculum.stages])
    result = CurriculumResult(folder.path, curriculum, matrix, time.perf_counter() - started)
    write_result(folder, result)
    return result


def _save_stage(
    folder: RunFolder, progress: Progress, total: int, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Save the model and the metrics of a stage, and last the state, with which the stage counts as done."""
    number = progress.stages_done
    is_last = number == total
    if number:
        place = folder.path / f"stage-{number}"
        save_policy(policy, tokenizer, folder.model if is_last else place / "model", overwrite=True)
        write_log(place / "metrics.jsonl", progress.histories[-1])
    content = {
        "rows": [[asdict(part) for part in row] for row in progress.rows],
        "histories": progress.histories,
        "weights": {} if is_last else policy.state_dict(),
        "anchors": [] if is_last else [vars(anchor) for anchor in progress.anchors],
    }
    save_state(folder.state, content)


def write_result(folder: RunFolder, result: CurriculumResult) -> None:
    """Write matrix.json, matrix.png and summary.md into the folder of a curriculum."""
    from grpo_edu.figures.continual import matrix_figure

    folder.write_json("matrix.json", result.to_dict())
    folder.write_figure("matrix.png", matrix_figure(result.matrix.accuracies(), result.matrix.tasks))
    folder.write_text(
        "summary.md", f"# Curriculum\n\n{result_text(result)}\n\n![Accuracy after each stage](matrix.png)\n"
    )


def result_text(result: CurriculumResult) -> str:
    """Matrix and measures as Markdown, which is readable in a terminal too."""
    tasks, protection = result.matrix.tasks, result.curriculum.protection
    rows = ["before any stage", *(f"after {task}" for task in tasks)]
    width = max(map(len, rows))
    lines = [f"| {'solved (%)':<{width}} | {' | '.join(tasks)} |", f"|{'-' * (width + 2)}|{'---|' * len(tasks)}"]
    for name, row in zip(rows, result.matrix.accuracies(), strict=True):
        cells = (f"{100 * share:>{len(task)}.0f}" for task, share in zip(tasks, row, strict=True))
        lines.append(f"| {name:<{width}} | {' | '.join(cells)} |")
    lines += ["", "95% intervals over the held-out problems of this one run:", ""]
    for name, estimate in result.matrix.measures().items():
        shown = str(estimate) if name == "average_accuracy" else f"{estimate:+}"
        lines.append(f"- {name.replace('_', ' ')}: {shown}")
    strength = "" if protection.method == "none" else f", strength {protection.strength:g}"
    lines += ["", f"Protection: {protection.method}{strength}."]
    return "\n".join(lines)
