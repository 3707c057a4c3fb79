"""The same run through TRL's own `GRPOTrainer`: same problems, rewards, settings and metric keys.

`train_with_trl` is `trainer.train` with TRL behind it, so that notebooks and `grpo-edu train --backend trl` run
either. `build_trainer` hands out the `GRPOTrainer` itself. Completions come from this package's `rollout.generate`,
through TRL's hook `rollout_func`, or from transformers' `generate` as in stock TRL (`rollout="transformers"`).

The two backends optimize the same loss. They differ in what no loss sees: the order of the problems and the sampled
tokens (TRL draws from the global random state), and TRL reads each prompt once a completion, in padded rows. One
setting differs in effect: TRL's weight decay leaves out biases and norms. One it lacks: `abort_grad_norm`.
"""

from __future__ import annotations

import copy
import queue
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.config import GRPOConfig
from grpo_edu.problems import Problem
from grpo_edu.prompts import chat_messages
from grpo_edu.rewards import RewardFunction
from grpo_edu.rollout import generate
from grpo_edu.training_state import check_problems

if TYPE_CHECKING:
    import trl
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

ROLLOUTS = ("grpo_edu", "transformers")
# Of what TRL logs, this package's trainer has no counterpart to these.
_TRL_ALONE = ("epoch", "clip_ratio/low_min", "clip_ratio/high_max")
# What TRL 1.16 warns of in every run: its hook is experimental, and transformers has renamed a setting that it uses.
_KNOWN = ("You are using 'rollout_func'", r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated")
# Settings that mean the same in both configs, under the same name.
_SHARED = (
    "num_generations", "max_completion_length", "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler_type",
    "num_iterations", "gradient_accumulation_steps", "temperature", "top_p", "top_k", "min_p", "loss_type",
    "importance_sampling_level", "epsilon", "epsilon_high", "scale_rewards", "mask_truncated_completions", "seed",
    "optim", "gradient_checkpointing", "shuffle_dataset",
)  # fmt: skip


def train_with_trl(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    config: GRPOConfig,
    *,
    rollout: str = "grpo_edu",
    **options: Any,
) -> Generator[dict[str, float], None, None]:
    """Train `model` in place with TRL's `GRPOTrainer`; yields the metrics of each step, as `trainer.train` does.

    TRL's loop runs on a thread of its own and waits after each step until the next metrics are asked for, so that
    whoever stops asking, by Ctrl-C or `close()`, leaves the model as the last full step left it.

    Args:
        model, tokenizer, problems, reward_funcs, config: as for `trainer.train`. A reward function gets chat messages
            where this package's trainer gives it strings, as always in TRL.
        rollout: "grpo_edu", or "transformers" for stock TRL.
        options: as for `build_trainer`.

    Raises:
        ValueError: as `build_trainer`. Whatever happens inside TRL is raised as it comes.
    """
    trainer = build_trainer(model, tokenizer, problems, reward_funcs, config, rollout=rollout, **options)
    relay = _Relay()
    trainer.add_callback(relay.callback())
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(trainer.train)
        training.add_done_callback(lambda _: relay.metrics.put({}))  # the end, of whatever kind
        try:
            for step in range(1, config.max_steps + 1):
                relay.asked.release()
                metrics = relay.metrics.get() or training.result()
                yield {"step": step, **{name: value for name, value in metrics.items() if name not in _TRL_ALONE}}
            relay.asked.release()
            training.result()
        finally:
            relay.stopped = True
            relay.asked.release()
    model.eval()


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    config: GRPOConfig,
    *,
    rollout: str = "grpo_edu",
    output_dir: str | Path | None = None,
    **options: Any,
) -> trl.GRPOTrainer:
    """TRL's `GRPOTrainer`, ready for `.train()`, set up as `config` says. Nothing is reported, uploaded or saved.

    Args:
        model, tokenizer, problems, reward_funcs, config: as for `trainer.train`.
        rollout: who samples: "grpo_edu" or "transformers" (stock TRL).
        output_dir: where TRL may write; None for a folder that goes with the trainer.
        options: settings of `trl.GRPOConfig` to add, or to replace (`gradient_checkpointing=True`, say).

    Raises:
        ValueError: too few problems, an unknown `rollout`, or an advantage estimator that TRL lacks; what TRL's
            config refuses.
    """
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    if rollout not in ROLLOUTS:
        raise ValueError(f"rollout: {rollout!r} is unknown; choose one of {', '.join(ROLLOUTS)}")
    check_problems(problems, config)
    settings = {**trl_settings(config), **options}
    folder = str(output_dir or tempfile.mkdtemp(prefix="grpo-edu-trl-"))
    functions = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
    for said in _KNOWN:
        warnings.filterwarnings("ignore", message=said)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=functions,
        args=trl.GRPOConfig(output_dir=folder, **settings),
        train_dataset=Dataset.from_list(
            [{**asdict(problem), "prompt": chat_messages(problem.prompt)} for problem in problems]
        ),
        processing_class=tokenizer,
        rollout_func=group_rollout(config) if rollout == "grpo_edu" else None,
    )
    trainer.remove_callback(PrinterCallback)  # it prints every step's metrics
    if config.beta:
        _set_reference(trainer, config.beta)
    if output_dir is None:
        weakref.finalize(trainer, shutil.rmtree, folder, ignore_errors=True)
    return trainer


def trl_settings(config: GRPOConfig) -> dict[str, Any]:
    """What `trl.GRPOConfig` is given for a `GRPOConfig` of this package.

    TRL counts optimizer updates where this package counts rollouts, so step numbers are multiplied by
    `num_iterations`, and everything is logged once a rollout.

    >>> settings = trl_settings(GRPOConfig(num_iterations=2, max_steps=10, gradient_accumulation_steps=4))
    >>> settings["max_steps"], settings["logging_steps"], settings["per_device_train_batch_size"]
    (20, 2, 32)
    """
    if config.advantage_estimator != "group":
        raise ValueError(f"advantage_estimator: TRL's GRPOTrainer has no {config.advantage_estimator!r}, only 'group'")
    ours = {
        "optimizer_in_backward": config.optimizer_in_backward,
        "memory_budget_gib": config.memory_budget_gib is not None,
        "rollout_quantization": config.rollout_quantization is not None,
    }
    if any(ours.values()):
        name = next(name for name, asked in ours.items() if asked)
        raise ValueError(f"{name}: TRL's GRPOTrainer has no such thing; leave it out, or train without TRL")
    updates = config.num_iterations
    return {
        **{name: getattr(config, name) for name in _SHARED},
        "reward_weights": None if config.reward_weights is None else list(config.reward_weights),
        "max_steps": config.max_steps * updates,
        "warmup_steps": config.warmup_steps * updates,
        "logging_steps": updates,
        "per_device_train_batch_size": config.batch_size // config.gradient_accumulation_steps,
        "beta": 0.0,  # see _set_reference
        "use_bias_correction_kl": False,
        "disable_dropout": True,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def group_rollout(config: GRPOConfig) -> Callable[[list, trl.GRPOTrainer], dict[str, list]]:
    """A function for TRL's hook `rollout_func`: this package's `generate` on the distinct prompts of a batch.

    TRL hands over every prompt `num_generations` times, as chat messages, and wants token ids without padding and
    the log-probabilities of the sampled tokens.
    """
    generator = torch.Generator().manual_seed(config.seed)

    def rollout_func(prompts: list, trainer: trl.GRPOTrainer) -> dict[str, list]:
        tokenizer = trainer.processing_class
        rendered = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in prompts[:: config.num_generations]
        ]
        rollout = generate(
            trainer.accelerator.unwrap_model(trainer.model), tokenizer, rendered,
            num_generations=config.num_generations, max_completion_length=config.max_completion_length,
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
            generator=generator,
        )  # fmt: skip
        return {
            "prompt_ids": _unpadded(rollout.prompt_ids, rollout.prompt_mask),
            "completion_ids": _unpadded(rollout.completion_ids, rollout.completion_mask),
            "logprobs": _unpadded(rollout.sampling_per_token_logps, rollout.completion_mask),
        }

    return rollout_func


def _unpadded(rows: torch.Tensor, mask: torch.Tensor) -> list[list]:
    return [row[real].tolist() for row, real in zip(rows, mask.bool(), strict=True)]


def _set_reference(trainer: trl.GRPOTrainer, beta: float) -> None:
    """Compare with the policy as it stands. TRL would load a reference by the name of the model, which need not be
    what is trained, nor be anywhere at all. An adapter is its own reference: switched off."""
    trainer.beta = trainer.args.beta = beta
    if not hasattr(trainer.model, "peft_config"):
        reference = copy.deepcopy(trainer.model).requires_grad_(False)
        trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)


class _Stopped(RuntimeError):
    """Ends TRL's loop before an update that nobody waits for."""


class _Relay:
    """Hands the metrics of each step from TRL's thread to the generator; TRL goes on when the next are asked for."""

    def __init__(self) -> None:
        self.metrics: queue.Queue[dict[str, float]] = queue.Queue()
        self.asked = threading.Semaphore(0)
        self.stopped = False

    def wait(self) -> None:
        """On TRL's thread: sleep until the next step is asked for."""
        self.asked.acquire()
        self.check()

    def check(self) -> None:
        """On TRL's thread: end it where nobody asks any more."""
        if self.stopped:
            raise _Stopped

    def callback(self) -> TrainerCallback:
        """What TRL calls around its steps."""
        from transformers import TrainerCallback

        relay = self

        class Callback(TrainerCallback):
            """Times a step from its rollout to its last update, and keeps the learning rate that the update used."""

            def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
                relay.wait()
                self.started = time.perf_counter()

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
                relay.check()
                self.learning_rate = objects["optimizer"].param_groups[0]["lr"]

            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **objects: Any) -> None:
                if "train_runtime" in logs:  # the closing summary
                    return
                seconds = time.perf_counter() - self.started
                relay.metrics.put({**logs, "learning_rate": self.learning_rate, "step_time": seconds})
                relay.wait()
                self.started = time.perf_counter()

        return Callback()
