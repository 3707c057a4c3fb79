"""Training steps in a process of their own, watched: how long they take, and how much memory each stage holds.

Memory that a process has freed may be used again without the system noticing, so only a fresh process tells how much
a training needs. `measure_steps` starts one; ``python -m grpo_edu.step_process`` is that process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.memory import LARGE_MODEL, PeakMemory, resident_bytes, return_large_blocks
from grpo_edu.startup import measure_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STAGES = ("loading", "rollout", "learning", "optimizer step")


@dataclass(frozen=True)
class MeasuredSteps:
    """What a process of training steps reports.

    startup: seconds from its start to the end of the first step. samples_per_second: completions or worked solutions,
        the median of the steps after the first.
    libraries, peak: bytes that the process held before it loaded the model, and the most that it ever held.
    trained, parameters: how many numbers learn, and how many there are.
    loss, grad_norm: of the first step.
    curve: (seconds, bytes) pairs. stages: (seconds, name of `STAGES`) pairs, where each begins; both count from the
        loading of the model.
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
        """Bytes at the peak, without Python and its libraries."""
        return self.peak - self.libraries


def measure_steps(
    config: GRPOConfig | SupervisedConfig,
    *,
    model: str = "tiny",
    shape: Mapping[str, Any] | None = None,
    lora_rank: int = 0,
    dtype: str = "float32",
    whole_logits: bool = False,
    warm_up: bool = False,
) -> MeasuredSteps:
    """Make `config.max_steps` training steps in a fresh process, and report its time and memory.

    Every step sees the first `prompts_per_step` training problems of level "advanced".

    Args:
        config: at least 2 steps. A `SupervisedConfig` trains on worked solutions.
        model: as for `load_policy`.
        shape: settings of a `Qwen2Config`; random weights of this shape take the place of `model`. Since they earn
            no reward, completions are paid by a number that no group ties on.
        lora_rank: rank of adapters; 0: all weights learn.
        dtype: of the weights.
        whole_logits: hold the logits of a pass all at once.
        warm_up: make a small step of the tiny model first, so that what libraries set up at their first use is
            counted as theirs.

    Raises:
        ValueError: fewer than 2 steps. RuntimeError: the process failed; the message is its last line.
    """
    if config.max_steps < 2:
        raise ValueError(f"config: max_steps = {config.max_steps} must be at least 2; the first step is start-up")
    case = {
        "kind": type(config).__name__, "config": config.to_dict(), "model": model, "shape": shape and dict(shape),
        "lora_rank": lora_rank, "dtype": dtype, "whole_logits": whole_logits, "warm_up": warm_up,
    }  # fmt: skip
    found = measure_process([sys.executable, "-m", "grpo_edu.step_process", json.dumps(case)])
    measured: dict[str, Any] = dict(found)
    for name in ("curve", "stages"):
        measured[name] = [tuple(pair) for pair in measured[name]]
    return MeasuredSteps(**measured)


class MemoryCurve(PeakMemory):
    """`PeakMemory` that also keeps what each look saw, and where stages of the work began."""

    def __init__(self, interval: float = 0.01) -> None:
        super().__init__(interval)
        self.opened = time.perf_counter()
        self.curve: list[tuple[float, int]] = []
        self.stages: list[tuple[float, str]] = []

    def mark(self, stage: str) -> None:
        """A stage begins; nothing happens where it has begun already."""
        if not self.stages or self.stages[-1][1] != stage:
            self.stages.append((time.perf_counter() - self.opened, stage))

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            held = resident_bytes()
            self.peak = max(self.peak, held)
            self.curve.append((time.perf_counter() - self.opened, held))


def run_case(case: Mapping[str, Any], started: float) -> MeasuredSteps:
    """Make the steps of a case in this process, which started at `started` (time.time())."""
    from grpo_edu.heavy_imports import collector_paused

    with collector_paused():
        import transformers.modeling_utils  # noqa: F401  before the libraries are weighed

        import grpo_edu.trainer  # noqa: F401

        if case["lora_rank"]:
            import peft  # noqa: F401
    kinds = {kind.__name__: kind for kind in (GRPOConfig, SupervisedConfig)}
    config = kinds[case["kind"]](**case["config"])
    if case["warm_up"]:
        small = GRPOConfig(prompts_per_step=1, num_generations=2, max_completion_length=4)
        next(_steps(*_policy({**case, "shape": None, "model": "tiny", "dtype": None}), small, MemoryCurve(), True))
    if case["whole_logits"]:
        import grpo_edu.logprobs

        grpo_edu.logprobs.LOGITS_PER_CHUNK = sys.maxsize  # in this process alone
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
    """The model of a case, with the adapters that it asks for, and a tokenizer."""
    import torch

    from grpo_edu.models import load_policy

    torch.manual_seed(0)
    if case["shape"] is None:
        model, tokenizer = load_policy(case["model"], case["dtype"])
    else:
        from transformers import AutoModelForCausalLM, Qwen2Config

        tokenizer = load_policy("tiny")[1]
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        shape = Qwen2Config(**{**ends, **case["shape"]})
        model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, case["dtype"])).eval()
        if model.get_memory_footprint() >= LARGE_MODEL:
            return_large_blocks()  # as load_policy does
    if case["lora_rank"]:
        from grpo_edu.adapters import add_lora

        model = add_lora(model, rank=case["lora_rank"])
    return model, tokenizer


def _steps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig | SupervisedConfig,
    memory: MemoryCurve,
    random_weights: bool,
) -> Iterator[dict[str, float]]:
    """The metrics of each step; the stages are marked where they begin."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from grpo_edu.data import load_problems
    from grpo_edu.rewards import accuracy_reward
    from grpo_edu.supervised import finetune
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
    """A reward that no group of a random policy ties on: the sum of a completion's token ids, modulo a prime."""
    return [float(sum(ids) % 1009) for ids in completion_ids]


def main() -> None:
    """The fresh process: make the steps and print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m grpo_edu.step_process", description=main.__doc__)
    parser.add_argument("case", type=json.loads)
    parser.add_argument("started", type=float, help="time.time() when the process was started")
    options = parser.parse_args()
    print(json.dumps(asdict(run_case(options.case, options.started))))


if __name__ == "__main__":
    main()
