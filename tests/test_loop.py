"""The loop of notebook 07: right parts agree with the package, and a wrong one is named with its difference."""

import re

import nbformat
import pytest
import torch
from test_notebooks import FOLDER

from grpo_edu import LEVELS, load_problems
from grpo_edu.checks.loop import advantages, compare_loop, loss, sample, score, update


def definition(name):
    """A function of notebook 07, as it is written there."""
    cells = nbformat.read(FOLDER / "07_grpo_run.ipynb", as_version=4).cells
    (source,) = [cell.source for cell in cells if cell.cell_type == "code" and f"def {name}(" in cell.source]
    space = {"torch": torch}
    exec("import random\n" + source, space)  # noqa: S102
    return space[name]


def lines(capsys, *parts):
    compare_loop(definition("my_train"), parts, load_problems(LEVELS, "train", n=20))
    return capsys.readouterr().out


@pytest.fixture
def empty():
    names = ("my_sample", "my_score", "my_advantages", "my_loss", "my_update")
    return [definition(name) for name in names]


def distances(text):
    return [float(number) for number in re.findall(r"weights ≈ ([\d.]+)", text)]


def differences(text):
    """Those of the written parts, in their order."""
    return [float(number) for number in re.findall(r"largest difference ≈ (\S+)", text)]


@pytest.mark.long
def test_parts_that_are_not_written_are_the_packages(empty, capsys):
    text = lines(capsys, *empty)
    assert text.count("not written yet") == 5 and max(distances(text)) < 1e-3


@pytest.mark.slow
def test_written_parts_agree_with_the_package(capsys):
    text = lines(capsys, sample, score, advantages, loss, update)
    assert "not written" not in text and max(distances(text)) < 1e-3 and max(differences(text)) < 1e-4


@pytest.mark.slow
def test_a_wrong_part_shows_its_difference_and_moves_the_weights_elsewhere(empty, capsys):
    def my_advantages(rewards, config):
        groups = rewards.view(-1, config.num_generations)
        return (groups - groups.mean(dim=1, keepdim=True)).flatten()

    text = lines(capsys, empty[0], score, my_advantages, loss, update)
    assert differences(text)[1] > 0.1 and distances(text)[-1] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [lambda value: -value, pytest.param(lambda value: 0 * value, marks=pytest.mark.long)])
def test_a_loss_with_a_wrong_gradient_is_told_from_the_right_one_although_both_are_0(empty, wrong, capsys):
    def my_loss(model, rollout, advantages):
        return wrong(loss(model, rollout, advantages))

    assert differences(lines(capsys, *empty[:3], my_loss, empty[4]))[0] > 0.1


def test_an_update_that_steps_and_returns_nothing_is_told_to_return_the_length(empty):
    def my_update(model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with pytest.raises(ValueError, match="my_update .* returned None; return the length"):
        compare_loop(definition("my_train"), [*empty[:4], my_update], load_problems(LEVELS, "train", n=20))


@pytest.mark.long
def test_an_update_that_forgets_to_clear_the_gradients_moves_away_after_the_first_step(empty, capsys):
    def my_update(model, optimizer, loss):
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return norm

    first, *_, last = distances(lines(capsys, *empty[:4], my_update))
    assert first < 1e-3 < 0.01 < last
