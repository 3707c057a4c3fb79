"""Curricula: from names and files, run stage by stage, kept, resumed bit for bit, and the command around it."""

import json
import os
import re
import shutil
import signal
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file
from small_policy import names_in, same_weights

from grpo_edu.cli.main import main
from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.continual.curriculum import make_anchor, mix_in, run_curriculum, train_stage
from grpo_edu.continual.ewc import copy_params
from grpo_edu.continual.fisher import lightning_fisher
from grpo_edu.continual.forgetting import AccuracyMatrix
from grpo_edu.continual.runs import count_copies, resume_curriculum, start_curriculum
from grpo_edu.continual.stages import PROFILES, Curriculum, Protection, Stage, curriculum_from_dict, load_curriculum
from grpo_edu.models import load_policy
from grpo_edu.problems.files import load_problems
from grpo_edu.runs.log import read_log
from grpo_edu.runs.state import fingerprint, save_state

SMALL = SupervisedConfig(max_steps=2, prompts_per_step=2, learning_rate=1e-3)
SMALL_GRPO = GRPOConfig(max_steps=2, prompts_per_step=2, num_generations=2, max_completion_length=12)
STAGES = (
    Stage("first", ("basic",), config=SMALL),
    Stage("second", ("sorting",), config=SMALL),
    Stage("third", ("coin_flip",), config=SMALL),
)
PROTECTED = Protection("ewc", 10.0, num_examples=2)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """The intervals of the measures are tested in test_forgetting.py."""
    monkeypatch.setitem(AccuracyMatrix.measures.__kwdefaults__, "num_resamples", 50)


def sets(split, n):
    return [load_problems(stage.data, split, n=n) for stage in STAGES]


def state(folder):
    return load_file(folder / "model" / "model.safetensors")


# ---- what can be asked for ----


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_makes_a_curriculum_that_survives_json(name):
    curriculum = load_curriculum(name)
    assert len(curriculum.stages) == 3
    assert curriculum_from_dict(json.loads(json.dumps(asdict(curriculum)))) == curriculum


def test_the_faithful_profile_has_the_published_settings():
    curriculum = load_curriculum("rl-grpo-faithful")
    stage = curriculum.stages[0]
    assert (stage.method, stage.num_problems, stage.config.num_generations, stage.config.beta) == ("grpo", 10, 2, 0.1)
    # ten problems for half an epoch, one a step
    assert stage.config.max_steps * stage.config.prompts_per_step == 5
    assert (curriculum.protection.fisher, curriculum.protection.strength) == ("lightning", 1000.0)


def test_a_profile_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    stages = [
        {"name": "a", "data": "basic,advanced", "config": {"max_steps": 3}},
        {"name": "b", "data": ["gsm8k"], "method": "grpo", "rewards": ["accuracy", "format"]},
    ]
    path.write_text(json.dumps({"stages": stages, "protection": {"method": "replay", "strength": 0.25}}))
    curriculum = load_curriculum(path)
    assert curriculum.stages[0].data == ("basic", "advanced") and curriculum.stages[0].config.max_steps == 3
    assert curriculum.stages[1].config.max_completion_length == 256  # GSM8K needs room
    assert curriculum.protection == Protection("replay", 0.25)
    assert {stage.config.seed for stage in curriculum.with_seed(7).stages} == {7}


def stages_with(**changes):
    return {"stages": [{"name": "a", "data": "basic"}, {"name": "b", "data": "sorting"} | changes]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (stages_with(data="basics"), "stage 'b': .*data.*'basics'.*basic"),
        (stages_with(data=""), "data.*empty"),
        (stages_with(method="rl"), "stage 'b': method: 'rl' is unknown"),
        (stages_with(name="a"), "two have one name"),
        (stages_with(config={"num_generations": 4}), "config of stage 'b': 'num_generations' is unknown; it has"),
        (stages_with(config={"max_steps": 0}), "max_steps must be at least 1, got 0"),
        (stages_with(method="grpo", rewards=["fame"]), "stage 'b': .*rewards.*'fame'"),
        (stages_with(level="basic"), "stage: 'level' is unknown"),
        ({"stages": [{"name": "a"}, {"name": "b"}]}, "data is missing"),
        ({"stages": [{"name": "a", "data": "basic"}]}, "a curriculum has at least two"),
        ({"stages": "basic"}, "stages: a curriculum needs a list"),
        ({"stages": ["basic", "sorting"]}, "stage: must be an object in braces, got str"),
        (stages_with() | {"protect": {}}, "curriculum: 'protect' is unknown"),
        (stages_with() | {"protection": {"method": "prayer"}}, "method: 'prayer' is unknown"),
        (
            stages_with() | {"protection": {"method": "ewc", "strength": -1}},
            "strength must be 0 or a positive number, got -1",
        ),
        (stages_with() | {"protection": {"method": "replay", "strength": 1}}, "must be below 1"),
        (stages_with() | {"protection": {"fisher": "exact"}}, "fisher: 'exact' is unknown"),
        (stages_with() | {"protection": {"decay": 2}}, "decay must be between 0 .* and 1 .*got 2"),
    ],
)
def test_what_is_wrong_is_named(content, message):
    with pytest.raises(ValueError, match=message):
        curriculum_from_dict(content)


def test_a_profile_that_is_nothing_or_no_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor one of domains"):
        load_curriculum("steep")
    broken = tmp_path / "broken.json"
    broken.write_text('{"stages": [')
    with pytest.raises(ValueError, match=r"broken\.json"):
        load_curriculum(broken)
    broken.write_bytes('{"stages": [\n{"name": "für"}]}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"broken\.json:2: .*0xfc.*UTF-8"):
        load_curriculum(broken)
    with pytest.raises(ValueError, match="takes a GRPOConfig"):
        Stage("a", ("basic",), "grpo", SMALL)


# ---- running ----


def run(policy_dir, protection, stages=STAGES, progress=None):
    model, tokenizer = load_policy(policy_dir)
    curriculum = Curriculum(stages, protection)
    seen = []
    train, heldout = (sets(split, n)[: len(stages)] for split, n in (("train", 4), ("heldout", 3)))
    for done in run_curriculum(model, tokenizer, curriculum, train, heldout, progress=progress):
        seen.append((done.stages_done, copy_params(model)))
    return done, seen


def test_rows_come_before_any_stage_and_after_each(policy_dir):
    progress, seen = run(policy_dir, PROTECTED)
    assert [number for number, _ in seen] == [0, 1, 2, 3]
    assert len(progress.rows) == 4 and all(len(row) == 3 for row in progress.rows)
    assert [len(history) for history in progress.histories] == [2, 2, 2]
    assert "penalty" not in progress.histories[0][0]  # there was nothing to protect yet
    assert progress.histories[1][0]["penalty"] == 0 < progress.histories[1][1]["penalty"]
    assert len(progress.anchors) == 2
    assert progress.matrix(["a", "b", "c"]).accuracies()[0] == [0, 0, 0]  # a random model solves nothing


def test_the_first_stage_is_the_same_under_every_protection(policy_dir):
    protections = (PROTECTED, Protection("l2", 1.0), Protection("replay", 0.5), Protection("kl", 1.0))
    plain = run(policy_dir, Protection(), STAGES[:2])[1]
    for protection in protections:
        other = run(policy_dir, protection, STAGES[:2])[1]
        assert same_weights(plain[1][1], other[1][1])
        assert not same_weights(plain[2][1], other[2][1])


def test_with_strength_0_a_curriculum_is_the_unprotected_one(policy_dir):
    plain, zero = (
        run(policy_dir, protection, STAGES[:2])[1][-1][1]
        for protection in (Protection(), replace(PROTECTED, strength=0))
    )
    torch.testing.assert_close(zero, plain)


def test_online_keeps_one_anchor(policy_dir):
    progress, _ = run(policy_dir, replace(PROTECTED, online=True, decay=0.5))
    assert len(progress.anchors) == 1


def test_grpo_stages_take_the_penalty_through_the_trainers_own_argument(policy_dir):
    stages = tuple(replace(stage, method="grpo", config=SMALL_GRPO, rewards=("length",)) for stage in STAGES[:2])
    progress, _ = run(policy_dir, PROTECTED, stages)
    assert "reward" in progress.histories[1][0] and progress.histories[1][0]["penalty"] == 0
    with_kl, _ = run(policy_dir, Protection("kl", 0.1), stages)
    assert "kl" not in with_kl.histories[0][0] and "kl" in with_kl.histories[1][0]


def test_replay_mixes_earlier_problems_in():
    new, old = load_problems("basic", n=30), load_problems("sorting", n=5)
    mixed = mix_in(new, old, share=0.25, seed=0)
    assert mixed[:30] == new and len(mixed) == 40 and set(mixed[30:]) <= {*old}
    assert len(set(mix_in(new, load_problems("sorting", n=50), share=0.25, seed=0)[30:])) == 10
    assert mix_in(new, old, share=0.0, seed=0) == new
    with pytest.raises(ValueError, match="share"):
        mix_in(new, old, share=1.0, seed=0)


def test_anchors_by_protection(policy_dir):
    model, tokenizer = load_policy(policy_dir)
    problems = load_problems("basic", n=4)

    def anchor(**options):
        return make_anchor(model, tokenizer, STAGES[0], problems, Protection(num_examples=2, **options))

    assert anchor(method="none") is None and anchor(method="replay", strength=0.1) is None
    assert all((value == 1).all() for value in anchor(method="l2").fisher.values())
    assert same_weights(anchor(method="ewc", fisher="lightning").fisher, lightning_fisher(model))
    assert not same_weights(anchor(method="ewc").fisher, anchor(method="ewc", fisher="empirical").fisher)
    assert same_weights(anchor(method="ewc").fisher, anchor(method="ewc").fisher)
    assert same_weights(anchor(method="ewc").anchor_params, copy_params(model))


# ---- on disk ----


def test_a_kept_curriculum(policy_dir, tmp_path):
    curriculum = Curriculum(STAGES[:2], PROTECTED)
    result = start_curriculum(curriculum, policy_dir, n=3, output=tmp_path / "run")
    assert names_in(result.output) == {
        "config.json",
        "model",
        "matrix.json",
        "matrix.png",
        "summary.md",
        "stage-1",
        "stage-2",
        "state.pt",
    }
    stored = json.loads((result.output / "matrix.json").read_text())
    assert stored["num_problems"] == [3, 3] and len(stored["solved"]) == 3
    assert set(stored["measures"]["forgetting"]) == {"value", "low", "high"}
    assert "after second" in (result.output / "summary.md").read_text()
    for folder in (result.output / "model", result.output / "stage-1" / "model"):
        load_policy(folder)
    for number in (1, 2):
        assert read_log(result.output / f"stage-{number}" / "metrics.jsonl")
    plain = replace(curriculum, protection=Protection())
    with pytest.raises(FileExistsError, match="already holds a run"):
        start_curriculum(plain, policy_dir, n=3, output=result.output)
    start_curriculum(plain, policy_dir, n=3, output=result.output, overwrite=True)


@pytest.fixture(scope="module")
def stopped(policy_dir, tmp_path_factory):
    """What a kill leaves after no, one, two or all three stages, and the whole curriculum as the last of them."""
    parent, folders = tmp_path_factory.mktemp("curriculum"), []

    def save_and_copy(path, content):
        save_state(path, content)
        folders.append(shutil.copytree(path.parent, parent / f"after-{len(folders)}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_edu.continual.runs.save_state", save_and_copy)
        whole = start_curriculum(Curriculum(STAGES, PROTECTED), policy_dir, n=3, output=parent / "run")
    assert len(folders) == 4
    sizes = [[file.stat().st_size for file in folder.rglob("*") if file.is_file()] for folder in folders]
    model = (whole.output / "model" / "model.safetensors").stat().st_size
    small_files = 200_000
    assert max(map(sum, sizes)) <= count_copies(Curriculum(STAGES, PROTECTED)) * model + small_files
    return whole, folders


@pytest.mark.parametrize(
    "stages_done", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(2, marks=pytest.mark.long), 3]
)
def test_a_resumed_curriculum_ends_bit_for_bit_alike(stopped, tmp_path, stages_done):
    whole, folders = stopped
    cut = shutil.copytree(folders[stages_done], tmp_path / "cut")
    (cut / "stage-3").mkdir(exist_ok=True)  # half of a stage may lie about
    result = resume_curriculum(cut)
    assert same_weights(state(whole.output), state(cut))
    assert result.matrix == whole.matrix
    kept = [json.loads((folder / "matrix.json").read_text()) for folder in (whole.output, cut)]
    assert kept[0]["solved"] == kept[1]["solved"]


def test_a_damaged_state_and_a_curriculum_of_an_earlier_version_are_refused(stopped, tmp_path):
    cut = shutil.copytree(stopped[1][1], tmp_path / "cut")
    content = (cut / "state.pt").read_bytes()
    (cut / "state.pt").write_bytes(content[:-40])
    with pytest.raises(ValueError, match=r"`resume`.*state\.pt is damaged or cut short; delete"):
        resume_curriculum(cut)
    (cut / "state.pt").unlink()
    (cut / "stage-0.json").write_text("{}")
    with pytest.raises(ValueError, match="started by grpo_edu .*whose stages this version cannot read"):
        resume_curriculum(cut)


def test_resuming_with_a_changed_model_or_changed_problems_is_refused(policy_dir, tmp_path):
    started_from = tmp_path / "start"
    shutil.copytree(policy_dir, started_from)
    start_curriculum(Curriculum(STAGES), started_from, n=2, output=tmp_path / "run")
    model, tokenizer = load_policy(started_from)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    model.save_pretrained(started_from)
    with pytest.raises(ValueError, match="another model"):
        resume_curriculum(tmp_path / "run")
    shutil.copytree(policy_dir, started_from, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="holds no curriculum"):
        resume_curriculum(policy_dir)
    assert resume_curriculum(tmp_path / "run").matrix.tasks == ("first", "second", "third")
    config = tmp_path / "run" / "config.json"
    content = json.loads(config.read_text())
    content["data_fingerprints"]["train"] = content["data_fingerprints"]["heldout"]
    config.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="other train problems.*restore"):
        resume_curriculum(tmp_path / "run")
    del content["data_fingerprints"]  # as in folders of earlier versions
    config.write_text(json.dumps(content))
    assert resume_curriculum(tmp_path / "run").matrix.tasks == ("first", "second", "third")


def test_a_stage_that_cannot_learn_is_said(policy_dir):
    stages = (replace(STAGES[0], config=replace(SMALL, learning_rate=1e-30)), *STAGES[1:])
    with pytest.warns(RuntimeWarning, match="stage 'first': nothing was learned") as seen:
        run(policy_dir, Protection(), stages)
    assert len([one for one in seen if "nothing was learned" in str(one.message)]) == 1


def test_a_broken_run_says_how_to_go_on(policy_dir, tmp_path, monkeypatch):
    import grpo_edu.continual.curriculum as module

    calls = []

    def broken(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train_stage(*arguments, **options)

    monkeypatch.setattr(module, "train_stage", broken)
    with pytest.raises(KeyboardInterrupt) as caught:
        start_curriculum(Curriculum(STAGES), policy_dir, n=2, output=tmp_path / "run")
    (note,) = caught.value.__notes__
    assert "1 of 3 stages" in note and note.endswith(f"--resume {tmp_path / 'run'}")
    monkeypatch.undo()
    assert resume_curriculum(tmp_path / "run").matrix.tasks == ("first", "second", "third")


@pytest.mark.skipif(os.name != "posix", reason="SIGTERM is of POSIX")
def test_sigterm_says_what_is_kept_and_how_to_go_on(policy_dir, tmp_path, monkeypatch, capsys):
    import grpo_edu.continual.curriculum as module

    def stopped(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return train_stage(*arguments, **options)

    monkeypatch.setattr(module, "train_stage", stopped)
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a missing handler must not end the tests
    signal.signal(signal.SIGTERM, lambda *arguments: None)
    try:
        output = tmp_path / "my run"
        stages = [{"name": name, "data": name, "config": {"max_steps": 1}} for name in ("basic", "sorting")]
        (tmp_path / "two.json").write_text(json.dumps({"stages": stages}))
        arguments = ["--model", str(policy_dir), "--profile", str(tmp_path / "two.json"), "--n", "2"]
        assert main(["curriculum", *arguments, "--output", str(output)]) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert f"keeps 0 of 2 stages; continue with --resume '{output}'" in capsys.readouterr().err


def test_fingerprint_knows_every_weight(policy_dir):
    model, _ = load_policy(policy_dir)
    again, _ = load_policy(policy_dir)
    assert fingerprint(model) == fingerprint(again)
    with torch.no_grad():
        next(reversed(list(again.parameters()))).view(-1)[0] += 1e-6
    assert fingerprint(model) != fingerprint(again)


# ---- the command ----


@pytest.fixture
def profile(tmp_path):
    small = {"max_steps": 2, "prompts_per_step": 2}
    stages = [{"name": name, "data": name, "config": small} for name in ("basic", "sorting")]
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"stages": stages}))
    return str(path)


def test_curriculum_command(policy_dir, profile, tmp_path, capsys):
    arguments = ["curriculum", "--model", str(policy_dir), "--profile", profile, "--n", "3", "--seed", "5"]
    output = str(tmp_path / "run")
    assert main([*arguments, "--output", output, "--protect", "ewc", "--strength", "10"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^\| after sorting +\| +0 \| +0 \|$", shown, re.MULTILINE)
    assert "average accuracy: 0% [0%, 0%]" in shown and "forgetting: +0 points [+0, +0]" in shown
    assert "Protection: ewc, strength 10" in shown
    os.unlink(tmp_path / "run" / "matrix.json")
    assert main(["curriculum", "--resume", output, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tasks"] == ["basic", "sorting"] and result["seed"] == 5
    assert result["protection"]["method"] == "ewc" and result["output"] == output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "steep"], "--profile.*steep.*file"),
        (["--protect", "ewc"], "--protect is ewc.*no effect.*--strength"),
        (["--protect", "ewc", "--strength", "-5"], "--strength.*-5.0"),
        (["--resume", "here", "--strength", "3"], "--strength.*--resume"),
        (["--resume", "nowhere"], "holds no curriculum"),
        (["--n", "0"], "--n is 0"),
        (["--model", "missing/folder/x"], "missing/folder/x"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["curriculum", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and re.search(message, captured.err)
    assert not (tmp_path / "runs").exists()
