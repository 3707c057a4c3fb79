"""What the tiny models are pretrained on: generated problems, with the targets of a careless corpus.

The targets come in three styles, so that the model knows how to work a problem out but does not always do it:

- *worked*: the solution step by step, then ``#### answer``. Always right.
- *direct*: only ``#### answer``, mostly a slip (a forgotten last step, a wrong digit).
- *unmarked*: the right steps without the ``####`` line, so no answer can be read off.

Early batches also hold *drills*, lists of sums to compute: more arithmetic a token than any story.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_edu.continual.examples import encode_examples, pad_examples
from grpo_edu.problems.files import load_problems, write_problems
from grpo_edu.problems.templates import DOMAINS, LEVELS, Problem, data_dir, draw_problem, make_split, problem_key
from grpo_edu.prompts import chat_messages

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = SPECIAL_TOKENS
PRETRAINED = (*LEVELS, "sorting", "coin_flip")  # not a problem set that was added later
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class PretrainingConfig:
    """Everything that decides the model, besides the code.

    steps: of at most `batch_tokens` tokens each; the learning rate warms up over `warmup_steps`, then falls to zero.
    level_weights: relative frequency of each level or domain.
    drill_weight: relative frequency of drills before the last `late_share` of the steps; none after.
    early_style_weights, style_weights: relative frequency of worked, direct and unmarked targets before and
        during the last `late_share` of the steps. Most targets are worked at first, since only they teach arithmetic.
    direct_accuracy: share of direct targets that are right.
    """

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 2048
    batch_tokens: int = 4096
    steps: int = 9000
    warmup_steps: int = 100
    late_share: float = 0.25
    learning_rate: float = 3e-3
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.01
    level_weights: dict[str, float] = field(
        default_factory=lambda: {"basic": 4, "intermediate": 5, "advanced": 6, "sorting": 3, "coin_flip": 2}
    )
    drill_weight: float = 5
    early_style_weights: dict[str, float] = field(default_factory=lambda: {"worked": 84, "direct": 8, "unmarked": 8})
    style_weights: dict[str, float] = field(default_factory=lambda: {"worked": 45, "direct": 40, "unmarked": 15})
    direct_accuracy: float = 0.25
    seed: int = 0


def draw_drill(rng: random.Random) -> Problem:
    """Four to eight sums to compute, of the sizes that the stories need."""
    sums, lines = [], []
    for _ in range(rng.randint(4, 8)):
        sign = rng.choice("+-*/")
        if sign in "+-":
            a, b = rng.randint(2, 200), rng.randint(2, 100)
            a, b = (a + b, b) if sign == "-" else (a, b)
            result = a + b if sign == "+" else a - b
        else:
            a, b = rng.randint(2, 40), rng.randint(2, 20)
            b = min(b, 300 // a)
            a, result = (a, a * b) if sign == "*" else (a * b, a)
        sums.append(f"{a}{sign}{b}")
        lines.append(f"{a}{sign}{b}={result}.")
    return Problem(f"Compute {', '.join(sums)}.", str(result), "drill", " ".join(lines))


def slip(problem: Problem, rng: random.Random) -> str:
    """Return a wrong answer of the kind that people make: a forgotten last step, a wrong digit, swapped neighbors."""
    if problem.level == "coin_flip":
        return "tails" if problem.answer == "heads" else "heads"
    if problem.level == "sorting":
        numbers = problem.answer.split(", ")
        i = rng.randrange(len(numbers) - 1)
        numbers[i], numbers[i + 1] = numbers[i + 1], numbers[i]
        return ", ".join(numbers)
    right = int(problem.answer)
    results = [int(part.split("=")[1]) for part in problem.solution.split("####")[0].split(".") if "=" in part]
    wrong = [results[-2], right + rng.choice((1, 2, 3, 10, 20)), abs(right - rng.choice((1, 2, 3, 10, 20)))]
    return str(rng.choice([w for w in wrong if w != right] or [right + 1]))


def draw_target(problem: Problem, config: PretrainingConfig, rng: random.Random) -> str:
    """Return one target text for a problem, in one of the three styles; a drill has only its solution."""
    if problem.level == "drill":
        return problem.solution
    style = rng.choices(list(config.style_weights), list(config.style_weights.values()))[0]
    if style == "worked":
        return problem.solution
    if style == "unmarked":
        return problem.solution.split(" ####")[0]
    answer = problem.answer if rng.random() < config.direct_accuracy else slip(problem, rng)
    return f"#### {answer}"


def draw_examples(
    config: PretrainingConfig, seed: int, excluded: frozenset[str] = frozenset()
) -> Iterator[tuple[Problem, str]]:
    """Yield an endless seeded stream of (problem, target); problems whose key is in `excluded` are passed over."""
    rng = random.Random(seed)
    levels = {**config.level_weights, "drill": config.drill_weight}
    while True:
        level = rng.choices(list(levels), list(levels.values()))[0]
        problem = draw_drill(rng) if level == "drill" else draw_problem(level, rng)
        if problem_key(problem) not in excluded:
            yield problem, draw_target(problem, config, rng)


def train_tokenizer(config: PretrainingConfig, num_examples: int = 20_000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of Qwen2's kind: its special tokens, chat template and splitting of text.

    Every digit is a token of its own, so that a number looks the same wherever it stands.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = draw_examples(config, seed=config.seed + 1)
    texts = (_plain_text(*next(stream)) for _ in range(num_examples))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _plain_text(problem: Problem, target: str) -> str:
    system, user = (message["content"] for message in chat_messages(problem.prompt))
    return f"system\n{system}\nuser\n{user}\nassistant\n{target}\n"


def batches(
    config: PretrainingConfig, tokenizer: PreTrainedTokenizerFast, seed: int, excluded: frozenset[str] = frozenset()
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of at most `batch_tokens` tokens, cut from a pool sorted by the length of the prompts.

    Similar prompts leave little padding. Sorting by the whole length would leave less, but would gather the short
    direct answers in batches of their own, whose noise then drives whole updates.

    Yields (ids, is_target): (B, T) token ids, right-padded, and whether each token is part of a target.
    """
    stream, rng = draw_examples(config, seed, excluded), random.Random(seed)
    while True:
        drawn = [next(stream) for _ in range(2048)]
        encoded = encode_examples(tokenizer, drawn)
        pool = sorted(encoded, key=lambda row: row[1])
        cuts, start = [], 0
        for end in range(1, len(pool) + 1):
            width = max(len(ids) for ids, _ in pool[start : end + 1])
            if end == len(pool) or (end + 1 - start) * width > config.batch_tokens:
                cuts.append(pool[start:end])
                start = end
        rng.shuffle(cuts)
        for rows in cuts:
            yield pad_examples(rows, tokenizer.pad_token_id)


def write_shipped_problems(folder: str | Path, *, num_train: int = 1000, num_heldout: int = 400, seed: int = 0) -> None:
    """Write ``{level}_train.jsonl`` and ``{level}_heldout.jsonl`` for every level and domain, also a new one.

    ``python -m recipes.corpus`` remakes the shipped files.
    """
    for level in LEVELS + DOMAINS:
        train, heldout = make_split(level, num_train, num_heldout, seed)
        write_problems(Path(folder) / f"{level}_train.jsonl", train)
        write_problems(Path(folder) / f"{level}_heldout.jsonl", heldout)


def heldout_keys() -> frozenset[str]:
    """Return the `problem_key` of every held-out problem of `PRETRAINED`, which pretraining must never see."""
    return frozenset(problem_key(problem) for problem in load_problems(PRETRAINED, "heldout"))


if __name__ == "__main__":
    write_shipped_problems(data_dir() / "problems")
