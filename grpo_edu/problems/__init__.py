"""Questions with one right answer: from templates, files, GSM8K or reasoning-gym."""

from grpo_edu.problems import gym  # noqa: F401  registers its scorer
