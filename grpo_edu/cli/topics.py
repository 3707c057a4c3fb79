"""The options of a run by topic, with the words that `--help` shows; each is a field of RunRequest or GRPOConfig."""

TOPICS: dict[str, dict[str, str]] = {
    "model": {
        "model": "a shipped model such as tiny, a folder (also of a run), or a Hub id",
        "dtype": "number format of the weights; auto measures which is faster here",
        "prompt_template": "text with {problem} in it, instead of the chat template",
    },
    "problems": {
        "data": "sets, with commas: {data}",
        "data_path": "folder with GSM8K's train.jsonl and test.jsonl",
        "num_problems": "training problems (otherwise all)",
        "shuffle_dataset": "use the problems in random order",
    },
    "length and seed": {
        "max_steps": "training steps; each samples one batch and learns from it",
        "prompts_per_step": "different problems per step",
        "num_generations": "G, completions per problem, at least 2",
        "max_completion_length": "most tokens of a completion",
        "seed": "random seed of everything that is sampled",
        "backend": "what trains",
    },
    "rewards": {
        "rewards": "with commas: {rewards}",
        "reward_weights": "one weight per reward (otherwise 1 each)",
        "multi_objective_aggregation": "add rewards first, or scale each first",
    },
    "advantages": {
        "advantage_estimator": "group mean, leave-one-out (rloo), or the reward itself",
        "scale_rewards": "what centered rewards are divided by",
        "max_resamples": "times per step that tied groups are replaced",
        "mask_truncated_completions": "learn nothing from completions cut off",
    },
    "evaluation and saving": {
        "n": "held-out problems for the evaluations",
        "greedy": "also evaluate without sampling (otherwise if that is quick)",
        "checkpoint_every": "steps between checkpoints; 0 writes none",
        "track": "trackers on this computer, with commas: {track}",
    },
    "sampling": {
        "temperature": "1: the policy itself; lower: more certain",
        "top_p": "only the likeliest tokens with this total",
        "top_k": "only so many likeliest tokens; 0: all",
        "min_p": "least share of the likeliest token's probability",
        "repetition_penalty": "above 1: repeated tokens less likely",
    },
    "loss": {
        "loss_type": "which loss",
        "epsilon": "lower clip bound, as a distance from ratio 1",
        "epsilon_high": "upper clip bound (otherwise epsilon)",
        "delta": "upper bound of the ratio if the advantage is negative",
        "importance_sampling_level": "one ratio per token, or per completion (GSPO)",
        "num_iterations": "updates per batch; clipping needs at least 2",
    },
    "loss, further terms": {
        "off_policy_mask_threshold": "leave out bad completions grown this much less likely",
        "top_entropy_quantile": "share of tokens to learn from, the most uncertain ones",
        "entropy_coef": "bonus for the mean entropy of the tokens",
    },
    "distance from the reference (KL)": {
        "beta": "weight of the KL term; 0 needs no reference model",
        "use_bias_correction_kl": "multiply the KL term by the ratio",
        "sync_ref_model": "let the reference follow the policy",
        "ref_model_mixup_alpha": "how far it follows each time, from 0 to 1",
        "ref_model_sync_steps": "steps between two times",
    },
    "optimizer": {
        "optim": "AdamW, or Adafactor with almost no memory",
        "learning_rate": "size of the updates",
        "lr_scheduler_type": "how it changes over the steps",
        "warmup_steps": "steps in which it rises from 0",
        "weight_decay": "pulls the weights towards 0",
        "max_grad_norm": "longer gradients are shortened; 0: never",
        "abort_grad_norm": "longer gradients stop the run",
    },
    "LoRA adapters": {
        "lora_rank": "rank of the adapters; 0 trains all weights",
        "lora_alpha": "their scale times the rank (otherwise 2 x rank)",
        "lora_targets": "layers that get adapters",
    },
    "memory and speed": {
        "gradient_accumulation_steps": "micro-batches per batch; the result is the same",
        "gradient_checkpointing": "less memory, about a third more time",
        "optimizer_in_backward": "frees each gradient at once",
        "memory_budget_gib": "most memory to use (otherwise what is available)",
    },
    "sampling from a quantized copy": {
        "rollout_quantization": "how the copy is quantized",
        "importance_sampling_correction": "correct for the difference of copy and policy",
        "importance_sampling_clip_max": "largest weight of this correction",
    },
}


def find_topic(field: str) -> str | None:
    """Return the topic of a field; None for one of another command.

    >>> find_topic("beta")
    'distance from the reference (KL)'
    """
    return next((topic for topic, texts in TOPICS.items() if field in texts), None)
