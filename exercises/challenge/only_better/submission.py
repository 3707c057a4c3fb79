"""Own advantages and an own loss: learn from the correct completions of a group only, each weighted by its surprise."""

from grpo_edu import accuracy_reward

rewards = [accuracy_reward]


def settings(start):
    return {"prompts_per_step": 8, "num_generations": 8, "learning_rate": 4e-4}


def advantages(rewards, num_generations):
    """The reward minus the mean of its group, but never negative: rare correct completions count most."""
    groups = rewards.view(-1, num_generations)
    return (groups - groups.mean(dim=1, keepdim=True)).clamp(min=0).flatten()


def loss(per_token_logps, old_per_token_logps, advantages, mask, **settings):
    """The negative log-likelihood of each token, times the advantage of its completion."""
    return -advantages[:, None] * per_token_logps
