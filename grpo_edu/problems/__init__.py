"""Questions whose answers can be verified: from templates, files, GSM8K or reasoning-gym, and instructions."""

from grpo_edu.problems import files, instructions, gym  # noqa: F401, I001  they add their sets to `PROBLEM_SETS`
