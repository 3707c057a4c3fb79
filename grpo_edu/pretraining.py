"""The recipe that made the tiny models, rerunnable: ``python -m grpo_edu.pretraining``.

A tokenizer and a Qwen2-architecture model are trained from scratch on generated problems that
share no worked solution with the held-out set. The targets imitate a careless corpus, so that
the model knows how to work a problem out but does not always do it:

- *worked*: the solution step by step, then ``#### answer``. Always right.
- *direct*: only ``#### answer``, mostly a slip (a forgotten last step, a wrong digit).
- *unmarked*: the right steps without the ``####`` line, so no answer can be read off.

Reinforcement learning then has something to find: among its own samples, working it out pays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from grpo_edu.data import load_problems, write_problems
from grpo_edu.problems import DOMAINS, LEVELS, Problem, draw_problem, make_split
from grpo_edu.prompts import chat_messages

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = SPECIAL_TOKENS
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class PretrainingConfig:
    """Everything that decides the model, besides the code.

    level_weights: relative frequency of each level or domain.
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
    batch_tokens: int = 8192
    steps: int = 4500
    warmup_steps: int = 50
    late_share: float = 0.3
    learning_rate: float = 3e-3
    muon_learning_rate: float = 0.03
    weight_decay: float = 0.01
    level_weights: dict[str, float] = field(
        default_factory=lambda: {"basic": 4, "intermediate": 5, "advanced": 6, "sorting": 2, "coin_flip": 1}
    )
    early_style_weights: dict[str, float] = field(default_factory=lambda: {"worked": 80, "direct": 12, "unmarked": 8})
    style_weights: dict[str, float] = field(default_factory=lambda: {"worked": 45, "direct": 40, "unmarked": 15})
    direct_accuracy: float = 0.25
    seed: int = 0


def slip(problem: Problem, rng: random.Random) -> str:
    """A wrong answer of the kind that people make: a forgotten last step, a wrong digit, two neighbors swapped."""
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
    """One target text for a problem, in one of the three styles."""
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
    """An endless seeded stream of (problem, target); problems whose solution is in `excluded` are passed over."""
    rng = random.Random(seed)
    levels, weights = list(config.level_weights), list(config.level_weights.values())
    while True:
        problem = draw_problem(rng.choices(levels, weights)[0], rng)
        if problem.solution not in excluded:
            yield problem, draw_target(problem, config, rng)


def train_tokenizer(config: PretrainingConfig, num_examples: int = 20_000):
    """A byte-level BPE tokenizer with Qwen2's special tokens and chat template; every digit is its own token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words_and_digits = Regex(r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words_and_digits, "isolated"),
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


def build_model(config: PretrainingConfig, tokenizer):
    """A randomly initialized Qwen2 model of the configured size, embeddings tied."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(config.seed)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            rope_theta=10_000.0,
            bos_token_id=None,
            eos_token_id=ids[END],
            pad_token_id=ids[PAD],
        )
    )


def batches(config: PretrainingConfig, tokenizer, seed: int, excluded: frozenset[str] = frozenset()):
    """Endless batches of about `batch_tokens` tokens, sorted by length inside a pool so that little is padding.

    Yields (ids, is_target): (B, T) token ids, right-padded, and whether each token is part of a target.
    """
    stream, rng = draw_examples(config, seed, excluded), random.Random(seed)
    while True:
        pool = sorted((_encode(tokenizer, [next(stream) for _ in range(2048)])), key=lambda pair: len(pair[0]))
        cuts, start = [], 0
        for end in range(1, len(pool) + 1):
            if end == len(pool) or (end + 1 - start) * len(pool[end][0]) > config.batch_tokens:
                cuts.append(pool[start:end])
                start = end
        rng.shuffle(cuts)
        for rows in cuts:
            width = max(len(ids) for ids, _ in rows)
            pad = tokenizer.pad_token_id
            ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
            lengths = torch.tensor([[len(ids), prompt] for ids, prompt in rows])
            position = torch.arange(width)
            yield ids, (position >= lengths[:, 1:]) & (position < lengths[:, :1])


def _encode(tokenizer, examples: list[tuple[Problem, str]]) -> list[tuple[list[int], int]]:
    """(token ids, number of prompt tokens) of each example, the target ended by the end-of-turn token."""
    prompts = tokenizer.apply_chat_template(
        [chat_messages(problem.prompt) for problem, _ in examples], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    target_ids = tokenizer([target for _, target in examples], add_special_tokens=False)["input_ids"]
    return [(p + t + [tokenizer.eos_token_id], len(p)) for p, t in zip(prompt_ids, target_ids, strict=True)]


def target_loss(model, ids: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the target tokens; logits are computed for those positions only."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = is_target[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])


def build_optimizers(model, config: PretrainingConfig) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return [
        torch.optim.Muon(matrices, lr=config.muon_learning_rate, weight_decay=config.weight_decay),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_factor(progress: float, warmup: float, decay: float = 0.4) -> float:
    """Linear warm-up, a plateau, then a linear fall to zero over the last `decay` share of the run (all in 0 … 1)."""
    return min(1.0, progress / warmup, max(0.0, 1.0 - progress) / decay)


def pretrain(model, tokenizer, config: PretrainingConfig, excluded: frozenset[str] = frozenset()):
    """Train `model` in place; yields one dict a step: step, loss, tokens (seen so far)."""
    optimizers = build_optimizers(model, config)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    early = batches(replace(config, style_weights=config.early_style_weights), tokenizer, config.seed + 2, excluded)
    late = batches(config, tokenizer, config.seed + 3, excluded)
    tokens = 0
    model.train()
    for step in range(1, config.steps + 1):
        ids, is_target = next(early if step <= (1 - config.late_share) * config.steps else late)
        factor = learning_rate_factor(step / config.steps, config.warmup_steps / config.steps)
        loss = target_loss(model, ids, is_target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        tokens += ids.numel()
        yield {"step": step, "loss": loss.item(), "tokens": tokens}
    model.eval()


def write_shipped_problems(folder, *, num_train: int = 1000, num_heldout: int = 400, seed: int = 0) -> None:
    """Write ``{level}_train.jsonl`` and ``{level}_heldout.jsonl`` for every level and domain."""
    from pathlib import Path

    for level in LEVELS + DOMAINS:
        train, heldout = make_split(level, num_train, num_heldout, seed)
        write_problems(Path(folder) / f"{level}_train.jsonl", train)
        write_problems(Path(folder) / f"{level}_heldout.jsonl", heldout)


def heldout_solutions() -> frozenset[str]:
    """The worked solutions that pretraining must never see."""
    return frozenset(problem.solution for problem in load_problems(LEVELS + DOMAINS, "heldout"))
