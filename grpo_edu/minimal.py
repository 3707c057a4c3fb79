"""All of GRPO in one file, to read from top to bottom after notebook 05, and to copy and change.

A step samples a group of completions for each problem, scores them, compares each reward with those of its group, and
makes the better completions more likely. The functions follow in this order, and `train` at the end calls them.

    python -m grpo_edu.minimal                          # trains the tiny model; each step takes a few seconds
    python -m grpo_edu.minimal MODEL problems.jsonl     # your own, one {"prompt": "6 × 8?", "answer": "48"} per line
"""

import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import grpo_edu
from grpo_edu.prompts import render_prompt  # puts a question into the chat format that the model knows


class Group(NamedTuple):
    """G completions of one prompt. The prompt has P tokens and the longest completion has C."""

    ids: Tensor  # (G, P + C): prompt, completion, padding. A token attends only to those before it, so never to padding
    mask: Tensor  # (G, C): 1 for each token of a completion up to and including its first end token, then 0
    rewards: Tensor  # (G,)
    advantages: Tensor  # (G,)
    old_logps: Tensor  # (G, C): log π_old of each token, under the policy that sampled
    ref_logps: Tensor  # (G, C): log π_ref of each token, under the policy before training


@torch.no_grad()
def sample_group(model: Any, prompt: Tensor, G: int, max_completion_length: int, eos_id: int) -> tuple[Tensor, Tensor]:
    """Sample G completions of a prompt (P,): o_t ~ π(· | prompt, o_1 … o_t−1) until the end token; `ids`, `mask`."""
    ids = prompt.repeat(G, 1)
    running = torch.ones(G, dtype=torch.long)  # for each completion: 1, and 0 as soon as it has ended
    mask: list[Tensor] = []
    while running.any() and len(mask) < max_completion_length:
        probabilities = model(ids).logits[:, -1].softmax(dim=-1)  # (G, V), of the next token; reads all tokens again
        tokens = torch.multinomial(probabilities, num_samples=1)[:, 0]
        tokens = torch.where(running == 1, tokens, eos_id)  # padding: more end tokens after the first one
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        mask.append(running)  # before the next line, because the first end token counts
        running = running * (tokens != eos_id)
    return ids, torch.stack(mask, dim=1)


def accuracy(completion: str, answer: str) -> float:
    """The reward: 1 if the last `####` is followed by the right answer, else 0."""
    return float("####" in completion and completion.split("####")[-1].strip() == str(answer))  # it may be a number


def group_advantages(rewards: Tensor, scale_rewards: str) -> Tensor:
    """How much better each completion is than its group: A_i = (r_i − mean(r)) / (std(r) + 0.0001)."""
    divisors = {"group": rewards.std() + 1e-4, "none": torch.tensor(1.0)}  # "none" as in Dr. GRPO
    return (rewards - rewards.mean()) * (rewards != rewards[0]).any() / divisors[scale_rewards]  # 0 if all are equal


def log_probabilities(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """log π(o_t | prompt, o_1 … o_t−1) of each sampled token, (G, C), from the logits at the position before it."""
    C = mask.shape[1]
    logits = model(ids).logits[:, -C - 1 : -1]  # (G, C, V); each from one position earlier, where its token is next
    return logits.log_softmax(dim=-1).gather(dim=2, index=ids[:, -C:, None])[:, :, 0]  # of V tokens, the sampled one


def token_losses(logps: Tensor, group: Group, epsilon: float, beta: float) -> Tensor:
    """The loss of each token, (G, C): the clipped objective, plus β times the estimate k3 of the KL divergence.

    ℓ = −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) + β (exp(d) − d − 1),   ρ = π(o) / π_old(o),   d = log π_ref(o) − log π(o)
    """
    ratio = (logps - group.old_logps).exp()
    A = group.advantages[:, None]  # (G, 1): every token of a completion has the advantage of the completion
    objective = torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)
    d = group.ref_logps - logps
    return -objective + beta * (d.exp() - d - 1)


def token_weights(mask: Tensor, loss_type: str, B: int, num_tokens: int, max_completion_length: int) -> Tensor:
    """The weight of each token of a group, (G, C), in the loss L = Σ w ℓ of a batch of B completions (notebook 06)."""
    weights = {
        "grpo": mask / (B * mask.sum(dim=1, keepdim=True)),  # the mean over each completion, then over the completions
        "dapo": mask / num_tokens,  # the mean over all tokens of the batch
        "dr_grpo": mask / (B * max_completion_length),  # the same constant for long and short completions
    }
    return weights[loss_type]


def train(
    model: Any,  # without dropout, or π and π_old differ by it; `from_pretrained` turns it off, and `model.eval()` does
    tokenizer: Any,
    problems: list[dict[str, str]],  # [{"prompt": "What is 6 × 8?", "answer": "48"}, …]
    reward: Callable[[str, str], float] = accuracy,
    *,
    max_steps: int = 40,
    prompts_per_step: int = 4,  # problems per step
    num_generations: int = 8,  # G, completions per problem
    max_completion_length: int = 96,
    num_iterations: int = 1,  # updates per batch; from the second on, the ratios differ from 1
    learning_rate: float = 1e-4,
    epsilon: float = 0.2,
    beta: float = 0.0,
    loss_type: str = "grpo",
    scale_rewards: str = "group",  # divide by the standard deviation of the group, or "none"
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Train the model in place, one step per turn of a `for` loop over `train(…)`; yields the metrics of each step."""
    set_seed(seed)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for step in range(1, max_steps + 1):
        groups = []
        for problem in random.sample(problems, prompts_per_step):
            text = render_prompt(tokenizer, problem["prompt"])
            prompt = torch.tensor(tokenizer.encode(text, add_special_tokens=False))  # (P,)
            ids, mask = sample_group(model, prompt, num_generations, max_completion_length, tokenizer.eos_token_id)
            completions = tokenizer.batch_decode(ids[:, len(prompt) :], skip_special_tokens=True)
            rewards = torch.tensor([float(reward(completion, problem["answer"])) for completion in completions])
            with torch.no_grad():
                old_logps, ref_logps = log_probabilities(model, ids, mask), log_probabilities(reference, ids, mask)
            groups.append(Group(ids, mask, rewards, group_advantages(rewards, scale_rewards), old_logps, ref_logps))
        B = prompts_per_step * num_generations
        num_tokens = sum(int(group.mask.sum()) for group in groups)
        for _ in range(num_iterations):
            total_loss = 0.0
            optimizer.zero_grad()
            for group in groups:
                logps = log_probabilities(model, group.ids, group.mask)
                weights = token_weights(group.mask, loss_type, B, num_tokens, max_completion_length)
                loss = (weights * token_losses(logps, group, epsilon, beta)).sum()
                loss.backward()  # adds the gradient of this group to the gradients of those before
                total_loss += loss.item()  # "grpo" is at 0 while the ratios are 1, so watch the reward
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).item()  # its norm before
            optimizer.step()
        mean_reward = torch.stack([group.rewards for group in groups]).mean().item()
        yield {"step": step, "reward": mean_reward, "loss": total_loss, "grad_norm": grad_norm}


if __name__ == "__main__":
    home = Path(grpo_edu.__file__).parent  # of the package, wherever a copy of this file lies
    data = home.parent / "data" if (home.parent / "data").is_dir() else home / "_data"  # in a clone, or installed
    name, file = sys.argv[1:] or (data / "models" / "tiny", data / "problems" / "basic_train.jsonl")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    problems = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    for metrics in train(model, tokenizer, problems):
        print("   ".join(f"{key} {value:.3g}" for key, value in metrics.items()))
