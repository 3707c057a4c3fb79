"""The penalty by hand, its gradient, what λ = 0 and a large λ do to a training, and what does not fit a model."""

import copy
import math
from dataclasses import FrozenInstanceError

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from torch import nn
from torch.testing import assert_close

from grpo_edu.config import GRPOConfig, SupervisedConfig
from grpo_edu.continual.ewc import Anchor, anchor_penalty, copy_params, ewc_penalty, merge_anchors, uniform_fisher
from grpo_edu.continual.supervised import finetune
from grpo_edu.problems.templates import make_problems
from grpo_edu.trainer import train


def linear(values):
    model = nn.Linear(len(values), 1, bias=False)
    model.weight.data = torch.tensor([values])
    return model


def test_penalty_and_its_gradient_by_hand():
    model = linear([1.0, 3.0, -2.0])
    fisher = {"weight": torch.tensor([[4.0, 0.5, 0.0]])}
    anchor = {"weight": torch.tensor([[0.0, 1.0, 7.0]])}
    penalty = ewc_penalty(model, fisher, anchor, ewc_lambda=3.0)
    assert penalty.item() == 3 / 2 * (4 * 1 + 0.5 * 4)
    penalty.backward()
    assert_close(model.weight.grad, torch.tensor([[12.0, 3.0, 0.0]]))  # λ F (θ − θ*)


def test_penalty_is_zero_with_zero_gradient_at_the_anchor():
    """Evaluated once, there, it says nothing: it must be in the loss of every later step."""
    model = linear([1.0, 3.0])
    penalty = ewc_penalty(model, uniform_fisher(model), copy_params(model), ewc_lambda=1000.0)
    penalty.backward()
    assert penalty.item() == 0 and not model.weight.grad.any()


def test_weights_that_the_fisher_does_not_name_are_free():
    model = nn.Linear(2, 1)
    anchor = {"bias": torch.zeros(1)}
    ewc_penalty(model, {"bias": torch.ones(1)}, anchor, ewc_lambda=1.0).backward()
    assert model.weight.grad is None and model.bias.grad is not None


def test_the_penalties_of_several_tasks_add_up():
    model = linear([1.0])
    anchors = [Anchor({"weight": torch.tensor([[f]])}, {"weight": torch.tensor([[p]])}) for f, p in ((2, 0), (3, 4))]
    assert anchor_penalty(anchors, ewc_lambda=2.0)(model).item() == 2 * 1 + 3 * 9
    with pytest.raises(ValueError, match="anchors is empty"):
        anchor_penalty([], ewc_lambda=2.0)


def test_online_anchor_decays_the_old_fisher_and_takes_the_new_place():
    old = Anchor({"w": torch.tensor([4.0, 2.0])}, {"w": torch.tensor([0.0, 0.0])})
    new = Anchor({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([5.0, 6.0])})
    merged = merge_anchors(old, new, decay=0.25)
    assert_close(merged.fisher["w"], torch.tensor([2.0, 0.5]))
    assert_close(merged.anchor_params["w"], torch.tensor([5.0, 6.0]))
    assert_close(merge_anchors(old, new, decay=0.0).fisher, new.fisher)  # the old task forgotten
    for decay in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="decay"):
            merge_anchors(old, new, decay=decay)
    with pytest.raises(ValueError, match="only one of them has a weight 'v'"):
        merge_anchors(old, Anchor({"v": torch.ones(2)}, {"v": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"^old: 'w' has shape \(2,\), the model's weight \(3,\)"):
        merge_anchors(old, Anchor({"w": torch.ones(3)}, {"w": torch.ones(3)}))


def test_an_anchor_stays_what_it_is():
    anchor = Anchor({"w": torch.ones(1)}, {"w": torch.zeros(1)})
    with pytest.raises(FrozenInstanceError):
        anchor.fisher = {}


def test_anchors_are_copies():
    model = linear([1.0, 2.0])
    anchor = copy_params(model)
    with torch.no_grad():
        model.weight += 1
    assert_close(anchor["weight"], torch.tensor([[1.0, 2.0]]))
    assert not anchor["weight"].requires_grad
    assert_close(uniform_fisher(model)["weight"], torch.ones(1, 2))


# ---- in a training ----

PROBLEMS = make_problems("basic", 4, seed=0)
TRAININGS = {
    "supervised": lambda model, tokenizer, penalty: finetune(
        model, tokenizer, PROBLEMS, SupervisedConfig(max_steps=6, prompts_per_step=2), penalty=penalty
    ),
    "grpo": lambda model, tokenizer, penalty: train(
        model,
        tokenizer,
        PROBLEMS,
        lambda completions, **_: [float(len(text)) for text in completions],
        GRPOConfig(max_steps=6, prompts_per_step=2, num_generations=4, max_completion_length=16, learning_rate=1e-3),
        penalty=penalty,
    ),
}


@pytest.fixture(scope="module")
def policy():
    tokenizer = byte_tokenizer()
    return random_model(tokenizer, max_position_embeddings=1024, stop_ids=range(0, 256, 16)), tokenizer


def trained(policy, training, ewc_lambda, fisher=None):
    """The weights after a training whose anchor is its own start; λ None for no penalty at all."""
    model, tokenizer = copy.deepcopy(policy[0]), policy[1]
    anchor = Anchor(fisher or uniform_fisher(model), copy_params(model))
    penalty = None if ewc_lambda is None else anchor_penalty([anchor], ewc_lambda=ewc_lambda)
    history = list(TRAININGS[training](model, tokenizer, penalty))
    return copy_params(model), anchor.anchor_params, history


@pytest.mark.parametrize("training", TRAININGS)
def test_with_lambda_0_the_run_is_identical_to_one_without(policy, training):
    without, _, plain = trained(policy, training, None)
    with_zero, _, history = trained(policy, training, 0.0)
    assert_close(with_zero, without)
    assert [row["loss"] for row in history] == pytest.approx([row["loss"] for row in plain])
    assert all(row["penalty"] == 0 for row in history)


@pytest.mark.parametrize("training", TRAININGS)
def test_with_a_large_lambda_the_protected_weights_stay_and_the_others_go(policy, training):
    """Half of the weights are protected. Adam moves by about the learning rate a step, so staying has that grain."""
    halves = {}
    for name, weight in policy[0].named_parameters():
        mask = torch.zeros_like(weight).flatten()
        mask[::2] = 1.0
        halves[name] = mask.view_as(weight)
    after, before, _ = trained(policy, training, 1e8, halves)
    free, _, _ = trained(policy, training, None)

    def moved(weights, protected):
        return torch.cat([(weights[n] - before[n])[halves[n] == protected].abs().flatten() for n in weights]).mean()

    assert moved(after, 1) < 0.5 * moved(free, 1)
    assert moved(after, 0) > 0.5 * moved(free, 0)


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
def test_the_penalty_grows_while_the_model_leaves_and_larger_lambda_keeps_it_nearer(policy, training):
    distances = []
    for ewc_lambda in (None, 1.0, 1000.0):
        after, before, history = trained(policy, training, ewc_lambda)
        distances.append(sum((after[name] - before[name]).square().sum().item() for name in after))
    assert history[0]["penalty"] == 0 < history[1]["penalty"]
    assert distances[0] > distances[2] and distances[1] > distances[2]


# ---- what does not fit ----


def spoiled(model, what):
    fisher, anchor = uniform_fisher(model), copy_params(model)
    if what == "unknown name":
        fisher["model.layers.99.weight"] = torch.ones(2)
    elif what == "other shape":
        fisher["weight"] = torch.ones(3, 3)
    elif what == "no anchor":
        del anchor["weight"]
    elif what == "anchor of another shape":
        anchor["weight"] = torch.ones(5)
    elif what == "nothing":
        fisher = {}
    return fisher, anchor


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unknown name", r"fisher: the model has no weight 'model\.layers\.99\.weight'"),
        ("other shape", r"fisher: 'weight' has shape \(3, 3\), the model's weight \(1, 2\)"),
        ("no anchor", r"anchor_params: 'weight' is missing"),
        ("anchor of another shape", r"anchor_params: 'weight' has shape \(5,\)"),
        ("nothing", "fisher is empty"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(what, message):
    model = linear([1.0, 2.0])
    with pytest.raises(ValueError, match=message):
        ewc_penalty(model, *spoiled(model, what), ewc_lambda=1.0)


@pytest.mark.parametrize("ewc_lambda", [-1.0, math.nan, math.inf])
def test_a_negative_or_endless_lambda_is_refused(ewc_lambda):
    model = linear([1.0, 2.0])
    with pytest.raises(ValueError, match="ewc_lambda"):
        ewc_penalty(model, uniform_fisher(model), copy_params(model), ewc_lambda=ewc_lambda)
