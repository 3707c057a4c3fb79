"""The optimizers: gradients that are not finite, clipping, Adafactor as TRL sets it up, and the schedules."""

import itertools
import warnings

import pytest
import torch
from toy_policy import PROBLEMS, SMALL, assert_same_weights, make_batch, make_model, run, sgd, update_policy

from grpo_edu.config import SCHEDULES, GRPOConfig
from grpo_edu.fast.optimizers import build_optimizer, learning_rate_share
from grpo_edu.trainer import start_training


def test_half_precision_at_a_small_rate_warns_with_the_share_that_can_change(tokenizer):
    model = make_model().to(torch.bfloat16)
    few = GRPOConfig(learning_rate=1e-6)
    with pytest.warns(RuntimeWarning, match=r"bfloat16.*learning_rate = 1e-06 changes only \d+\.\d+%.*float32.*LoRA"):
        start_training(model, tokenizer, PROBLEMS * 16, few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_optimizer(model, GRPOConfig(learning_rate=10.0))
        build_optimizer(make_model(), few)


def not_finite(model):
    return sum(parameter.sum() for parameter in model.parameters()) * torch.nan


def test_a_gradient_that_is_not_finite_moves_nothing(tokenizer):
    model = make_model()
    with pytest.raises(FloatingPointError, match="gradient norm is nan.*weights were kept"):
        run(tokenizer, GRPOConfig(**SMALL), model=model, penalty=not_finite)
    assert_same_weights(model, make_model(), tolerance=0.0)


def test_clipping_off_leaves_a_long_gradient_as_it_is(tokenizer):
    free, held = make_model(), make_model()
    batch = make_batch(free, tokenizer, GRPOConfig(**SMALL))
    one = update_policy(free, batch, sgd(free), GRPOConfig(**SMALL, max_grad_norm=0.0))
    two = update_policy(held, batch, sgd(held), GRPOConfig(**SMALL, max_grad_norm=1e9))
    assert one == pytest.approx(two) and one["grad_norm"] > 0.1
    assert_same_weights(free, held)


def test_adafactor_is_the_one_that_trl_builds(tmp_path):
    import trl
    from transformers import Trainer

    arguments = trl.GRPOConfig(output_dir=str(tmp_path), optim="adafactor", use_cpu=True, bf16=False)
    theirs, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    ours, _ = build_optimizer(make_model(), GRPOConfig(optim="adafactor", learning_rate=arguments.learning_rate))
    assert type(ours) is theirs
    assert {name: ours.defaults[name] for name in options} == options


def test_adafactor_keeps_a_number_a_row_and_a_column(tokenizer):
    config = GRPOConfig(**SMALL, optim="adafactor", learning_rate=0.01)
    model = make_model()
    optimizer, _ = build_optimizer(model, config)
    update_policy(model, make_batch(model, tokenizer, config), optimizer, config)
    kept = sum(v.numel() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim)
    expected = sum(sum(weight.shape) for weight in model.parameters())  # rows + columns, or the entries of a vector
    assert kept == expected < sum(weight.numel() for weight in model.parameters()) / 3


@pytest.mark.parametrize(("kind", "warmup"), [("constant", 0), *itertools.product(SCHEDULES[1:], (0, 3))])
def test_learning_rates_are_those_of_transformers(kind, warmup):
    from transformers import get_scheduler

    config = GRPOConfig(lr_scheduler_type=kind, warmup_steps=warmup, max_steps=10)
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = get_scheduler(kind, torch.optim.SGD([weight], lr=1.0), warmup, 10)
    for step in range(13):  # also behind the end
        assert learning_rate_share(step, config) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step
        theirs.optimizer.step()
        theirs.step()
