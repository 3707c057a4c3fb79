"""Questions whose answers can be verified: from templates, files, GSM8K or reasoning-gym, and instructions."""

from grpo_edu.problems import gym, instructions  # noqa: F401  they register their scorers
