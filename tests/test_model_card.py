"""The tiny models' card: the shipped one against its recipe, and a small model from its recipe to its card."""

import json
from dataclasses import dataclass
from functools import partial

from grpo_edu.config import SupervisedConfig
from grpo_edu.evaluation import Evaluation
from grpo_edu.models import load_policy, tiny_dir
from grpo_edu.problems.templates import make_problems
from recipes import cold_start, pretraining
from recipes import pretraining as model_card
from recipes.corpus import PretrainingConfig, train_tokenizer


def test_the_shipped_card_says_what_the_shipped_recipe_says():
    record = json.loads((tiny_dir() / "recipe.json").read_text(encoding="utf-8"))
    assert model_card._card_text(record) == (tiny_dir() / "README.md").read_text(encoding="utf-8")


def test_halfway_is_half_learned_and_its_card_says_so():
    folder = tiny_dir().parent / "halfway"
    record = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert cold_start.card_text(record) == (folder / "README.md").read_text(encoding="utf-8")
    assert SupervisedConfig(**record["config"]) == cold_start.CONFIG
    assert 0.2 < record["greedy"]["accuracy"] < 0.6
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8e6
    load_policy("halfway")


def test_what_counts_as_worked_out_and_marked():
    """Steps before a marker; a bare answer, a text without a marker and an empty one have not both."""
    completions = ["1 + 1 = 2 #### 2", "so #### 3", " #### 2", "1 + 1 = 2", ""]
    correct = [True, False, True, False, False]
    evaluation = Evaluation(list("abcde"), ["basic"] * 4 + ["sorting"], completions, [None] * 5, correct)
    assert model_card._worked_and_marked(evaluation) == {"basic": {"k": 1, "n": 2}, "sorting": {"k": 0, "n": 0}}


@dataclass(frozen=True)
class Quick(PretrainingConfig):
    """Two steps of a model of two layers."""

    vocab_size: int = 400
    hidden_size: int = 32
    intermediate_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    batch_tokens: int = 512
    steps: int = 2
    warmup_steps: int = 1


def test_a_small_model_from_its_recipe_to_its_card(monkeypatch, tmp_path, capsys):
    """Three held-out problems, none solved after two steps: the interval of 0/3 ends at z²/(3 + z²) = 56.1%."""
    monkeypatch.setattr(pretraining, "PretrainingConfig", Quick)
    monkeypatch.setattr(pretraining, "train_tokenizer", partial(train_tokenizer, num_examples=300))
    monkeypatch.setattr(model_card, "load_problems", lambda names, split: make_problems("basic", 3, seed=0))
    folder = tmp_path / "model"
    assert pretraining.main(["--output", str(folder), "--seed", "5"]) == 0
    assert capsys.readouterr().out == f"saved to {folder}\n"
    model, _ = load_policy(folder)
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["parameters"] == model.num_parameters() and recipe["config"]["seed"] == 5
    ((step, loss),) = recipe["loss"]  # one mean over at most fifty steps
    assert step == 2 and 3 < loss < 8 and 512 < recipe["tokens"] <= 1024
    zero = {"k": 0, "n": 3, "accuracy": 0.0, "low": 0.0}
    for way in ("sampled", "greedy"):
        assert zero.items() <= recipe[way]["per_level"]["basic"].items()
    card = (folder / "README.md").read_text(encoding="utf-8")
    marked = recipe["sampled"]["worked_and_marked"]["basic"]["n"]
    share = "0/3 = 0.0% (0.0% … 56.1%)"
    assert f"| basic | {share} | {share} | 0 of {marked} are right |" in card
    assert f"Qwen2 of {model.num_parameters():,} parameters" in card and "seed 5" in card
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
