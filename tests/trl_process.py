"""What each process of test_trl_job runs: `grpo_edu.scale.trl_job`, with its weights kept, and killed where asked."""

import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

from safetensors.torch import save_file

from grpo_edu.scale import trl_job
from grpo_edu.scale.trl_backend import build_trainer, report_steps


def main() -> int:
    """Environment: KILL_AT, a step after which the process of rank 1 kills itself; KEEP, a folder for the weights."""
    rank, trainers = os.environ["RANK"], []
    if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
        import deepspeed  # noqa: F401  so that the next line finds its module

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled

    def build(*arguments, **options):
        trainers.append(build_trainer(*arguments, **options))
        return trainers[0]

    def report(config, report_metrics, **options):
        def report_and_stop(metrics):
            report_metrics(metrics)
            if rank == "1" and metrics["step"] == int(os.environ.get("KILL_AT", "0")):
                os.kill(os.getpid(), signal.SIGKILL)

        return report_steps(config, report_and_stop, **options)

    with patch.multiple(trl_job, build_trainer=build, report_steps=report):
        code = trl_job.main()
    if code == 0:
        model = trainers[0].accelerator.unwrap_model(trainers[0].model)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        save_file(weights, Path(os.environ["KEEP"]) / f"rank{rank}.safetensors")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
