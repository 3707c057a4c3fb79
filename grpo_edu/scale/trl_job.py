"""One training run by several processes: what the job of a cluster runs in each of them.

    accelerate launch --config_file accelerate_cpu.yaml -m grpo_edu.scale.trl_job --profile job.json --output run

TRL's `GRPOTrainer` trains with this package's problems, rewards, adapters and settings. accelerate connects the
processes, over gloo on CPUs and over NCCL on GPUs, and DeepSpeed takes part if accelerate's configuration says so.
Each process evaluates its part of the held-out problems before and after the training. The main process writes the
run's folder, which looks like that of `grpo-edu train`. A job that was stopped and is started again continues from
TRL's last checkpoint in that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.config import ROLLOUTS
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.runs.folder import RunFolder
from grpo_edu.runs.log import read_log
from grpo_edu.runs.look import first_look
from grpo_edu.runs.options import RunConfig
from grpo_edu.runs.profiles import load_profile
from grpo_edu.runs.record import RunMetadata, read_record, read_run_result
from grpo_edu.runs.recording import open_logs
from grpo_edu.runs.run import open_policy, save_trained_policy, with_adapters
from grpo_edu.runs.summary import RunResult, write_result
from grpo_edu.runs.symptoms import sample_weights, unchanged
from grpo_edu.runs.tracking import check_trackers
from grpo_edu.scale.trl_backend import build_trainer, ignore_known_warnings, report_steps, sampled_columns, trl_settings

if TYPE_CHECKING:
    import trl
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.problems.templates import Problem

_PATIENCE = timedelta(hours=6)  # the longest that a process waits for another one, which may be evaluating or saving


def main(typed: Sequence[str] | None = None) -> int:
    """Run the command in this process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m grpo_edu.scale.trl_job", description=__doc__)
    add = parser.add_argument
    add("--profile", required=True, metavar="FILE", help="the job.json that `grpo-edu cluster` wrote")
    add("--output", required=True, metavar="DIR", help="folder of the run")
    add("--rollout", choices=ROLLOUTS, help="what samples completions (default: vllm on GPUs if it is installed)")
    add("--micro-batch-size", type=int, metavar="N", help="completions per pass of one process (default: all)")
    options = parser.parse_args(typed)
    try:
        train_on_processes(
            load_profile(options.profile).request(),
            options.output,
            rollout=options.rollout,
            micro_batch_size=options.micro_batch_size,
        )
    except (ValueError, OSError) as error:
        rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        print(f"grpo-edu: error in process {rank} of {count}: {error}", file=sys.stderr)
        return 2
    return 0


def train_on_processes(
    request: RunConfig, output: str | Path, *, rollout: str | None = None, micro_batch_size: int | None = None
) -> RunResult | None:
    """Train with TRL in this process and in those that were started with it; the main process returns the result.

    Args:
        request: the run; its `prompts_per_step` counts the prompts of all processes together.
        output: the run's folder. If it holds the same run, stopped before its end, that run continues.
        rollout: what samples completions, see `build_trainer`; None takes vLLM on a GPU where it is installed, and
            this package's `generate` elsewhere.
        micro_batch_size: completions per forward and backward pass of one process, see `trl_settings`.

    Raises:
        ValueError: settings that TRL does not have, or that so many processes cannot share.
        FileExistsError: the folder holds a finished run, another run, or files that are no run.
        OSError: model, data or folder cannot be read or written.
    """
    from accelerate import PartialState

    started, request = time.perf_counter(), replace(request, backend="trl")
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=_PATIENCE)
    job = _Job(request, RunFolder(output), state.is_main_process, state.process_index, state.num_processes)
    rollout = rollout or default_rollout()
    arguments = job.trl_arguments(rollout, micro_batch_size)
    record = RunMetadata.start(request, " ".join(sys.argv))
    with ExitStack() as held:
        if job.is_main:
            job.claim(record, held)
        policy, tokenizer = open_policy(record, device="cpu")  # accelerate chooses the process's own device
        policy = with_adapters(policy.to(state.device), request)
        sample = sample_weights(policy)
        data = request.load_data()
        if job.is_main:
            job.folder.write_text("first_look.txt", first_look(request, data.problems, data.heldout, policy, tokenizer))
        before = job.evaluation_before(policy, tokenizer, data.heldout)
        trainer = build_trainer(
            policy, tokenizer, data.problems, data.reward_funcs, request.config, rollout=rollout, arguments=arguments
        )
        checkpoint = last_checkpoint(job.folder.checkpoints)
        history = job.stored_history(checkpoint)
        done = len(history)
        trainer.add_callback(
            report_steps(request.config, job.step_log(record, history, held, partial(sampled_columns, trainer)))
        )
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        after = job.evaluate(policy, tokenizer, data.heldout)
        result = None
        if job.is_main:
            is_unchanged = unchanged(policy, sample)
            save_trained_policy(policy, tokenizer, job.folder)
            seconds = time.perf_counter() - started
            result = RunResult(
                job.folder.path, record, history, before, after, seconds, steps_before=done, unchanged=is_unchanged
            )
            write_result(job.folder, result)
            job.folder.drop_state()
    state.wait_for_everyone()
    state.destroy_process_group()
    return result


def default_rollout() -> str:
    """Return what samples completions on this computer: vLLM on a GPU where it is installed, else "grpo_edu"."""
    return "vllm" if torch.cuda.is_available() and find_spec("vllm") else "grpo_edu"


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint that TRL wrote in a folder; trainer_state.json is written at its end."""
    complete = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json") if _is_json(file)]
    return max(complete, key=lambda place: int(place.name.removeprefix("checkpoint-")), default=None)


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Job:
    """A run in one of its processes: the folder, which only the main process writes, and the process's number."""

    request: RunConfig
    folder: RunFolder
    is_main: bool
    index: int
    processes: int

    def trl_arguments(self, rollout: str, micro_batch_size: int | None) -> trl.GRPOConfig:
        """Return TRL's configuration: that of `trl_settings`, on this process's device, with checkpoints."""
        import trl

        ignore_known_warnings()
        settings = trl_settings(self.request.config, processes=self.processes, micro_batch_size=micro_batch_size)
        every = self.request.checkpoint_every * self.request.config.updates_per_step
        settings |= {
            "output_dir": str(self.folder.checkpoints),
            "use_cpu": not torch.cuda.is_available(),
            "use_vllm": rollout == "vllm",
            "ddp_timeout": int(_PATIENCE.total_seconds()),
        }
        if every:
            settings |= {"save_strategy": "steps", "save_steps": every, "save_total_limit": 2}
        return trl.GRPOConfig(**settings)

    def claim(self, record: RunMetadata, held: ExitStack) -> None:
        """Lock the run's folder and write config.json, or find in it the run that continues.

        Raises FileExistsError: the folder holds a finished run, another run, or files that are no run.
        """
        check_trackers(record.run_config.report_to)
        stored = read_record(self.folder.path)
        if stored is None:
            held.enter_context(self.folder.begin(record.to_dict()))
            return
        if read_run_result(self.folder.path) is not None:
            raise FileExistsError(f"output: {self.folder.path} holds a finished run; choose another folder")
        if stored.run_config.to_dict() != record.run_config.to_dict():
            raise FileExistsError(
                f"output: {self.folder.path} holds a run with other settings; choose another folder, or remove it"
            )
        held.enter_context(self.folder.resume())

    def evaluate(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heldout: Sequence[Problem]
    ) -> Evaluation:
        """Evaluate with all processes: each takes every P-th problem, and all get the whole evaluation."""
        from accelerate.utils import gather_object

        config = self.request.config
        rows = range(self.index, len(heldout), self.processes)
        found = []
        if rows:
            part = evaluate(
                policy,
                tokenizer,
                [heldout[row] for row in rows],
                max_completion_length=config.max_completion_length,
                seed=config.seed + self.index,
                progress=False,
            )
            found = [(row, asdict(part.take([place]))) for place, row in enumerate(rows)]
        columns: dict[str, list] = {}
        for _, row_fields in sorted(gather_object(found), key=lambda pair: pair[0]):
            for name, values in row_fields.items():
                columns.setdefault(name, []).extend(values)
        return Evaluation(**columns)

    def evaluation_before(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heldout: Sequence[Problem]
    ) -> Evaluation:
        """Evaluate before training; a run that continues has the evaluation stored."""
        from accelerate.utils import broadcast_object_list

        file = self.folder.path / "before.json"
        stored = [json.loads(file.read_text(encoding="utf-8")) if self.is_main and file.is_file() else None]
        broadcast_object_list(stored)
        if stored[0] is not None:
            return Evaluation(**stored[0]["sampled"])
        before = self.evaluate(policy, tokenizer, heldout)
        if self.is_main:
            self.folder.write_json("before.json", {"sampled": asdict(before), "greedy": None})
        return before

    def stored_history(self, checkpoint: Path | None) -> list[dict[str, float]]:
        """Return the metrics of the steps up to a checkpoint, in the main process; the others keep none."""
        if checkpoint is None or not self.is_main:
            return []
        done = int(checkpoint.name.removeprefix("checkpoint-")) // self.request.config.updates_per_step
        return [metrics for metrics in read_log(self.folder.metrics) if metrics["step"] <= done]

    def step_log(
        self,
        record: RunMetadata,
        history: list[dict[str, float]],
        held: ExitStack,
        sampled: Callable[[], dict[str, Any]],
    ) -> Callable[[dict[str, float]], None]:
        """Return what the metrics of each step are given to: the run's log and trackers, in the main process."""
        if not self.is_main:
            return lambda metrics: None
        logs = [history.append, *open_logs(held, self.folder, history, record, sampled)]

        def report(metrics: dict[str, float]) -> None:
            for append in logs:
                append(metrics)

        return report


if __name__ == "__main__":
    raise SystemExit(main())
