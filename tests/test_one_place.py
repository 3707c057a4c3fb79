"""A loss and an estimator of advantages are one entry each: what is added in one place is found everywhere."""

import importlib.util
import re
from pathlib import Path

import pytest
import test_losses
import test_trainer
import torch
from toy_policy import SMALL, late_letters, run

from grpo_edu.advantages import ESTIMATORS
from grpo_edu.cli.main import build_parser
from grpo_edu.config import GRPOConfig, names_in_source
from grpo_edu.losses import LOSSES
from grpo_edu.runs.effects import reject_ineffective_options
from grpo_edu.runs.options import RunConfig
from grpo_edu.scale.trl_backend import trl_settings

ADDED = '''
from grpo_edu.advantages import ESTIMATORS, Estimator
from grpo_edu.losses import LOSSES, Loss, weight_by_batch_tokens


def better_half_loss(per_token_logps, ratio, advantages, low, high):
    """−max(A, 0) log π"""
    return -advantages.clamp(min=0) * per_token_logps


def signs(rewards, num_generations):
    return (rewards - rewards.median()).sign()


LOSSES["somebodys_loss"] = Loss(better_half_loss, weight_by_batch_tokens, "nowhere", clips="", uses_ratio=False)
ESTIMATORS["signs"] = Estimator(signs, has_baseline=False)
'''


@pytest.fixture(autouse=True)
def added(tmp_path, monkeypatch):
    """A module of somebody else, with one entry in each table."""
    for table in (LOSSES, ESTIMATORS):
        for name in ("somebodys_loss", "signs"):
            monkeypatch.setitem(table, name, None)  # so that it is taken out again
            monkeypatch.delitem(table, name)
    (tmp_path / "mine.py").write_text(ADDED, encoding="utf-8")
    found = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    found.loader.exec_module(importlib.util.module_from_spec(found))


def test_the_command_line_knows_both(capsys):
    arguments = build_parser().parse_args(["train", "--loss-type", "somebodys_loss", "--advantage-estimator", "signs"])
    assert (arguments.loss_type, arguments.advantage_estimator) == ("somebodys_loss", "signs")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["train", "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ", somebodys_loss" in shown and "group, rloo, none, signs" in shown


def test_the_trainer_learns_with_both(tokenizer):
    config = GRPOConfig(**SMALL, loss_type="somebodys_loss", advantage_estimator="signs", scale_rewards="none")
    _, history = run(tokenizer, config, late_letters)
    assert history[0]["grad_norm"] > 0 and not any("clip_ratio/" in key for key in history[0])


@pytest.mark.parametrize(
    ("given", "others"),
    [
        ({"epsilon": 0.3}, {"loss_type": "somebodys_loss", "num_iterations": 2}),
        ({"importance_sampling_level": "sequence"}, {"loss_type": "somebodys_loss", "num_iterations": 2}),
        ({"scale_rewards": "group"}, {"advantage_estimator": "signs"}),
    ],
)
def test_options_that_have_no_effect_with_them_are_refused(given, others):
    settings = RunConfig(config=GRPOConfig(**given, **others)).to_settings()
    with pytest.raises(ValueError, match="which has no effect here"):
        reject_ineffective_options(given, settings)


@pytest.mark.parametrize("changes", [{"loss_type": "somebodys_loss"}, {"advantage_estimator": "signs"}])
def test_trl_does_not_have_them(changes):
    with pytest.raises(ValueError, match=f"^{next(iter(changes))}: .*TRL's GRPOTrainer does not have|does not have"):
        trl_settings(GRPOConfig(**changes))


def test_the_tests_of_every_loss_need_no_edit(tokenizer):
    test_losses.test_at_ratio_one_the_gradient_is_the_policy_gradient("somebodys_loss")
    test_losses.test_micro_batches_add_up_to_the_whole_batch("somebodys_loss")
    test_losses.test_token_weights_give_every_reduction_whole_and_in_parts("somebodys_loss")
    test_losses.test_a_truncated_completion_is_left_out_by_zeroing_its_mask("somebodys_loss", "token")
    test_trainer.test_the_first_update_is_on_policy(tokenizer, "somebodys_loss")


def test_a_stage_takes_the_place_of_a_setting(capsys):
    """The example of the contributors' page trains, and bounds the ratio where the advantage is negative."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "contributing.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def two_sided_loss" in block)
    names = {}
    exec(code, names)
    assert len(capsys.readouterr().out.splitlines()) == 2
    ratio, ones = torch.tensor([[5.0]]), torch.ones(1, 1)
    for advantage, expected in ((-1.0, 2.0), (1.0, -1.2)):
        loss = names["two_sided_loss"](
            ratio.log(), ones.log(), torch.tensor([advantage]), ones, weights=ones, epsilon=0.2
        )
        assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "table", ["losses:LOSSES", "losses:IMPORTANCE_SAMPLING_LEVELS", "advantages:SCALE_REWARDS", "advantages:ESTIMATORS"]
)
def test_the_names_in_the_source_are_those_of_the_tables(table):
    module, _, name = table.partition(":")
    added = {"somebodys_loss", "signs"}  # by the module of somebody else
    loaded = getattr(importlib.import_module(f"grpo_edu.{module}"), name)
    assert list(names_in_source(f"grpo_edu.{module}", name)) == [entry for entry in loaded if entry not in added]
