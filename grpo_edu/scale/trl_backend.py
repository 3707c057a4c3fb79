"""Train with TRL's own `GRPOTrainer`: the same problems, rewards, settings and metric names as `trainer.train`.

`train_with_trl` is `trainer.train` with TRL behind it, so that notebooks and `grpo-edu train --backend trl` can run
either. `build_trainer` returns the `GRPOTrainer` itself. Completions come from this package's `rollout.generate`,
through TRL's hook `rollout_func`, or from transformers' `generate` as in stock TRL (`rollout="transformers"`). Several
processes train with TRL's own command line (`grpo_edu.scale.cluster`).

Both backends optimize the same loss. They differ in what the loss does not see: the order of the problems and the
sampled tokens (TRL draws them from the global random state), and TRL reads each prompt once per completion, in padded
rows. One setting has a different effect: TRL's weight decay leaves out biases and norms. One is missing in TRL:
`abort_grad_norm`.
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
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.advantages import ESTIMATORS
from grpo_edu.config import GRPOConfig
from grpo_edu.losses import LOSSES
from grpo_edu.problems.files import rows_to_dataset
from grpo_edu.problems.templates import Problem, as_problems, prompt_options
from grpo_edu.prompts import chat_messages, completion_text, prompt_style, render_messages
from grpo_edu.rewards import RewardFunction, for_trl
from grpo_edu.rollout import Sampler
from grpo_edu.runs.log import to_plain
from grpo_edu.trainer import check_inputs

if TYPE_CHECKING:
    import trl
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROLLOUTS = ("grpo_edu", "transformers")  # what may sample for TRL's trainer
# Metrics of TRL that this package's trainer does not have.
_TRL_ALONE = ("epoch", "clip_ratio/low_min", "clip_ratio/high_max", "policy_loss", "entropy_coef")
# Warnings of TRL 1.16 in every run: its hook is experimental, and transformers has renamed a setting that it uses.
_KNOWN = ("You are using 'rollout_func'", r"`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated")
# Settings that mean the same in both configs, under the same name.
_SHARED = (
    "num_generations max_completion_length learning_rate weight_decay max_grad_norm lr_scheduler_type num_iterations "
    "temperature top_p top_k loss_type importance_sampling_level epsilon epsilon_high use_bias_correction_kl "
    "entropy_coef scale_rewards mask_truncated_completions seed optim gradient_checkpointing shuffle_dataset"
).split()


def train_with_trl(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    config: GRPOConfig,
    *,
    rollout: str = "grpo_edu",
    arguments: trl.GRPOConfig | None = None,
    on_sampled: Callable[[dict[str, Any]], None] = lambda columns: None,
) -> Generator[dict[str, float], None, None]:
    """Train `model` in place with TRL's `GRPOTrainer`; yields the metrics of each step, as `trainer.train` does.

    TRL's loop runs on a thread of its own and waits after each step until the next metrics are requested. Whoever
    stops asking, by Ctrl-C or `close()`, therefore leaves the model as it was after the last complete step.

    Args:
        model, tokenizer, problems, reward_funcs, config: as for `trainer.train`. A reward function gets texts here too
            (`rewards.for_trl`), or chat messages if it declares that it `takes_messages`.
        rollout, arguments: what samples the completions, and TRL's own configuration, see `build_trainer`.
        on_sampled: gets `sampled_columns` of each step, before its metrics.

    Raises ValueError: as `build_trainer`. Errors inside TRL are raised unchanged.
    """
    trainer = build_trainer(model, tokenizer, problems, reward_funcs, config, rollout=rollout, arguments=arguments)
    relay = _make_relay(config)
    trainer.add_callback(relay)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(trainer.train)
        training.add_done_callback(lambda _: relay.metrics.put({}))  # the end, for whatever reason
        try:
            for _ in range(config.max_steps):
                relay.asked.release()
                metrics = relay.metrics.get() or training.result()
                on_sampled(sampled_columns(trainer))
                yield metrics
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
    arguments: trl.GRPOConfig | None = None,
) -> trl.GRPOTrainer:
    """Return TRL's `GRPOTrainer`, ready for `.train()`, set up as `config` says.

    Args:
        model, tokenizer, problems, reward_funcs, config: as for `trainer.train`.
        rollout: what samples the completions: "grpo_edu", or "transformers" (stock TRL).
        arguments: TRL's own configuration, for settings that this package does not have: take `trl_settings(config)`,
            add to it, and give `output_dir`. None takes `trl_settings(config)` and a temporary folder that is
            removed with the trainer; nothing is reported, uploaded or saved.

    Raises ValueError: too few problems, an unknown `rollout`, or a setting that TRL lacks; what TRL's config refuses.
    """
    import trl
    from transformers import PrinterCallback

    if rollout not in ROLLOUTS:
        raise ValueError(f"rollout: {rollout!r} is unknown; choose one of {', '.join(ROLLOUTS)}")
    problems = as_problems(problems)
    check_inputs(model, problems, config)
    ignore_known_warnings()
    temporary = None
    if arguments is None:
        settings = {**trl_settings(config), "use_cpu": model.device.type == "cpu"}
        temporary = tempfile.mkdtemp(prefix="grpo-edu-trl-")
        arguments = trl.GRPOConfig(output_dir=temporary, **settings)
    style = prompt_style(tokenizer)
    sampler = None
    if rollout == "grpo_edu":
        sampler = group_rollout(config, torch.Generator().manual_seed(config.seed))
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=[for_trl(one) for one in ([reward_funcs] if callable(reward_funcs) else reward_funcs)],
        args=arguments,
        train_dataset=rows_to_dataset(
            [
                {**problem.row(), "prompt": chat_messages(problem.prompt, style=style, **prompt_options(problem.level))}
                for problem in problems
            ]
        ),
        processing_class=tokenizer,
        rollout_func=sampler,
    )
    trainer.chat_template_kwargs = dict(style.template_kwargs)
    trainer.remove_callback(PrinterCallback)  # it prints every step's metrics
    if config.beta:
        _set_reference(trainer, config)
    if temporary is not None:
        weakref.finalize(trainer, shutil.rmtree, temporary, ignore_errors=True)
    return trainer


def sampled_columns(trainer: trl.GRPOTrainer) -> dict[str, Any]:
    """Return what TRL's last step sampled, in the columns that a run keeps."""
    logs, tokenizer = trainer._logs, trainer.processing_class
    rewards = to_plain({name: list(column) for name, column in logs["rewards"].items()})
    weights = trainer.reward_weights.tolist()
    rows = zip(*rewards.values(), strict=True)
    return {
        "prompt": [one if isinstance(one, str) else render_messages(tokenizer, one) for one in logs["prompt"]],
        "completion": [completion_text(one) for one in logs["completion"]],
        "rewards": rewards,
        "reward": [sum(w * value for w, value in zip(weights, row, strict=True) if value is not None) for row in rows],
        "advantage": [round(value, 6) for value in logs["advantages"]],
        "truncated": [None] * len(logs["prompt"]),
    }


def trl_settings(config: GRPOConfig, *, processes: int = 1, micro_batch_size: int | None = None) -> dict[str, Any]:
    """Return what `trl.GRPOConfig` is given for a `GRPOConfig` of this package, except the output folder.

    TRL counts optimizer updates where this package counts rollouts, so step numbers are multiplied by
    `num_iterations`, and metrics are logged once per rollout. Its `steps_per_generation` counts micro-batches.

    Args:
        config: the settings; `prompts_per_step` counts the prompts of all processes together.
        processes: how many processes share each step.
        micro_batch_size: completions per forward and backward pass of one process; None divides the process's share
            of an update by `gradient_accumulation_steps`.

    Raises ValueError for a setting that TRL does not have, and for a step that cannot be divided in this way.

    >>> settings = trl_settings(GRPOConfig(num_iterations=2, max_steps=10, gradient_accumulation_steps=4))
    >>> settings["max_steps"], settings["logging_steps"], settings["per_device_train_batch_size"]
    (20, 2, 32)
    >>> settings = trl_settings(GRPOConfig(prompts_per_step=2), processes=2, micro_batch_size=1)
    >>> settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    (1, 8)
    """
    if not ESTIMATORS[config.advantage_estimator].trl:
        raise ValueError(
            f"advantage_estimator: TRL's GRPOTrainer does not have {config.advantage_estimator!r}; choose 'group', or "
            "train without TRL"
        )
    only_here = {
        "max_resamples": config.max_resamples > 0,
        "loss_type": LOSSES[config.loss_type].trl is None,
        "scale_rewards": config.scale_rewards == "mean",
        "memory_budget_gib": config.memory_budget_gib is not None,
        "rollout_quantization": config.rollout_quantization is not None,
        "rollout_lag": config.rollout_lag > 0,
    }
    for name, is_set in only_here.items():
        if is_set:
            raise ValueError(
                f"{name}: {getattr(config, name)!r} is a setting that TRL's GRPOTrainer does not have; leave it out, "
                "or train without TRL"
            )
    if config.prompts_per_step % processes:
        raise ValueError(
            f"prompts_per_step: {config.prompts_per_step} cannot be divided among {processes} processes, each of which "
            f"samples whole groups; choose a multiple of {processes}"
        )
    rows = config.batch_size // processes
    if micro_batch_size is None:
        micro_batch_size = max(1, rows // config.gradient_accumulation_steps)
    if micro_batch_size < 1 or rows % micro_batch_size:
        raise ValueError(
            f"micro_batch_size: {micro_batch_size} does not divide the {rows} completions that each process has per "
            f"update; choose a divisor of {rows}"
        )
    updates = config.num_iterations
    return {
        **{name: getattr(config, name) for name in _SHARED},
        "reward_weights": None if config.reward_weights is None else list(config.reward_weights),
        "max_steps": config.max_steps * updates,
        "warmup_steps": config.warmup_steps * updates,
        "logging_steps": updates,
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": rows // micro_batch_size,
        "steps_per_generation": rows // micro_batch_size,
        "beta": 0.0,  # see _set_reference
        "disable_dropout": True,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }


def group_rollout(config: GRPOConfig, generator: torch.Generator) -> Callable[[list, trl.GRPOTrainer], dict[str, list]]:
    """Return a function for TRL's hook `rollout_func`: this package's `generate` on the distinct prompts of a batch.

    TRL passes every prompt `num_generations` times, as chat messages, and wants token ids without padding and
    the log-probabilities of the sampled tokens.

    generator: the source of the random numbers.
    """

    def rollout_func(prompts: list, trainer: trl.GRPOTrainer) -> dict[str, list]:
        tokenizer = trainer.processing_class
        rendered = [render_messages(tokenizer, prompt) for prompt in prompts[:: config.num_generations]]
        model = trainer.accelerator.unwrap_model(trainer.model)
        rollout = Sampler(model, tokenizer, config).generate(rendered, generator)
        return {
            "prompt_ids": _unpadded(rollout.prompt_ids, rollout.prompt_mask),
            "completion_ids": _unpadded(rollout.completion_ids, rollout.completion_mask),
            "logprobs": _unpadded(rollout.sampling_per_token_logps, rollout.completion_mask),
        }

    return rollout_func


def ignore_known_warnings() -> None:
    """Silence the warnings that TRL gives in every run, whatever its settings."""
    for message in _KNOWN:
        warnings.filterwarnings("ignore", message=message)


def _unpadded(rows: torch.Tensor, mask: torch.Tensor) -> list[list]:
    return [row[real].tolist() for row, real in zip(rows, mask.bool(), strict=True)]


def _set_reference(trainer: trl.GRPOTrainer, config: GRPOConfig) -> None:
    """Compare with the policy as it is now.

    TRL would load a reference by the model's name, which need not be what is trained, nor exist. A model with adapters
    is its own reference, with the adapters switched off.
    """
    trainer.beta = trainer.args.beta = config.beta
    if hasattr(trainer.model, "peft_config"):
        return
    reference = copy.deepcopy(trainer.model).requires_grad_(False)
    trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)


class _Stopped(RuntimeError):
    """Ends TRL's loop before an update that nobody waits for."""


def _make_relay(config: GRPOConfig) -> Any:
    """Return a callback of TRL's trainer that hands the metrics of each step from TRL's thread to the generator.

    They are those that `trainer.train` yields. TRL sleeps after each step until the next metrics are requested, and
    ends before its next update if nobody asks any more.
    """
    from transformers import TrainerCallback

    class Relay(TrainerCallback):
        """metrics: of each step. asked: released once per step that is requested. stopped: nobody asks any more."""

        def __init__(self) -> None:
            self.metrics: queue.Queue[dict[str, float]] = queue.Queue()
            self.asked = threading.Semaphore(0)
            self.stopped = False

        def _wait(self) -> None:
            self.asked.acquire()
            self._check()
            self.started = time.perf_counter()

        def _check(self) -> None:
            if self.stopped:
                raise _Stopped

        def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self._wait()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self._check()
            self.learning_rate = objects["optimizer"].param_groups[0]["lr"]

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **objects: Any) -> None:
            if "train_runtime" in logs:  # the closing summary
                return
            metrics = {name: value for name, value in logs.items() if name not in _TRL_ALONE}
            seconds = time.perf_counter() - self.started
            step = state.global_step // config.num_iterations
            self.metrics.put({"step": step, **metrics, "learning_rate": self.learning_rate, "step_time": seconds})
            self._wait()

    return Relay()
