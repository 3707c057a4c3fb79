"""Profiles: each is what it says, differs from the others, is refused where it cannot be, and runs."""

import json
import re
import shlex
from itertools import combinations

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from test_cli import complaint

from grpo_edu.cli.main import build_parser, main
from grpo_edu.cli.studies import asked_sweep
from grpo_edu.config import GRPOConfig
from grpo_edu.models import load_policy, save_policy
from grpo_edu.prompts import render_prompt
from grpo_edu.runs.comparison import settings_that_differ
from grpo_edu.runs.log import read_log
from grpo_edu.runs.options import CONFIG_FIELDS, RUN_FIELDS, make_plain_chat_template
from grpo_edu.runs.profiles import PROFILES, Profile, load_profile, profile_text

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_no_two_profiles_are_the_same_run():
    whole = {name: load_profile(name).request() for name in PROFILES}
    assert len(whole) >= 9 and all(whole[one] != whole[other] for one, other in combinations(whole, 2))
    assert whole["standard"].config == GRPOConfig()


def test_a_profile_sets_what_it_says_and_no_default_twice():
    standard = load_profile("standard").request().to_settings()
    for name in ("quick", "thorough", "ultra-fast", "extreme-fast", "hardware-accelerated", "progressive"):
        assert all(standard[field] != value for field, value in load_profile(name).settings.items()), name
    accelerated = load_profile("hardware-accelerated").request()
    assert accelerated.dtype == "auto" and accelerated.config.rollout_quantization == "int8-dynamic"
    progressive = load_profile("progressive").request()
    assert not progressive.config.shuffle_dataset
    assert progressive.num_problems == progressive.config.max_steps * progressive.config.prompts_per_step


def test_the_faithful_profile_has_the_published_settings():
    run = load_profile("rl-grpo-faithful").request()
    published = {
        "prompts_per_step": 1,
        "num_generations": 2,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10,
        "max_grad_norm": 1.0,
        "max_completion_length": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "beta": 0.1,
        "epsilon": 0.2,
        "num_iterations": 1,
        "loss_type": "bnpo",
        "seed": 42,
    }
    found = run.to_settings()
    assert {name: found[name] for name in published} == published
    assert run.model == "Qwen/Qwen2-0.5B-Instruct" and run.dtype == "float32"
    assert run.prompt_template == "Solve step by step:\n\n{problem}\n\nSolution:"
    assert run.num_problems == run.config.max_steps == 3 * 10 * 0.5  # three levels of ten, half an epoch


def test_the_cluster_profile_has_the_published_settings():
    run = load_profile("cluster-lora").request()
    config = run.config
    assert (run.lora_rank, run.lora_alpha, run.dtype, run.data) == (16, 32, "bfloat16", ("gsm8k",))
    assert run.lora_targets == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (config.learning_rate, config.batch_size, config.scale_rewards) == (5e-5, 1 * 8, "none")
    assert config.max_steps == 3 * 7473 // config.prompts_per_step


def test_what_is_typed_overrides_the_profile(tmp_path):
    profile = load_profile("quick").override({"max_steps": 3, "n": 9})
    assert profile.config().max_steps == 3 and profile.request().num_heldout == 9 and profile.request().greedy is False
    (tmp_path / "mine.json").write_text('{"about": "my own", "base": "quick", "max_steps": 7, "data": ["gsm8k"]}')
    mine = load_profile(tmp_path / "mine.json")
    assert (mine.about, mine.config().max_steps, mine.request().num_heldout) == ("my own", 7, 100)
    assert mine.config().max_completion_length == 256  # what GSM8K needs
    text = profile_text(mine)
    assert "\n* max_steps " in text and "\n  num_generations " in text


def test_every_field_is_an_option_of_train_and_of_sweep():
    parser = build_parser()
    (commands,) = (action for action in parser._actions if action.choices)
    options = {name: {action.dest for action in commands.choices[name]._actions} for name in ("train", "sweep")}
    assert {*RUN_FIELDS, *CONFIG_FIELDS} <= options["train"]
    of_one_run = "seed greedy checkpoint_every max_saved_completions record_token_steps report_to"
    assert options["train"] - options["sweep"] == set(of_one_run.split())
    assert vars(parser.parse_args(["train"])).keys().isdisjoint({*RUN_FIELDS, *CONFIG_FIELDS})


def test_a_run_starts_from_the_settings_of_another_run(policy_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.csv").write_text("text,label\n" + "".join(f"{n} + {n}?,{2 * n}\n" for n in range(20)))
    (tmp_path / "pay.py").write_text("def pay(completions, **kwargs):\n    return [len(one) for one in completions]\n")
    typed = "--data sums.csv --columns question=text,answer=label --rewards pay.py:pay --steps 1 --n 4 --no-greedy "
    typed += "--num-generations 2 --prompts-per-step 2 --max-completion-length 8 --seed 3"
    assert main(["train", "--model", str(policy_dir), *typed.split(), "--output", "first"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    overrides = ["--learning-rate", "1e-3", "--steps", "2"]
    assert main(["train", "--like", "../first", *overrides, "--output", "second"]) == 0
    first, second = (load_profile(folder).request().to_settings() for folder in ("../first", "second"))
    assert {name: second[name] for name in first if first[name] != second[name]} == {
        "learning_rate": 1e-3,
        "max_steps": 2,
    }
    capsys.readouterr()
    assert main(["compare", "../first", "second"]) == 0
    shown = capsys.readouterr().out
    assert "learning_rate: 0.0001 and 0.001\n" in shown and "max_steps: 1 and 2\n" in shown and "seed" not in shown
    assert "on the 4 held-out problems of both" in shown and "McNemar" in shown
    profile, plan = asked_sweep(build_parser().parse_args(["sweep", "--like", "second", "--validation", "4"]))
    assert profile.request().to_settings() == second and plan.num_heldout == 4
    capsys.readouterr()
    assert main(["train", "--like", "../elsewhere"]) == 2
    assert "'../elsewhere' is unknown" in (said := complaint(capsys)) and "the folder of a run" in said


def test_a_run_of_version_0_3_0_differs_only_in_what_was_chosen():
    """That version had other names for some options, and settings that are gone."""
    config = {"num_generations": 4, "beta": 0.0}
    old = {"grpo_edu": "0.3.0", "seed": 1, "n": 40, "rewards": ["accuracy"], "heldout": None, "track": []}
    old["config"] = {**config, "min_p": 0.0, "delta": None, "importance_sampling_mode": "token_truncate"}
    new = {"grpo_edu": "0.4.0", "seed": 2, "num_heldout": 40, "reward_funcs": ["accuracy"], "report_to": []}
    new["config"] = config
    assert settings_that_differ({"old": old, "new": new}) == {"old": {"seed": 1}, "new": {"seed": 2}}
    old["config"]["min_p"] = 0.1
    assert settings_that_differ({"old": old, "new": new})["new"] == {"seed": 2, "min_p": 0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --profile qiuck", "--profile.*'qiuck'.*do you mean quick.*standard"),
        ("profiles --show nothing-like-it.json", "nothing-like-it.json.*unknown.*quick"),
        ("train --profile mine.json", "mine.json:3: .*max_stpes.*max_steps"),
        ("train --profile old.json", "old.json:2: .*min_p.*0.3.0 only.*leave it out"),
        ("train --profile kind.json", "kind.json:2: .*max_steps.*whole number.*'many'"),
        ("train --profile run.json", "run.json:2: .*n.*whole number.*'300'"),
        ("train --profile flag.json", "flag.json:2: .*greedy.*true or false.*1"),
        ("train --profile broken.json", "broken.json:3: .*not valid JSON"),
        ("train --profile list.json", "list.json:1: .*object.*list"),
        ("train --profile base.json", "base.json:2: .*'thorogh'.*do you mean thorough"),
        ("train --profile choice.json", "choice.json:1: dtype must be one of float32, bfloat16, auto; got 'float16'"),
        ("train --profile reward.json", "reward.json:1: .*reward_funcs.*'speed'"),
        ("train --profile pair.json", "pair.json:1: .*warmup_steps.*lr_scheduler_type"),
        ("train --profile number.json", "number.json:1: .*wrong kind.*int"),
        ("train --profile entries.json", "entries.json:1: .*wrong kind.*int"),
        ("train --profile huge.json", "huge.json:1: .*wrong kind.*too large"),
        ("train --profile deep.json", "deep.json:1: .*not valid JSON"),
        ("train --profile latin.json", "latin.json:2: .*0xfc.*UTF-8"),
        ("train --prompt-template Solve:", "--prompt-template.*{problem}.*'Solve:'"),
        ("train --lora-alpha 3", "--lora-alpha.*3.0.*--lora-rank"),
        ("train --num-problems 2", "--num-problems.*2.*basic"),
    ],
)
def test_bad_profiles_are_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    files = {
        "mine": '{\n "about": "x",\n "max_stpes": 3\n}',
        "old": '{"n": 9,\n "min_p": 0.1}',
        "kind": '{"n": 9,\n "max_steps": "many"}',
        "run": '{\n"n": "300"}',
        "flag": '{\n"greedy": 1}',
        "broken": '{\n"n": 3,\n"max_steps" 4}',
        "list": "[]",
        "base": '{"n": 3,\n"base": "thorogh"}',
        "choice": '{"dtype": "float16"}',
        "reward": '{"rewards": "speed"}',
        "pair": '{"warmup_steps": 3}',
        "number": '{"data": 5}',
        "entries": '{"lora_targets": [1]}',
        "huge": f'{{"reward_weights": [1{"0" * 400}]}}',
        "deep": "[" * 100_000,
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "latin.json").write_bytes('{"n": 3,\n"about": "für mich"}'.encode("latin-1"))
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments.split()) == 2
    assert re.search(message, complaint(capsys)) and sorted(tmp_path.rglob("*")) == before


def test_profiles_are_listed_and_shown(capsys):
    assert main(["profiles"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PROFILES)
    assert main(["profiles", "--show", "rl-grpo-faithful"]) == 0
    shown = capsys.readouterr().out
    assert "* beta" in shown and "  gradient_checkpointing" in shown and "'Solve step by step:\\n\\n{problem}" in shown
    assert main(["profiles", "--show", "quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_steps"] == 10
    assert main(["profiles", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(PROFILES)


def test_the_faithful_profile_runs_on_another_model(policy_dir, tmp_path, capsys):
    output = tmp_path / "run"
    typed = ["--model", str(policy_dir), "--n", "6", "--rewards", "length", "--output", str(output), "--json"]
    assert main(["train", "--profile", "rl-grpo-faithful", *typed]) == 0
    result = json.loads(capsys.readouterr().out)
    log = read_log(output / "metrics.jsonl")
    assert result["steps"] == len(log) == 15 and result["seed"] == 42
    assert [step["learning_rate"] for step in log][:3] == pytest.approx([0.0, 1e-6, 2e-6])
    assert {"prompts/s in steps", "completions/s with start-up", "tokens/s in steps"} <= result["throughput"].keys()
    found = result["throughput"]
    assert found["completions/s in steps"] == pytest.approx(2 * found["prompts/s in steps"], rel=0.01)
    assert found["prompts/s with start-up"] < found["prompts/s in steps"]
    assert "Within the steps: " in (output / "summary.md").read_text()
    asked = json.loads((output / "config.json").read_text())
    assert asked["num_problems"] == 15 and GRPOConfig(**asked["config"]).beta == 0.1
    _, tokenizer = load_policy(output / "model")  # it asks as it was trained
    assert render_prompt(tokenizer, 'Is {{ 1 }} "1"?') == 'Solve step by step:\n\nIs {{ 1 }} "1"?\n\nSolution:'


def test_a_base_model_is_trained_with_a_template(tmp_path, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    base, run = tmp_path / "base", tmp_path / "run"
    save_policy(random_model(tokenizer, max_position_embeddings=1024, stop_ids=range(0, 256, 16)), tokenizer, base)
    typed = "--steps 1 --n 3 --rewards length --num-generations 2 --prompts-per-step 2 --max-completion-length 8"
    train = ["train", "--model", str(base), *typed.split(), "--no-greedy", "--output", str(run)]
    assert main(train) == 2
    assert "is a base model" in (said := complaint(capsys)) and "train it with a --prompt-template" in said
    assert main([*train, "--prompt-template", "Q: {problem} A:"]) == 0
    assert render_prompt(load_policy(run / "model")[1], "1 + 1?") == "Q: 1 + 1? A:"
    capsys.readouterr()
    assert main(["chat", str(run), "--question", "1 + 1?", "--json"]) == 0
    assert {"base", "trained"} <= json.loads(capsys.readouterr().out).keys()


def test_a_template_is_taken_letter_by_letter(policy_dir):
    _, tokenizer = load_policy(policy_dir)
    for template in ("{problem}", 'A "quoted" \\n {{ x }} {% y %}: {problem}\tend é'):
        tokenizer.chat_template = make_plain_chat_template(template)
        assert render_prompt(tokenizer, "Q?") == template.replace("{problem}", "Q?")


def test_adapters_train_resume_and_are_kept(policy_dir, tmp_path, capsys):
    sizes = shlex.split(
        "--num-generations 4 --prompts-per-step 2 --max-completion-length 48 --steps 3 --n 6 --no-greedy "
        "--rewards length --learning-rate 1e-2"
    )
    lora = ["--lora-rank", "2", "--lora-targets", "q_proj,v_proj", "--checkpoint-every", "1"]
    output = tmp_path / "run"
    assert main(["train", "--model", str(policy_dir), *sizes, *lora, "--output", str(output), "--json"]) == 0
    assert {"adapters", "model"} <= {path.name for path in output.iterdir()}
    settings = json.loads((output / "adapters" / "adapter_config.json").read_text())
    assert settings["r"] == 2 and settings["lora_alpha"] == 4
    assert sorted(settings["target_modules"]) == ["q_proj", "v_proj"]
    base, merged = (load_policy(folder)[0].state_dict() for folder in (policy_dir, output / "model"))
    moved = {name.split(".")[-2] for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {"q_proj", "v_proj"}
    again = tmp_path / "again"
    assert main(["train", "--model", str(policy_dir), *sizes, *lora, "--output", str(again)]) == 0
    same = load_policy(again / "model")[0].state_dict()
    assert all(torch.equal(merged[name], weight) for name, weight in same.items())


def test_a_profile_can_be_made_in_python():
    profile = Profile("mine", "", {"beta": 0.5})
    assert profile.config().beta == 0.5
    with pytest.raises(ValueError, match="beta.*-1"):
        profile.override({"beta": -1})
