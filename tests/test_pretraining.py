"""The recipe of the tiny models: loss, schedule, size, that it learns the same way twice, and the cards."""

import itertools
import json
import random
import re
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from benchmarks import word_game as study
from benchmarks.harness import Ledger
from grpo_edu.config import SupervisedConfig, drop_retired
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.models import load_policy, tiny_dir
from grpo_edu.problems.environments import WORDS, WordGame, letter_feedback, word_game_problem, word_game_splits
from grpo_edu.problems.templates import make_problems
from recipes import cold_start, pretraining, word_game
from recipes.corpus import PretrainingConfig, batches, train_tokenizer
from recipes.pretraining import build_model, build_optimizers, learning_rate_factor, main, pretrain, target_loss

SMALL = PretrainingConfig(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    batch_tokens=512,
    steps=40,
    warmup_steps=4,
    learning_rate=1e-2,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SMALL, num_examples=300)


class Vocabulary:
    """As much of a tokenizer as the size of a model depends on."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def convert_tokens_to_ids(self, token):
        return 0


def test_the_default_model_has_one_to_two_million_parameters_in_at_most_eight_megabytes():
    config = PretrainingConfig()
    with torch.device("meta"):
        model = build_model(config, Vocabulary(config.vocab_size))
    sizes = [parameter.numel() for parameter in model.parameters()]  # tied weights counted once, as they are saved
    assert 1e6 <= sum(sizes) <= 2e6
    assert 4 * sum(sizes) + 100_000 <= 8e6  # float32, and room for the names
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_is_qwen2_with_the_tokenizers_special_tokens(tokenizer):
    model = build_model(SMALL, tokenizer)
    assert model.config.model_type == "qwen2" and model.config.bos_token_id is None
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.max_position_embeddings == SMALL.max_positions == tokenizer.model_max_length
    same, other = build_model(SMALL, tokenizer), build_model(replace(SMALL, seed=1), tokenizer)
    assert torch.equal(model.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_the_loss_and_its_gradient_are_those_of_transformers_with_the_rest_unlabelled(tokenizer):
    model = build_model(SMALL, tokenizer)
    for ids, is_target in itertools.islice(batches(SMALL, tokenizer, seed=5), 3):
        ours = target_loss(model, ids, is_target)
        theirs = model(input_ids=ids, labels=ids.masked_fill(~is_target, -100)).loss
        assert_close(ours, theirs, atol=1e-5, rtol=0.0)
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs)]
        assert_close(*gradients, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    "progress, factor",
    [(0.0, 0.0), (0.05, 0.25), (0.1, 0.5), (0.2, 1.0), (0.4, 0.75), (0.6, 0.5), (0.8, 0.25), (1.0, 0.0)],
)
def test_the_learning_rate_rises_and_falls_to_zero(progress, factor):
    assert learning_rate_factor(progress, warmup=0.2) == pytest.approx(factor, abs=1e-12)


def test_every_parameter_is_trained_by_one_optimizer_and_matrices_of_layers_by_muon(tokenizer):
    model = build_model(SMALL, tokenizer)
    muon, adam = build_optimizers(model, SMALL)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon, by_adam = (
        {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in (muon, adam)
    )
    assert by_muon | by_adam == set(names.values()) and not by_muon & by_adam
    assert "model.embed_tokens.weight" in by_adam and "model.norm.weight" in by_adam
    assert "model.layers.0.mlp.up_proj.weight" in by_muon and "model.layers.1.self_attn.q_proj.weight" in by_muon
    assert "model.layers.0.self_attn.q_proj.bias" in by_adam


def test_a_short_pretraining_lowers_the_loss_and_repeats_to_the_last_bit(tokenizer):
    model = build_model(SMALL, tokenizer)
    first = list(pretrain(model, tokenizer, SMALL))
    assert not model.training
    torch.manual_seed(1)  # the global generator, before the model is made, has no part in it
    again = pretrain(build_model(SMALL, tokenizer), tokenizer, SMALL)
    assert list(itertools.islice(again, 15)) == first[:15]
    other = replace(SMALL, seed=1)
    assert next(pretrain(build_model(other, tokenizer), tokenizer, other)) != first[0]
    losses = [row["loss"] for row in first]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert [row["step"] for row in first] == list(range(1, 41))
    tokens = [row["tokens"] for row in first]
    assert tokens == sorted(tokens) and 40 * SMALL.batch_tokens * 0.5 < tokens[-1] <= 40 * SMALL.batch_tokens


def test_the_last_steps_see_the_late_targets_alone(tokenizer, monkeypatch):
    asked, used = {}, []

    def watched(config, tokenizer, seed, excluded):
        asked[seed] = (config, excluded)
        for batch in batches(config, tokenizer, seed, excluded):
            used.append(seed)
            yield batch

    monkeypatch.setattr(pretraining, "batches", watched)
    styles = {"style_weights": {"worked": 1}, "early_style_weights": {"direct": 1}}
    config = replace(SMALL, steps=8, warmup_steps=2, late_share=0.25, **styles)
    list(pretrain(build_model(config, tokenizer), tokenizer, config, frozenset({"x"})))
    parts = [(seed, len(list(group))) for seed, group in itertools.groupby(used)]
    assert [count for _, count in parts] == [6, 2]
    assert len({seed for seed, _ in parts}) == 2
    for late, (seed, _) in enumerate(parts):
        asked_config, excluded = asked[seed]
        assert asked_config.style_weights == ({"worked": 1} if late else {"direct": 1})
        assert asked_config.drill_weight == (0 if late else SMALL.drill_weight)
        assert excluded == frozenset({"x"})


def test_both_learning_rates_fall_from_their_peaks(tokenizer, monkeypatch):
    made = []

    def watched(model, config):
        made.append(build_optimizers(model, config))
        return made[-1]

    monkeypatch.setattr(pretraining, "build_optimizers", watched)
    config = replace(SMALL, steps=4, warmup_steps=1)
    rates = []
    for _ in pretrain(build_model(config, tokenizer), tokenizer, config):
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in made[-1]])
    assert len(made) == 1
    fall = [1.0, 2 / 3, 1 / 3, 0.0]
    for place, full in enumerate((config.muon_learning_rate, config.learning_rate)):
        expected = [full * factor for factor in fall]
        assert [rate[place] for rate in rates] == pytest.approx(expected, abs=1e-12)


def test_a_folder_that_holds_something_is_not_overwritten_unasked(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path)])
    assert "holds a model already; choose another --output, or give --overwrite" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


# The card


def test_the_shipped_card_says_what_the_shipped_recipe_says():
    record = json.loads((tiny_dir() / "recipe.json").read_text(encoding="utf-8"))
    assert pretraining._card_text(record) == (tiny_dir() / "README.md").read_text(encoding="utf-8")


def test_halfway_is_half_learned_and_its_card_says_so():
    folder = tiny_dir().parent / "halfway"
    record = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert cold_start.card_text(record) == (folder / "README.md").read_text(encoding="utf-8")
    assert SupervisedConfig(**drop_retired(record["config"])) == cold_start.CONFIG
    assert 0.2 < record["greedy"]["accuracy"] < 0.6
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8e6
    load_policy("halfway")


def test_wordy_plays_by_the_rules_and_carelessly_and_its_card_says_so():
    folder = tiny_dir().parent / "wordy"
    record = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert word_game.card_text(record) == (folder / "README.md").read_text(encoding="utf-8")
    assert record["config"].items() <= asdict(word_game.CONFIG).items()
    settings = (record["games"], record["late_steps"], record["late_rate"], record["careful_players"])
    assert settings == (word_game.GAMES, word_game.LATE_STEPS, word_game.LATE_RATE, word_game.CAREFUL_PLAYERS)
    assert 0.05 < record["sampled"]["accuracy"] < 0.25
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 1e6
    model, tokenizer = load_policy("wordy")
    assert model.num_parameters() == record["parameters"]
    games = word_game_splits()["heldout"][:20]
    played = evaluate(model, tokenizer, games, temperature=1.0, max_completion_length=40, environment=WordGame)
    guesses = [re.findall(r"\b[A-Z]+\b", completion) for completion in played.completions]
    legal = [guess in WORDS for game in guesses for guess in game]
    assert all(guesses) and sum(legal) > 0.9 * len(legal)


def test_wordy_trained_is_the_first_run_of_the_study_and_its_card_says_so():
    folder = tiny_dir().parent / "wordy_trained"
    record = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    assert study.card_text(record) == (folder / "README.md").read_text(encoding="utf-8")
    ledger = Ledger(study.LEDGER)
    before = ledger.find(phase="start")
    after = ledger.find(phase="report", arm=study.TURN, seed=0, rate=record["config"]["learning_rate"])
    for prefix, row in (("start_", before), ("", after)):
        for way in ("sampled", "greedy"):
            assert record[prefix + way]["k"] == row[way].count("1")
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 1e6
    model, tokenizer = load_policy("wordy_trained")
    games = study.games_of("heldout")[:60]
    played = evaluate(model, tokenizer, games, max_completion_length=40, temperature=0.0, environment=WordGame)
    assert sum(played.correct) >= 20, "wordy wins about 11 of them"


def test_the_demonstrated_players_of_the_word_game():
    """A careful player's guesses agree with all feedback; a careless one's need not, and both play legal words."""
    problem = word_game_problem("CAT", "BAG")
    careful, careless = [
        [word_game.play_demonstration(problem, random.Random(seed), share) for seed in range(40)]
        for share in (1.0, 0.0)
    ]
    for turns in careful:
        known = [("BAG", "-+-")]
        for guess, signs in turns:
            assert all(letter_feedback(asked, guess) == heard for asked, heard in known), "CAT would also have given it"
            known.append((guess, signs))
        assert turns[-1][1] == "+++" or len(turns) == 3
    agrees = [letter_feedback("BAG", turns[0][0]) == "-+-" for turns in careless]
    assert 0 < sum(agrees) < 40 / 2
    assert {guess for turns in careful + careless for guess, _ in turns} <= set(WORDS)


def test_a_demonstrated_game_has_the_tokens_of_a_conversation_and_teaches_the_guesses_only():
    _, tokenizer = load_policy("wordy")
    problem = word_game_problem("CAT", "BAG")
    ids, is_target = word_game.encode_game(tokenizer, problem, [("MAP", "-+-"), ("CAT", "+++")])
    told = [{"role": "user", "content": "BAG -+-"}, {"role": "assistant", "content": "MAP"}]
    told += [{"role": "user", "content": "-+-"}, {"role": "assistant", "content": "CAT"}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(told, tokenize=False).removesuffix("\n")
    targets = [token for token, own in zip(ids, is_target, strict=True) if own]
    assert tokenizer.decode(targets) == "MAP<|im_end|>CAT<|im_end|>"


def test_what_counts_as_worked_out_and_marked():
    """Steps before a marker; a bare answer, a text without a marker and an empty one have not both."""
    completions = ["1 + 1 = 2 #### 2", "so #### 3", " #### 2", "1 + 1 = 2", ""]
    correct = [True, False, True, False, False]
    evaluation = Evaluation(list("abcde"), ["basic"] * 4 + ["sorting"], completions, [None] * 5, correct)
    assert pretraining._worked_and_marked(evaluation) == {"basic": {"k": 1, "n": 2}, "sorting": {"k": 0, "n": 0}}


def test_a_small_model_from_its_recipe_to_its_card(monkeypatch, tmp_path, capsys):
    """Three held-out problems, none solved after two steps: the interval of 0/3 ends at z²/(3 + z²) = 56.1%."""
    quick = partial(replace, SMALL, steps=2, warmup_steps=1)
    quick.seed = SMALL.seed
    monkeypatch.setattr(pretraining, "PretrainingConfig", quick)
    monkeypatch.setattr(pretraining, "train_tokenizer", partial(train_tokenizer, num_examples=300))
    monkeypatch.setattr(pretraining, "load_problems", lambda names, split: make_problems("basic", 3, seed=0))
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
