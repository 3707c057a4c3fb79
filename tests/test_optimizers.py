"""Updates after and in the backward pass: the same weights; Adafactor as TRL sets it up; what is held meanwhile."""

import itertools
import warnings

import pytest
import torch
from toy_policy import (
    PROBLEMS,
    SMALL,
    assert_same_weights,
    late_letters,
    make_batch,
    make_model,
    run,
    sgd,
    timeless,
    update_policy,
    weights,
)

from grpo_edu.config import OPTIMIZERS, SCHEDULES, GRPOConfig
from grpo_edu.fast.optimizers import build_optimizer, learning_rate_share
from grpo_edu.trainer import start_training, train


def all_tie(completions, **kwargs):
    return [1.0] * len(completions)


def test_half_precision_at_a_small_rate_warns_with_the_share_that_can_change(tokenizer):
    model = make_model().to(torch.bfloat16)
    few = GRPOConfig(learning_rate=1e-6)
    with pytest.warns(RuntimeWarning, match=r"bfloat16.*learning_rate = 1e-06 changes only \d+\.\d+%.*float32.*LoRA"):
        start_training(model, tokenizer, PROBLEMS * 16, few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_optimizer(model, GRPOConfig(learning_rate=10.0))
        build_optimizer(make_model(), few)


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05, 1e9])
@pytest.mark.parametrize("tied", [False, True])
def test_the_step_in_the_backward_pass_is_the_step_behind_it(tokenizer, optim, max_grad_norm, tied):
    options = {**SMALL, "learning_rate": 0.01, "weight_decay": 0.1, "num_iterations": 2, "epsilon": 0.05}
    options |= {"optim": optim, "max_grad_norm": max_grad_norm, "gradient_checkpointing": tied}
    usual, history = run(tokenizer, GRPOConfig(**options), model=make_model(tie_word_embeddings=tied))
    config = GRPOConfig(**options, optimizer_in_backward=True)
    fused, metrics = run(tokenizer, config, model=make_model(tie_word_embeddings=tied))
    assert_same_weights(usual, fused, tolerance=1e-9)
    for row, other in zip(timeless(history), timeless(metrics), strict=True):
        assert other == pytest.approx(row, rel=1e-5, abs=1e-9)
    assert history[0]["grad_norm"] > 0.05


def test_no_two_gradients_are_held_at_once(tokenizer):
    model = make_model()
    config = GRPOConfig(**SMALL, optimizer_in_backward=True)
    batch = make_batch(model, tokenizer, config)
    optimizer, _ = build_optimizer(model, config)
    held = []

    def look(optimizer, args, kwargs):
        held.append(sum(weight.grad is not None for weight in model.parameters()))

    optimizer.register_step_pre_hook(look)
    update_policy(model, batch, optimizer, config)
    assert held == [1] * len(list(model.parameters()))
    assert all(weight.grad is None for weight in model.parameters())


def test_a_step_without_gradient_moves_what_momentum_and_decay_move(tokenizer):
    """All groups tie in the second step; the weights go on moving, by the first one's momentum."""
    rewards = iter([late_letters, all_tie] * 2)
    config = {**SMALL, "learning_rate": 0.01, "weight_decay": 0.1}
    models = []
    for fused in (False, True):
        model = make_model()

        def reward(completions, **kwargs):
            return next(rewards)(completions, **kwargs)

        for _ in train(model, tokenizer, PROBLEMS, reward, GRPOConfig(**config, optimizer_in_backward=fused)):
            models.append(weights(model))
    first, second, fused_first, fused_second = models
    torch.testing.assert_close(first, fused_first, atol=1e-9, rtol=0.0)
    torch.testing.assert_close(second, fused_second, atol=1e-9, rtol=0.0)
    assert not torch.equal(first["model.norm.weight"], second["model.norm.weight"])


def test_a_penalty_is_part_of_the_one_backward_pass(tokenizer):
    def decay(model):
        return 0.15 * sum(parameter.square().sum() for parameter in model.parameters())

    results = []
    for fused in (False, True):
        config = GRPOConfig(**SMALL, optimizer_in_backward=fused)
        model = make_model()
        batch = make_batch(model, tokenizer, config)
        metrics = update_policy(model, batch, sgd(model, 0.1), config, penalty=decay)
        results.append((weights(model), metrics))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-12, rtol=0.0)
    assert results[1][1] == pytest.approx(results[0][1])


def not_finite(model):
    return sum(parameter.sum() for parameter in model.parameters()) * torch.nan


def test_a_gradient_that_is_not_finite_moves_nothing_where_it_is_measured_first(tokenizer):
    config = GRPOConfig(**SMALL, optimizer_in_backward=True)
    model = make_model()
    with pytest.raises(FloatingPointError, match="gradient norm is nan.*weights were kept"):
        run(tokenizer, config, model=model, penalty=not_finite)
    assert_same_weights(model, make_model(), tolerance=0.0)


def test_without_clipping_the_message_does_not_promise_that(tokenizer):
    config = GRPOConfig(**SMALL, optimizer_in_backward=True, max_grad_norm=0.0)
    with pytest.raises(FloatingPointError, match="updated in part.*max_grad_norm = 0"):
        run(tokenizer, config, penalty=not_finite)


def test_clipping_off_leaves_a_long_gradient_as_it_is(tokenizer):
    free, held = make_model(), make_model()
    batch = make_batch(free, tokenizer, GRPOConfig(**SMALL))
    one = update_policy(free, batch, sgd(free), GRPOConfig(**SMALL, max_grad_norm=0.0))
    two = update_policy(held, batch, sgd(held), GRPOConfig(**SMALL, max_grad_norm=1e9))
    assert one == pytest.approx(two) and one["grad_norm"] > 0.1
    assert_same_weights(free, held)


def test_adafactor_is_the_one_that_trl_builds(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
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


def test_an_impossible_pair_is_refused():
    with pytest.raises(ValueError, match="optimizer_in_backward .*gradient_accumulation_steps = 2"):
        GRPOConfig(optimizer_in_backward=True, gradient_accumulation_steps=2)


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
