"""Measure the time and memory of training steps in a fresh process.

A process may use memory again that it freed earlier, and the operating system does not notice. Only a fresh process
therefore shows how much memory a training run needs. `measure_steps` starts one, which runs
``python -m grpo_edu.machine.step_process``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.fast.memory import LARGE_MODEL, PeakMemory, resident_bytes, return_large_blocks
from grpo_edu.machine.startup import measure_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class MeasuredSteps:
    """Time and memory of training steps in a process of their own.

    startup: seconds from the start of the process to the end of the first step.
    samples_per_second: completions or worked solutions per second, the median of the steps after the first.
    libraries, peak: bytes that the process held before it loaded the model, and the most that it ever held.
    trained, parameters: the number of parameters that are trained, and of all parameters.
    loss, grad_norm: values of the first step.
    curve: (seconds, bytes) pairs. stages: (seconds, name) pairs, the beginning of each stage ("loading", "rollout",
        "learning", "optimizer step"). Both count from the moment at which the model is loaded.
    """

    startup: float
    samples_per_second: float
    libraries: int
    peak: int
    trained: int
    parameters: int
    loss: float
    grad_norm: float
    curve: list[tuple[float, int]]
    stages: list[tuple[float, str]]

    @property
    def needed(self) -> int:
        """Bytes at the peak, without those of Python and its libraries."""
        return self.peak - self.libraries


def measure_steps(
    config: GRPOConfig | SupervisedConfig,
    *,
    model: str = "tiny",
    shape: str | Mapping[str, Any] | None = None,
    lora_rank: int = 0,
    dtype: str = "float32",
    whole_logits: bool = False,
    warm_up: bool = False,
) -> MeasuredSteps:
    """Run `config.max_steps` training steps in a fresh process, and measure its time and memory.

    Every step uses the first `prompts_per_step` training problems of the level "advanced".

    Args:
        config: at least 2 steps. A `SupervisedConfig` trains on worked solutions.
        model: as for `load_policy`.
        shape: as for `shape_config`; random weights of this shape take the place of `model`. Because they earn no
            reward, completions are scored by a number on which no group ties.
        lora_rank: the rank of LoRA adapters; with 0 all weights are trained.
        dtype: dtype of the weights.
        whole_logits: hold all logits of a forward pass at once, instead of computing them in chunks.
        warm_up: run a small step of the tiny model first, so that memory which libraries allocate at their first use
            is counted as theirs.

    Raises:
        ValueError: fewer than 2 steps. RuntimeError: the process failed; the message is the last line of its stderr.
    """
    if config.max_steps < 2:
        raise ValueError(
            f"config: max_steps must be at least 2, because the first step is start-up; got {config.max_steps}"
        )
    case = {
        "kind": type(config).__name__,
        "config": asdict(config),
        "model": model,
        "shape": dict(shape) if isinstance(shape, Mapping) else shape,
        "lora_rank": lora_rank,
        "dtype": dtype,
        "whole_logits": whole_logits,
        "warm_up": warm_up,
    }
    measured: dict[str, Any] = measure_process(
        [sys.executable, "-m", "grpo_edu.machine.step_process", json.dumps(case)]
    )
    for name in ("curve", "stages"):
        measured[name] = [tuple(pair) for pair in measured[name]]
    return MeasuredSteps(**measured)


class MemoryCurve(PeakMemory):
    """`PeakMemory` that also records the memory over time, and the beginning of each stage."""

    def __init__(self, interval: float = 0.01) -> None:
        super().__init__(interval)
        self.opened = time.perf_counter()
        self.curve: list[tuple[float, int]] = []
        self.stages: list[tuple[float, str]] = []

    def mark(self, stage: str) -> None:
        """Record that a stage begins; a stage that continues is recorded once."""
        if not self.stages or self.stages[-1][1] != stage:
            self.stages.append((time.perf_counter() - self.opened, stage))

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            held = resident_bytes()
            self.peak = max(self.peak, held)
            self.curve.append((time.perf_counter() - self.opened, held))


def run_case(case: Mapping[str, Any], started: float) -> MeasuredSteps:
    """Run the steps of a case in this process, which was started at the time `started` (time.time())."""
    from grpo_edu import gc_paused

    with gc_paused():
        import transformers.modeling_utils  # noqa: F401  before the memory of the libraries is measured

        import grpo_edu.trainer  # noqa: F401

        if case["lora_rank"]:
            import peft  # noqa: F401
    kinds = {kind.__name__: kind for kind in (GRPOConfig, SupervisedConfig)}
    config = kinds[case["kind"]](**case["config"])
    if case["warm_up"]:
        small = GRPOConfig(prompts_per_step=1, num_generations=2, max_completion_length=4)
        next(_steps(*_policy({**case, "shape": None, "model": "tiny", "dtype": None}), small, MemoryCurve(), True))
    if case["whole_logits"]:
        import grpo_edu.fast.chunked_logps

        grpo_edu.fast.chunked_logps.LOGITS_PER_CHUNK = sys.maxsize  # in this process only
    with MemoryCurve() as memory:
        memory.mark("loading")
        model, tokenizer = _policy(case)
        steps = _steps(model, tokenizer, config, memory, case["shape"] is not None)
        metrics = [next(steps)]
        startup = time.time() - started
        metrics += steps
    samples = getattr(config, "batch_size", config.prompts_per_step)
    counts = [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    return MeasuredSteps(
        startup=startup,
        samples_per_second=samples / median(step["step_time"] for step in metrics[1:]),
        libraries=memory.start,
        peak=memory.peak,
        trained=sum(count for count, learns in counts if learns),
        parameters=sum(count for count, _ in counts),
        loss=metrics[0]["loss"],
        grad_norm=metrics[0]["grad_norm"],
        curve=memory.curve,
        stages=memory.stages,
    )


def _policy(case: Mapping[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model of a case, with its adapters, and a tokenizer."""
    import torch

    from grpo_edu.models import load_policy

    torch.manual_seed(0)
    if case["shape"] is None:
        model, tokenizer = load_policy(case["model"], case["dtype"])
    else:
        from transformers import AutoModelForCausalLM

        from grpo_edu.fast.memory_estimate import shape_config

        tokenizer = load_policy("tiny")[1]
        config = shape_config(case["shape"])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case["dtype"])).eval()
        if model.get_memory_footprint() >= LARGE_MODEL:
            return_large_blocks()  # as load_policy does
    if case["lora_rank"]:
        from grpo_edu.fast.lora import add_lora

        model = add_lora(model, rank=case["lora_rank"])
    return model, tokenizer


def _steps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig | SupervisedConfig,
    memory: MemoryCurve,
    random_weights: bool,
) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step, and record where the stages begin."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from grpo_edu.continual.supervised import finetune
    from grpo_edu.problems.files import load_problems
    from grpo_edu.rewards import accuracy_reward
    from grpo_edu.trainer import train

    def reward(**batch: Any) -> Sequence[float | None]:
        memory.mark("learning")
        return (never_tied if random_weights else accuracy_reward)(**batch)

    problems = load_problems("advanced", "train", n=config.prompts_per_step)
    if isinstance(config, SupervisedConfig):
        steps, first = finetune(model, tokenizer, problems, config), "learning"
    else:
        steps, first = train(model, tokenizer, problems, reward, config), "rollout"
    hook = register_optimizer_step_pre_hook(lambda *_: memory.mark("optimizer step"))
    try:
        for _ in range(config.max_steps):
            memory.mark(first)
            yield next(steps)
    finally:
        hook.remove()


def never_tied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that never tie for a random policy's completions: the sum of the token ids, modulo a prime."""
    return [float(sum(ids) % 1009) for ids in completion_ids]


def main() -> None:
    """The fresh process, with the arguments of `measure_process`: run the steps and print the measurements."""
    case, started = sys.argv[1:]
    print(json.dumps(asdict(run_case(json.loads(case), float(started)))))


if __name__ == "__main__":
    main()
