"""The course's default settings: GRPO with 16 problems and 8 completions each per step."""

from grpo_edu import accuracy_reward

rewards = [accuracy_reward]


def settings(start):
    return {"learning_rate": 1e-4}
