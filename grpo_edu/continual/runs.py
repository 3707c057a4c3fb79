"""A curriculum on disk: runs in a row. Its state is saved after each, so that a curriculum that was stopped continues.

config.json            the options, and a fingerprint of the model that it starts from
stage-K/               the model after stage K, for `load_policy`, and its metrics; of the last stage the metrics only
state.pt               evaluations and metrics so far, the weights, and what protects the tasks so far; after the last
                       stage the first two alone
model/                 the model after the last stage
matrix.json, matrix.png, summary.md
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_edu import __version__
from grpo_edu.continual.curriculum import Progress, run_curriculum
from grpo_edu.continual.ewc import Anchor
from grpo_edu.continual.forgetting import AccuracyMatrix
from grpo_edu.continual.stages import Curriculum, curriculum_from_dict
from grpo_edu.evaluation import Evaluation
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.hub import model_source
from grpo_edu.problems.templates import Problem
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.loading import load_split
from grpo_edu.runs.log import write_log
from grpo_edu.runs.record import model_label
from grpo_edu.runs.recording import note_kept
from grpo_edu.runs.state import (
    check_same_data,
    check_same_model,
    data_fingerprint,
    fingerprint,
    load_state,
    save_state,
    warn_of_other_versions,
)


@dataclass(frozen=True)
class CurriculumResult:
    """The result of a curriculum. output: its folder. seconds: time of this call, without stages done before."""

    output: Path
    curriculum: Curriculum
    matrix: AccuracyMatrix
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, ready for JSON."""
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
) -> CurriculumResult:
    """Run a curriculum from its beginning, and save it in a folder.

    Args:
        curriculum: stages and protection, see `stages.load_curriculum`.
        model: as for `load_policy`, or the folder of an earlier run.
        n: held-out problems per task.
        data_path: folder of GSM8K's files, for stages that train on it.
        output: the folder; None makes a new one in runs/. overwrite: replace the run that it holds.
        command: what was typed, for the record.

    Raises:
        ValueError, OSError: input that is not valid, or a stage that broke. A note of the error says how to resume.
    """
    folder = RunFolder(output) if output else RunFolder.unused(f"curriculum-{model_label(str(model))}")
    folder.check(overwrite=overwrite)
    folder.check_apart(model_source(model))
    config = {
        "grpo_edu": __version__,
        "command": command,
        "model": str(model),
        "n": n,
        "data_path": None if data_path is None else str(data_path),
        "curriculum": asdict(curriculum),
    }
    run = CurriculumRun(folder, config)
    folder.check_disk_space(sum(weight.nbytes for weight in run.policy.parameters()) * count_copies(curriculum))
    with folder.begin({**config, **run.fingerprints()}, overwrite=overwrite):
        return run.finish()


def count_copies(curriculum: Curriculum) -> int:
    """Return how many copies of the weights the folder may hold: models, and two states while one replaces another."""
    stages, protection = len(curriculum.stages), curriculum.protection
    anchors = stages - 1 if protection.method in ("ewc", "l2") else 0
    if protection.online:
        anchors = min(anchors, 1)
    return stages + 2 * (1 + 2 * anchors)  # an anchor has a Fisher and weights


def resume_curriculum(output: str | Path) -> CurriculumResult:
    """Resume a curriculum after the last stage that was done, with the same result as without the stop.

    On the same computer and with the same number of threads it is the same bit for bit (`resume_training`).

    Raises:
        ValueError: the folder holds no curriculum, its model or problems have changed, or its state is damaged or of
            another version.
        BlockingIOError: another process is writing it.
    """
    folder = RunFolder(output)
    config = folder.read_config("curriculum", "curriculum")
    if not folder.state.is_file() and (folder.path / "stage-0.json").is_file():
        raise ValueError(
            f"`resume`: the curriculum in {folder.path} was started by grpo_edu {config['grpo_edu']}, whose stages "
            "this version cannot read; resume it with that version, or start it again."
        )
    run = CurriculumRun(folder, config)
    found = run.fingerprints()
    check_same_model(config["fingerprint"], found["fingerprint"], folder.path)
    check_same_data(config.get("data_fingerprints"), found["data_fingerprints"], folder.path)
    with folder.resume():
        if folder.state.is_file():
            run.read_state()
        return run.finish()


class CurriculumRun:
    """A curriculum in its folder; config: what its config.json holds.

    Attributes:
        problems: each stage's problems to train on ("train") and to evaluate with ("heldout").
        progress: how far it has come.
    """

    def __init__(self, folder: RunFolder, config: dict[str, Any]) -> None:
        self._started = time.perf_counter()
        self.folder, self.curriculum = folder, curriculum_from_dict(config["curriculum"])
        self.problems: dict[str, list[list[Problem]]] = {"train": [], "heldout": []}
        for stage in self.curriculum.stages:
            path = config["data_path"] if "gsm8k" in stage.data else None
            for split, n in (("train", stage.num_problems), ("heldout", config["n"])):
                self.problems[split].append(load_split(stage.data, split, data_path=path, n=n))
        self.policy, self.tokenizer = load_policy(config["model"])
        self.progress = Progress()

    def fingerprints(self) -> dict[str, Any]:
        """Return what config.json keeps of the model and the problems."""
        data = {split: data_fingerprint(sum(stages, [])) for split, stages in self.problems.items()}
        return {"fingerprint": fingerprint(self.policy), "data_fingerprints": data}

    def read_state(self) -> None:
        """Read how far the curriculum had come, and the weights."""
        state = load_state(self.folder.state)
        warn_of_other_versions(state["versions"])
        self.policy.load_state_dict(state["weights"] or self.policy.state_dict())
        rows = [[Evaluation(**part) for part in row] for row in state["rows"]]
        self.progress = Progress(rows, state["histories"], [Anchor(**anchor) for anchor in state["anchors"]])

    def finish(self) -> CurriculumResult:
        """Run the stages that are left, save each of them, and write the result."""
        stages, progress = self.curriculum.stages, self.progress
        with note_kept(self.folder, lambda: f"{progress.stages_done} of {len(stages)} stages"):
            problems = self.problems["train"], self.problems["heldout"]
            for _ in run_curriculum(self.policy, self.tokenizer, self.curriculum, *problems, progress=progress):
                self._save_stage()
        matrix = progress.matrix([stage.name for stage in stages])
        result = CurriculumResult(self.folder.path, self.curriculum, matrix, time.perf_counter() - self._started)
        write_result(self.folder, result)
        return result

    def _save_stage(self) -> None:
        """Save the model and the metrics of a stage, and last the state, with which the stage counts as done."""
        folder, progress, number = self.folder, self.progress, self.progress.stages_done
        is_last = number == len(self.curriculum.stages)
        if number:
            place = folder.path / f"stage-{number}"
            save_policy(self.policy, self.tokenizer, folder.model if is_last else place / "model", overwrite=True)
            write_log(place / "metrics.jsonl", progress.histories[-1])
        content = {
            "rows": [[asdict(part) for part in row] for row in progress.rows],
            "histories": progress.histories,
            "weights": {} if is_last else self.policy.state_dict(),
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
