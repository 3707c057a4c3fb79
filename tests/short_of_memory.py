"""One update of a policy in this process, with a limit on its address space or without: for test_micro_batches.

The limit leaves room for what is there and for half of what the whole batch needs.
"""

import argparse
import json
import resource
import warnings
from pathlib import Path

import torch
from toy_policy import PROBLEMS, late_letters, make_batch, make_model, sgd, update_policy, weights, word_tokenizer

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.micro_batches import MicroBatches

CONFIG = GRPOConfig(num_generations=4, prompts_per_step=8, max_completion_length=16)


def address_space() -> int:
    """Bytes of virtual memory that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("--limited", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a thread that starts under the limit would claim address space of its own
    model = make_model(dtype=torch.float32, hidden_size=64, intermediate_size=4096, num_hidden_layers=12)
    start = weights(model)
    batch = make_batch(model, word_tokenizer(), CONFIG, late_letters, PROBLEMS)
    warm = make_model(dtype=torch.float32)
    update_policy(warm, batch, sgd(warm), CONFIG)  # libraries set up what they need at their first use
    needed = MicroBatches(model, CONFIG).bytes_of(batch.rollout, torch.arange(32))
    optimizer = sgd(model, 0.1)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    if options.limited:
        limit = address_space() + needed // 2
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = update_policy(model, batch, optimizer, CONFIG)
    resource.setrlimit(
        resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    ) if not options.limited else None
    moved = [(weight - start[name]).norm().item() for name, weight in weights(model).items()]
    texts = [str(warning.message) for warning in caught]
    options.target.write_text(json.dumps({"warnings": texts, "metrics": metrics, "moved": moved}))


if __name__ == "__main__":
    main()
