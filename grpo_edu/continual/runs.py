"""A curriculum on disk: each stage is saved as soon as it is done, so that a curriculum that was stopped can go on.

config.json            what was asked for, and a fingerprint of the model that it starts from
stage-0.json           held-out answers before any stage
stage-K/model          the model after stage K; stage-K/anchors.safetensors: what protects the tasks so far
stage-K.json           metrics and held-out answers of stage K, and hashes of the files that later stages need; written
                       last, so that a stage with this file is done
model/                 the model after the last stage, for `load_policy`
matrix.json, matrix.png, summary.md
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from grpo_edu import __version__
from grpo_edu.continual.curriculum import Progress, run_curriculum
from grpo_edu.continual.ewc import Anchor, check_fits
from grpo_edu.continual.forgetting import AccuracyMatrix
from grpo_edu.continual.stages import Curriculum, curriculum_from_dict
from grpo_edu.evaluation import Evaluation
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.templates import Problem
from grpo_edu.runs.checkpoint import (
    check_files,
    check_fingerprint,
    check_same_data,
    data_fingerprint,
    fingerprint,
    measure,
)
from grpo_edu.runs.folder import RunFolder, model_source
from grpo_edu.runs.loading import load_split
from grpo_edu.runs.recording import sigterm_interrupts

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
    folder.check_room(sum(weight.nbytes for weight in policy.parameters()) * _kept_copies(curriculum))
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


def _kept_copies(curriculum: Curriculum) -> int:
    """Return how many copies of the weights the folder may hold: models, and a Fisher and weights per anchor."""
    stages, protection = len(curriculum.stages), curriculum.protection
    anchors = range(1, stages) if protection.method in ("ewc", "l2") else ()
    return stages + 1 + sum(2 if protection.online else 2 * number for number in anchors)


def resume_curriculum(
    output: str | Path, model: str | Path | None = None, *, curriculum: Curriculum | None = None, bars: bool = True
) -> CurriculumResult:
    """Resume a curriculum after the last stage that was done, with the same result as without the stop.

    On the same computer and with the same number of threads it is the same bit for bit (`resume_training`).

    Args:
        output: its folder.
        model, curriculum: what it was started with, or None; anything else is refused.

    Raises:
        ValueError: the folder holds no curriculum, or one with another model, other problems or other stages, or a file
            that the next stage needs is missing, damaged or replaced.
        BlockingIOError: another process is writing it.
    """
    started = time.perf_counter()
    folder = RunFolder(output)
    config = folder.read_config("curriculum", "curriculum")
    stored = curriculum_from_dict(config["curriculum"])
    if curriculum is not None and curriculum != stored:
        raise ValueError(f"`resume`: {folder.path} was started with other stages or protection; leave them out.")
    policy, tokenizer = load_policy(model_source(model or config["model"]))
    check_fingerprint(config["fingerprint"], fingerprint(policy), folder.path)
    problems = [_stage_problems(stored, split, config["data_path"], config["n"]) for split in ("train", "heldout")]
    check_same_data(config.get("data_fingerprints"), _data_fingerprints(problems), folder.path)
    with sigterm_interrupts(), folder.resume():
        progress = read_progress(folder.path)
        if progress.stages_done:
            _check_stage(folder, progress.stages_done)
            policy, tokenizer = load_policy(_model_folder(folder, progress.stages_done, len(stored.stages)))
            if stored.protection.method in ("ewc", "l2") and progress.stages_done < len(stored.stages):
                progress.anchors = _load_anchors(folder.path / f"stage-{progress.stages_done}", policy)
        return _go_on(folder, stored, policy, tokenizer, problems, progress, started, bars)


def read_progress(output: str | Path) -> Progress:
    """Evaluations and metrics that a curriculum's folder holds, without anchors.

    Raises ValueError where the file of a stage is damaged.
    """
    progress = Progress()
    while (path := Path(output) / f"stage-{len(progress.rows)}.json").is_file():
        try:
            content = json.loads(path.read_bytes())
            row, history = [Evaluation(**part) for part in content["evaluations"]], content["history"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"`resume`: {path} is damaged; {_again(path.name)}.") from None
        progress.rows.append(row)
        progress.histories += [history] if len(progress.rows) > 1 else []
    return progress


def _again(name: str) -> str:
    return f"restore it, or delete {name} and those of later stages, which are then repeated"


def _check_stage(folder: RunFolder, number: int) -> None:
    """Raise ValueError where a file that a stage left is not as the stage left it.

    Each stage's file has the hashes of its model, its anchors and the file of the stage before. Folders of earlier
    versions have none, and are not checked.
    """
    for later in range(number, 0, -1):
        content = json.loads((folder.path / f"stage-{later}.json").read_bytes())
        files = {
            name: wanted
            for name, wanted in content.get("files", {}).items()
            if later == number or name == f"stage-{later - 1}.json"
        }
        check_files(folder.path, files, "`resume`", _again(f"stage-{later}.json"))


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
            _keep_stage(folder, done, total, policy, tokenizer)
    except _STOPS as error:
        folder.note_kept(error, f"{progress.stages_done} of {total} stages")
        raise
    matrix = progress.matrix([stage.name for stage in curriculum.stages])
    result = CurriculumResult(folder.path, curriculum, matrix, time.perf_counter() - started)
    write_result(folder, result)
    return result


def _keep_stage(
    folder: RunFolder, progress: Progress, total: int, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Save a stage: model and anchors first, the JSON file that marks the stage as done last."""
    number = progress.stages_done
    content: dict[str, Any] = {"evaluations": [asdict(part) for part in progress.rows[-1]], "history": []}
    if number:
        content["history"] = progress.histories[-1]
        save_policy(policy, tokenizer, _model_folder(folder, number, total), overwrite=True)
        if number < total and progress.anchors:
            _save_anchors(folder.path / f"stage-{number}", progress.anchors)
        kept = [*_model_folder(folder, number, total).iterdir(), folder.path / f"stage-{number - 1}.json"]
        kept += (folder.path / f"stage-{number}").glob("anchors.*")
        content["files"] = {path.relative_to(folder.path).as_posix(): measure(path) for path in sorted(kept)}
    folder.write_json(f"stage-{number}.json", content)


def _model_folder(folder: RunFolder, number: int, total: int) -> Path:
    return folder.model if number == total else folder.path / f"stage-{number}" / "model"


def _save_anchors(place: Path, anchors: list[Anchor]) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for number, anchor in enumerate(anchors):
        for kind in ("fisher", "anchor_params"):
            tensors |= {f"{number}.{kind}.{name}": value for name, value in getattr(anchor, kind).items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, place / "anchors.safetensors")


def _load_anchors(place: Path, model: nn.Module) -> list[Anchor]:
    """Read what protects the tasks so far; raises ValueError where it is missing, damaged or of another model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file, parts = place / "anchors.safetensors", dict[int, dict[str, dict[str, Tensor]]]()
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"`resume`: {file}, without which earlier tasks are not protected, cannot be read ({error}); "
            f"{_again(f'{place.name}.json')}."
        ) from None
    for key, value in stored.items():
        number, kind, name = key.split(".", 2)
        parts.setdefault(int(number), {"fisher": {}, "anchor_params": {}})[kind][name] = value
    anchors = [Anchor(**parts[number]) for number in sorted(parts)]
    for anchor in anchors:
        check_fits(dict(model.named_parameters()), anchor.fisher, f"{file}: fisher")
    return anchors


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
