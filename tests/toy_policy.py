"""A policy of fifteen words, problems and rewards for it, and one scored batch: for tests of the training loop."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_edu import trainer
from grpo_edu.batch import score_rollout
from grpo_edu.fast.micro_batches import MicroBatches
from grpo_edu.losses import LOSSES
from grpo_edu.problems.templates import Problem
from grpo_edu.prompts import render_prompt
from grpo_edu.quantization.rollouts import make_sampler
from grpo_edu.rollout import Sampler
from grpo_edu.trainer import Training, TrainingState, train

SMALL = {"num_generations": 4, "prompts_per_step": 4, "max_completion_length": 5, "max_steps": 2}
# What a loss type needs besides its name.
CAP = {name: {"epsilon_high": 5.0} for name, loss in LOSSES.items() if loss.clips == "weight"}
PROBLEMS = [
    Problem(prompt=" ".join(f"q{i % 4}" for i in range(first, last)), answer="a", level="toy", solution="a #### a")
    for first, last in itertools.combinations(range(5), 2)
]  # ten prompts of one to four words


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Eight letters to answer with and four words to ask with, each a token; no chat markup."""
    words = ["<pad>", "<end>", "<unk>", "q0", "q1", "q2", "q3", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    return tokenizer


def make_model(*, dtype=torch.float64, **options) -> Qwen2ForCausalLM:
    """A fresh random policy. In float64 two orders of one sum differ by less than any tolerance below."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **options}
    config = Qwen2Config(
        vocab_size=15,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **sizes,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def late_letters(completions, **kwargs) -> list[float]:
    """Reward: the mean place of the words in the alphabet, from 1 to 8. A group seldom ties."""
    places = [["abcdefgh".find(word) + 1 for word in text.split()] or [0] for text in completions]
    return [sum(row) / len(row) for row in places]


def late_letters_or_tie(completions, prompts, **kwargs) -> list[float]:
    """The same, but every completion of a prompt that starts with q1 earns 1, so that its group ties."""
    scored = zip(prompts, late_letters(completions), strict=True)
    return [1.0 if prompt.startswith("q1") else reward for prompt, reward in scored]


def run(tokenizer, config, reward=late_letters, *, model=None, problems=PROBLEMS, **options):
    """Train a fresh policy; returns it and the metrics of all steps."""
    model = model or make_model()
    return model, list(train(model, tokenizer, problems, reward, config, **options))


def make_batch(model, tokenizer, config, reward=late_letters, problems=PROBLEMS):
    """One scored rollout of the first problems."""
    chosen = problems[: config.prompts_per_step]
    prompts = [render_prompt(tokenizer, problem.prompt) for problem in chosen]
    rollout = Sampler(model, tokenizer, config).generate(prompts, torch.Generator().manual_seed(1))
    return score_rollout(rollout, chosen, [reward], config)


def sgd(model, lr=1.0):
    return torch.optim.SGD(model.parameters(), lr=lr)


def training_state(model, optimizer, config, *, reference=None, micro_batches=None) -> TrainingState:
    """A state for single updates, with an optimizer of the test's own."""
    return TrainingState(
        optimizer,
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        micro_batches or MicroBatches(model, config),
        make_sampler(model, None, config),
        torch.Generator(),
        reference,
    )


def update_policy(model, batch, optimizer, config, *, penalty=None, **state):
    """The updates of one batch, with an optimizer of the test's own."""
    state = training_state(model, optimizer, config, **state)
    return trainer.update_policy(Training(model, None, (), (), config, state, penalty=penalty), batch)


def timeless(history) -> list[dict]:
    """The metrics of a run without those of the clock, which are never the same."""
    return [{name: value for name, value in metrics.items() if name != "step_time"} for metrics in history]


def assert_same_history(one, other):
    """The metrics of every step agree, apart from those of the clock."""
    for row, same in zip(timeless(one), timeless(other), strict=True):
        assert row == pytest.approx(same, abs=1e-6)


def assert_same_weights(one, other, tolerance=1e-7):
    assert_close(weights(one), weights(other), atol=tolerance, rtol=0.0)
