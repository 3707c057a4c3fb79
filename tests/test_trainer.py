"""The GRPO loop against a hand-written one, against TRL's metric keys, and by what must not change its result."""

import copy
import dataclasses
import itertools
import math
import random
import statistics
import traceback

import pytest
import torch
from torch.testing import assert_close
from toy_policy import (
    CAP,
    PROBLEMS,
    SMALL,
    assert_same_history,
    assert_same_weights,
    late_letters,
    late_letters_or_tie,
    make_batch,
    make_model,
    run,
    sgd,
    timeless,
    update_policy,
    weights,
)

from grpo_edu import losses, trainer
from grpo_edu.config import LOSS_TYPES, GRPOConfig
from grpo_edu.losses import LOSSES, clipped_loss, per_token_loss, token_weights
from grpo_edu.problems.templates import Problem, ProblemOrder
from grpo_edu.rewards import accuracy_reward
from grpo_edu.rollout import Sampler, generate
from grpo_edu.trainer import train

every_loss = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def share_of_a(completions, **kwargs) -> list[float]:
    """Reward: the share of the words that are "a"; 0 for an empty completion."""
    return [text.split().count("a") / max(1, len(text.split())) for text in completions]


def all_tie(completions, **kwargs) -> list[float]:
    return [1.69] * len(completions)


def rows_of_all_parts(batch, config):
    return trainer.rows_with_gradient(batch, config).tolist()


EVERY_ROW = trainer.Stages(rows=lambda batch, config: torch.arange(len(batch.rewards)))


# The loop, written again by hand: one row at a time, without padding, masks or any mathematics of the package.


def logps_by_hand(model, rollout, row, temperature):
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] == 1]
    completion = rollout.completion_ids[row][rollout.completion_mask[row] == 1]
    logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)[torch.arange(len(completion)), completion]


def advantages_by_hand(rewards, config):
    groups = [rewards[i : i + config.num_generations] for i in range(0, len(rewards), config.num_generations)]
    advantages = []
    for group in groups:
        for index, reward in enumerate(group):
            others = [r for place, r in enumerate(group) if place != index]
            if config.advantage_estimator == "rloo":
                advantages.append(reward - statistics.mean(others))
            else:
                spread = {"group": group, "batch": rewards, "none": None}[config.scale_rewards]
                scale = 1.0 if spread is None else statistics.stdev(spread) + 1e-4
                advantages.append((reward - statistics.mean(group)) / scale)
    return advantages


def loss_by_hand(model, old, reference, rollout, advantages, config):
    """The loss of a whole batch, the mean KL and the share of clipped tokens."""
    rows, tokens, kls, clipped = [], 0, [], 0
    for row, advantage in enumerate(advantages):
        if config.mask_truncated_completions and rollout.is_truncated[row]:
            rows.append(torch.zeros(1, dtype=torch.float64))
            continue
        logps = logps_by_hand(model, rollout, row, config.temperature)
        ratio = (logps - old[row]).exp()
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        losses = []
        for r, logp, ref in zip(ratio, logps, reference[row], strict=True):
            if config.loss_type == "cispo":
                loss = -min(r.item(), high) * advantage * logp
            else:
                bounded = min(max(r, 1 - config.epsilon), 1 + high)
                loss = -min(r * advantage, bounded * advantage)
            kl = (ref - logp).exp() - (ref - logp) - 1
            losses.append(loss + config.beta * kl)
            kls.append(kl.item())
            clipped += bool((advantage > 0 and r > 1 + high) or (advantage < 0 and r < 1 - config.epsilon))
        rows.append(torch.stack(losses))
        tokens += len(losses)
    if config.loss_type == "grpo":
        loss = torch.stack([row.mean() for row in rows]).mean()
    else:
        whole = len(rows) * config.max_completion_length if config.loss_type == "dr_grpo" else tokens
        loss = torch.cat(rows).sum() / whole
    return loss, statistics.mean(kls), clipped / tokens


def train_by_hand(model, tokenizer, config, reward, learning_rates):
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=config.weight_decay)
    generator = torch.Generator().manual_seed(config.seed)
    order = random.Random(config.seed).sample(range(len(PROBLEMS)), len(PROBLEMS))
    history = []
    for learning_rate in learning_rates:
        chosen, order = order[: config.prompts_per_step], order[config.prompts_per_step :]
        rollout = generate(
            model,
            tokenizer,
            [PROBLEMS[index].prompt for index in chosen],
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            generator=generator,
        )
        advantages = advantages_by_hand(reward(rollout.completions, prompts=rollout.prompts), config)
        with torch.no_grad():
            scored = [
                [logps_by_hand(scorer, rollout, row, config.temperature) for row in range(len(advantages))]
                for scorer in (model, reference)
            ]
        updates = []
        for _ in range(config.num_iterations):
            loss, kl, clipped = loss_by_hand(model, *scored, rollout, advantages, config)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient * min(1.0, config.max_grad_norm / (norm + 1e-6))
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            updates.append({"loss": loss.item(), "grad_norm": norm, "kl": kl, "clip_ratio/region_mean": clipped})
        history.append({key: statistics.mean(update[key] for update in updates) for key in updates[0]})
    return history


CLIPPED = {"beta": 0.1, "num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.05, "temperature": 0.7}
WARMED_UP = {"warmup_steps": 1, "lr_scheduler_type": "constant_with_warmup"}
CISPO = {"loss_type": "cispo", "epsilon_high": 1.01, "num_iterations": 2}


@pytest.mark.parametrize(
    "options, learning_rates",
    [
        (CLIPPED | {"weight_decay": 0.1, "max_grad_norm": 0.3, "lr_scheduler_type": "linear"}, [0.01, 0.005]),
        ({"loss_type": "dapo", "scale_rewards": "batch", "mask_truncated_completions": True}, [0.03, 0.03]),
        (WARMED_UP | {"loss_type": "dr_grpo", "scale_rewards": "none"}, [0.0, 0.03]),
        (CISPO | {"advantage_estimator": "rloo", "gradient_accumulation_steps": 2}, [0.03, 0.03]),
    ],
    ids=["grpo", "dapo", "dr_grpo", "cispo"],
)
def test_a_run_equals_one_written_by_hand(tokenizer, options, learning_rates):
    config = GRPOConfig(**SMALL, learning_rate=max(learning_rates), seed=3, **options)
    ours, history = run(tokenizer, config, late_letters_or_tie)
    theirs = make_model()
    expected = train_by_hand(theirs, tokenizer, config, late_letters_or_tie, learning_rates)
    assert_same_weights(ours, theirs, tolerance=1e-4)  # AdamW enlarges the rounding of float32 advantages
    assert [row["learning_rate"] for row in history] == pytest.approx(learning_rates)
    compared = [key for key in expected[0] if key in history[0]]
    assert {"loss", "grad_norm"} <= set(compared)
    for row, wanted in zip(history, expected, strict=True):
        close = pytest.approx({key: wanted[key] for key in compared}, rel=1e-5, abs=1e-6)
        assert {key: row[key] for key in compared} == close
    if options.get("num_iterations") == 2 and config.loss_type == "grpo":
        assert all(row["clip_ratio/region_mean"] > 0 and row["kl"] > 0 for row in history)  # the test sees the clip


# Learning


@pytest.mark.slow
@every_loss
def test_the_reward_rises_within_twenty_steps(tokenizer, loss_type):
    sizes = {**SMALL, "max_steps": 20, "num_generations": 8, **CAP.get(loss_type, {})}
    config = GRPOConfig(**sizes, learning_rate=0.02, loss_type=loss_type)
    _, history = run(tokenizer, config, share_of_a, model=make_model(dtype=torch.float32))
    rewards = [row["reward"] for row in history]
    assert statistics.mean(rewards[:2]) < 0.3
    assert statistics.mean(rewards[-3:]) > 0.7
    assert [row["step"] for row in history] == list(range(1, 21))


def test_the_policy_learns_different_answers_to_different_prompts(tokenizer):
    problems = [Problem("q0", "a", "toy", ""), Problem("q1", "b", "toy", "")]

    def first_word_is_the_answer(completions, answer, **kwargs):
        return [float(text.split()[:1] == [gold]) for text, gold in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        num_generations=16, prompts_per_step=2, max_completion_length=2, max_steps=25, learning_rate=0.02
    )
    model, history = run(
        tokenizer, config, first_word_is_the_answer, model=make_model(dtype=torch.float32), problems=problems
    )
    assert statistics.mean(row["reward"] for row in history[:2]) < 0.3
    greedy = generate(model, tokenizer, ["q0", "q1"], num_generations=1, max_completion_length=1, temperature=0)
    assert greedy.completions == ["a", "b"]


# What must not change the result


@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.1, "beta": 0.05, "loss_type": "dr_grpo"},
        {"advantage_estimator": "none", "use_bias_correction_kl": True, "beta": 0.05},
        {"scale_rewards": "mean", "loss_type": "reinforce"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_chosen_from_the_whole_batch_does_not_depend_on_its_parts(tokenizer, options):
    """The gradient is large enough to see, and another one than without the first option."""
    settings = {**SMALL, "learning_rate": 0.01, **options}
    whole, history = run(tokenizer, GRPOConfig(**settings), late_letters_or_tie)
    assert all(row["grad_norm"] > 1e-3 for row in history)
    cut, metrics = run(tokenizer, GRPOConfig(**settings, gradient_accumulation_steps=4), late_letters_or_tie)
    assert_same_weights(whole, cut)
    assert_same_history(history, metrics)
    del settings[next(iter(options))]
    plain, _ = run(tokenizer, GRPOConfig(**settings), late_letters_or_tie)
    with pytest.raises(AssertionError):
        assert_same_weights(whole, plain)


def test_the_entropy_bonus_raises_the_entropy(tokenizer):
    """All groups tie, so that nothing but the bonus moves the policy."""
    options = {**SMALL, "max_steps": 8, "learning_rate": 0.02}
    _, history = run(tokenizer, GRPOConfig(**options, entropy_coef=1.0), all_tie)
    assert history[-1]["entropy"] > history[0]["entropy"] + 0.05
    assert history[0]["loss"] == pytest.approx(-history[0]["entropy"], rel=0.2)  # one is exact, the other sampled


def test_without_a_baseline_the_reward_itself_is_the_advantage_and_tied_groups_count(tokenizer):
    config = GRPOConfig(**SMALL, advantage_estimator="none")
    batch = make_batch(make_model(), tokenizer, config, all_tie)
    assert batch.advantages.tolist() == pytest.approx([1.69] * 16)
    assert rows_of_all_parts(batch, config) == list(range(16))
    scored = torch.tensor([1.0, math.nan, 0.0, 2.0])
    assert trainer.compute_advantages(scored, config).tolist() == [1.0, 0.0, 0.0, 2.0]


def test_a_step_that_no_function_scores_has_no_gradient_and_ends_only_a_run_that_begins_with_it(tokenizer):
    config = GRPOConfig(**{**SMALL, "max_steps": 3})

    def skip_step(skipped):
        calls = itertools.count(1)
        return lambda completions, **kwargs: (
            [None] * len(completions) if next(calls) == skipped else late_letters(completions)
        )

    with pytest.warns(RuntimeWarning, match="None for 16 of 16.*advantage is 0"):
        _, history = run(tokenizer, config, skip_step(2))
    assert [math.isnan(row["reward"]) for row in history] == [False, True, False]
    assert history[1]["loss"] == history[1]["grad_norm"] == 0.0 < history[2]["grad_norm"]
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="None for all completions of the first step"):
        run(tokenizer, config, skip_step(1))


def test_a_completion_that_no_function_scores_changes_nothing(tokenizer):
    """Its advantage is 0, and so is its loss; the metrics are those of the others."""

    def skip_q1(completions, prompts, **kwargs):
        scored = zip(prompts, late_letters(completions), strict=True)
        return [None if prompt.startswith("q1") else reward for prompt, reward in scored]

    config = GRPOConfig(**SMALL)
    with pytest.warns(RuntimeWarning, match="skip_q1.*advantage is 0"):
        batch = make_batch(make_model(), tokenizer, config, skip_q1, PROBLEMS[2:6])
    full = make_batch(make_model(), tokenizer, config, late_letters, PROBLEMS[2:6])
    assert_close(batch.advantages[:8], full.advantages[:8])
    assert batch.advantages[8:].eq(0).all()
    assert rows_of_all_parts(batch, config) == list(range(8))
    with pytest.warns(RuntimeWarning, match="skip_q1"):
        _, (row, _) = run(tokenizer, GRPOConfig(**SMALL), skip_q1, problems=PROBLEMS[2:6])
    assert math.isfinite(row["reward"]) and math.isfinite(row["loss"]) and row["grad_norm"] > 0


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@every_loss
def test_leaving_out_tied_groups_changes_nothing(tokenizer, monkeypatch, loss_type, scale_rewards):
    options = {"learning_rate": 0.01, "weight_decay": 0.1, "num_iterations": 2, "epsilon": 0.01}
    options |= {"loss_type": loss_type, "scale_rewards": scale_rewards, **CAP.get(loss_type, {})}
    config = GRPOConfig(**SMALL, **options, gradient_accumulation_steps=2)
    batch = make_batch(make_model(), tokenizer, config, late_letters_or_tie, PROBLEMS[2:6])
    assert [problem.prompt[:2] for problem in PROBLEMS[2:6]] == ["q0", "q0", "q1", "q1"]
    assert rows_of_all_parts(batch, config) == list(range(8))
    lean, history = run(tokenizer, config, late_letters_or_tie)
    full, metrics = run(tokenizer, config, late_letters_or_tie, stages=EVERY_ROW)
    assert_same_weights(lean, full)
    assert_same_history(history, metrics)


def test_with_a_kl_term_tied_groups_are_kept(tokenizer):
    config = GRPOConfig(**SMALL, beta=0.1)
    batch = make_batch(make_model(), tokenizer, config, all_tie)
    assert rows_of_all_parts(batch, config) == list(range(16))


def test_a_step_in_which_all_groups_tie_is_a_step_without_gradient(tokenizer, monkeypatch):
    config = GRPOConfig(**{**SMALL, "max_steps": 3}, learning_rate=0.01, weight_decay=0.1)
    calls = itertools.count()

    def tie_in_the_first_step(completions, **kwargs):
        return all_tie(completions) if next(calls) % 3 == 0 else late_letters(completions)

    lean, history = run(tokenizer, config, tie_in_the_first_step)
    assert history[0]["loss"] == history[0]["grad_norm"] == 0.0
    assert history[0]["frac_reward_zero_std"] == 1.0
    assert history[0].keys() == history[1].keys()
    full, _ = run(tokenizer, config, tie_in_the_first_step, stages=EVERY_ROW)
    assert_same_weights(lean, full)


@every_loss
def test_the_order_of_rows_and_groups_changes_nothing(tokenizer, loss_type):
    config = GRPOConfig(**SMALL, loss_type=loss_type, max_grad_norm=1e9, **CAP.get(loss_type, {}))
    model = make_model()
    batch = make_batch(model, tokenizer, config)
    order = torch.tensor([row for group in (2, 0, 3, 1) for row in (4 * group + i for i in (3, 1, 0, 2))])

    def reorder(value):
        return value[order] if isinstance(value, torch.Tensor) else [value[index] for index in order]

    tensors = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "prompts", "completions")
    rollout = dataclasses.replace(batch.rollout, **{name: reorder(getattr(batch.rollout, name)) for name in tensors})
    names = ("rewards_per_func", "rewards", "advantages", "loss_mask")
    moved = dataclasses.replace(batch, rollout=rollout, **{name: reorder(getattr(batch, name)) for name in names})
    other = copy.deepcopy(model)
    metrics = update_policy(model, batch, sgd(model), config)
    assert update_policy(other, moved, sgd(other), config) == pytest.approx(metrics, abs=1e-10)
    assert metrics["grad_norm"] > 0.01
    assert_same_weights(model, other)


# Seeds


def test_a_seed_gives_the_same_weights_to_the_last_bit_and_another_does_not(tokenizer):
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(results))  # the global generator has no part in it
        random.seed(len(results))
        model = make_model(dtype=torch.float32)
        results.append(run(tokenizer, GRPOConfig(**SMALL, learning_rate=0.01, seed=seed), model=model))
    (first, one), (second, two), (third, three) = results
    assert timeless(one) == timeless(two) != timeless(three)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_every_pass_visits_all_problems_once_and_no_step_holds_one_twice(size):
    order = ProblemOrder(7, seed=1)
    steps = [order.draw(size) for _ in range(140)]
    assert all(len(set(step)) == size for step in steps)
    visits = list(itertools.chain(*steps))[:140]
    passes = [visits[first : first + 7] for first in range(0, 140, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len({tuple(one) for one in passes}) > 15


def test_a_first_pass_is_a_plain_shuffle_of_the_seed():
    """So that a run of less than a pass does not depend on how passes are joined."""
    for seed in (1, 2):
        order = ProblemOrder(9, seed=seed)
        assert order.draw(4) + order.draw(4) == random.Random(seed).sample(range(9), 9)[:8]


def test_a_step_may_draw_its_problems_in_parts():
    """Its parts are what one draw would have given, so that a resumed run needs only their sum."""
    rng = random.Random(0)
    in_parts, at_once = ProblemOrder(7, seed=1), ProblemOrder(7, seed=1)
    for _ in range(200):
        used: list[int] = []
        for _ in range(rng.randint(1, 4)):
            used += in_parts.draw(rng.randint(1, 4), used)
        assert len(set(used)) == len(used) and at_once.draw(len(used)) == used


# Dynamic sampling

FIRST_FOUR = ("q0",)  # how the prompts of the first four of ten problems start
RESAMPLING = GRPOConfig(**{**SMALL, "max_steps": 1}, max_resamples=6, shuffle_dataset=False, learning_rate=1e-2)


def sampled_steps(tokenizer, monkeypatch, config, tied):
    """Train where prompts that start with `tied` tie; returns the metrics of the steps, their batches and rollouts."""

    def reward(completions, prompts, **kwargs):
        scored = zip(prompts, late_letters(completions), strict=True)
        return [1.0 if prompt.startswith(tied) else value for prompt, value in scored]

    rollouts, batches = [], []
    monkeypatch.setattr(Sampler, "generate", lambda *args: rollouts.append(generate_once(*args)) or rollouts[-1])
    model = make_model()
    state = trainer.start_training(model, tokenizer, PROBLEMS, config)
    history = []
    for metrics in train(model, tokenizer, PROBLEMS, reward, config, state=state):
        history.append(metrics)
        batches.append(state.batch)
    return history, batches, rollouts


generate_once = Sampler.generate


def test_tied_groups_are_replaced_by_those_of_further_problems(tokenizer, monkeypatch):
    (metrics,), (batch,), rollouts = sampled_steps(tokenizer, monkeypatch, RESAMPLING, FIRST_FOUR)
    assert batch.rollout.prompts[::4] == [problem.prompt for problem in PROBLEMS[4:8]]
    second, width = rollouts[1], rollouts[1].completion_ids.shape[1]
    assert len(rollouts) == 2 and batch.rollout.completions == second.completions
    for name in ("completion_ids", "completion_mask", "sampling_per_token_logps"):
        assert torch.equal(getattr(batch.rollout, name)[:, :width], getattr(second, name)), name
    assert not batch.rollout.completion_mask[:, width:].any() and torch.equal(
        batch.rollout.is_truncated, second.is_truncated
    )
    assert_close(batch.rewards, torch.tensor(late_letters(second.completions)))
    assert metrics["grad_norm"] > 0
    # what is counted is what was sampled, the tied groups too
    assert metrics["resampling/num_groups"] == 8 and metrics["resampling/frac_reward_zero_std"] == 0
    assert metrics["frac_reward_zero_std"] == 0.5
    texts = [text for rollout in rollouts for text in rollout.completions]
    assert metrics["reward"] == pytest.approx((16 + sum(late_letters(texts[16:]))) / 32)
    lengths = [rollout.completion_mask.sum().item() for rollout in rollouts]
    assert metrics["completions/mean_length"] == pytest.approx(sum(lengths) / 32)
    assert metrics["num_tokens"] == sum(lengths) + sum(rollout.prompt_mask.sum().item() for rollout in rollouts)
    entropy = -sum(rollout.sampling_per_token_logps.sum().item() for rollout in rollouts) / sum(lengths)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_batch_that_was_resampled_is_learned_from_like_any_other(tokenizer, monkeypatch, beta):
    """The same weights as from a batch that was sampled for these problems at once."""
    config = dataclasses.replace(RESAMPLING, beta=beta, scale_rewards="batch", loss_type="dapo")
    _, (batch,), (_, second) = sampled_steps(tokenizer, monkeypatch, config, FIRST_FOUR)
    same = trainer.score_rollout(second, PROBLEMS[4:8], [late_letters], config)
    assert_close(batch.advantages, same.advantages)
    one, other = make_model(), make_model()
    for model, given in ((one, batch), (other, same)):
        reference = copy.deepcopy(model) if beta else None
        update_policy(model, given, sgd(model), config, reference=reference)
    assert_same_weights(one, other)


def test_groups_that_still_tie_at_the_limit_fill_the_batch(tokenizer, monkeypatch):
    config = dataclasses.replace(RESAMPLING, max_resamples=1, num_generations=4)
    (metrics,), (batch,), _ = sampled_steps(tokenizer, monkeypatch, config, ("q0", "q1"))
    # sampled: four tied groups, then three tied ones and one with a signal, which comes first
    assert batch.rollout.prompts[::4] == [PROBLEMS[index].prompt for index in (7, 0, 1, 2)]
    assert metrics["resampling/num_groups"] == 8 and metrics["resampling/frac_reward_zero_std"] == 0.75
    assert metrics["frac_reward_zero_std"] == 7 / 8 and metrics["grad_norm"] > 0


def test_resampling_ends_when_every_problem_was_tried(tokenizer, monkeypatch):
    config = dataclasses.replace(RESAMPLING, max_resamples=100, max_steps=2)
    history, batches, rollouts = sampled_steps(tokenizer, monkeypatch, config, "q")
    assert [len(rollout.prompts) // 4 for rollout in rollouts] == [4, 4, 2] * 2
    for metrics, batch in zip(history, batches, strict=True):
        assert metrics["resampling/num_groups"] == 10 and metrics["resampling/frac_reward_zero_std"] == 1
        assert metrics["grad_norm"] == 0 and len(batch.rewards) == 16


def test_without_ties_resampling_changes_nothing(tokenizer):
    off = GRPOConfig(**SMALL, learning_rate=1e-2)
    (one, plain), (other, history) = run(tokenizer, off), run(tokenizer, dataclasses.replace(off, max_resamples=3))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    added = {"resampling/num_groups": 4, "resampling/frac_reward_zero_std": 0.0}
    assert [metrics | added for metrics in timeless(plain)] == timeless(history)


# The stages


def test_rewards_see_every_column_without_padding_and_groups_adjacent(tokenizer):
    seen = {}

    def look(prompts, completions, completion_ids, answer, level, solution, **kwargs):
        seen.update(prompts=prompts, ids=completion_ids, texts=completions, rest=kwargs)
        assert len({len(column) for column in (prompts, completions, completion_ids, answer, level, solution)}) == 1
        assert set(zip(answer, level, solution, strict=True)) == {("a", "toy", "a #### a")}
        return late_letters(completions)

    config = GRPOConfig(**SMALL)
    batch = make_batch(make_model(), tokenizer, config, look)
    assert seen["prompts"] == [problem.prompt for problem in PROBLEMS[:4] for _ in range(4)]
    assert [len(ids) for ids in seen["ids"]] == batch.rollout.completion_mask.sum(dim=1).tolist()
    assert all(tokenizer.eos_token_id not in ids[:-1] for ids in seen["ids"])
    assert tokenizer.batch_decode(seen["ids"], skip_special_tokens=True) == seen["texts"]
    assert batch.rewards.tolist() == pytest.approx(late_letters(seen["texts"]))


def test_a_list_of_dictionaries_trains_as_problems_do(tokenizer):
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in PROBLEMS]
    made = [Problem(problem.prompt, problem.answer) for problem in PROBLEMS]
    config = GRPOConfig(**SMALL)
    assert_same_weights(run(tokenizer, config, problems=rows)[0], run(tokenizer, config, problems=made)[0], 0.0)


def test_reward_weights_weigh(tokenizer):
    config = GRPOConfig(**SMALL, reward_weights=[2.0, -0.5])
    _, (row, _) = run(tokenizer, config, [late_letters, all_tie])
    assert row["reward"] == pytest.approx(2 * row["rewards/late_letters/mean"] - 0.5 * 1.69, abs=1e-6)
    assert row["rewards/all_tie/mean"] == pytest.approx(1.69)


def test_truncated_completions_count_in_the_rewards_but_not_in_the_loss(tokenizer):
    keep, drop = (GRPOConfig(**SMALL, mask_truncated_completions=masked) for masked in (False, True))
    batch, masked = (make_batch(make_model(), tokenizer, config) for config in (keep, drop))
    truncated = batch.rollout.is_truncated
    assert 0 < truncated.sum() < len(truncated)
    assert torch.equal(batch.advantages, masked.advantages)
    assert torch.equal(batch.loss_mask, batch.rollout.completion_mask)
    assert masked.loss_mask[truncated].sum() == 0
    assert torch.equal(masked.loss_mask[~truncated], batch.loss_mask[~truncated])


@every_loss
def test_where_all_completions_are_truncated_and_masked_nothing_moves(tokenizer, loss_type):
    config = GRPOConfig(**SMALL, loss_type=loss_type, **CAP.get(loss_type, {}))
    model = make_model()
    batch = make_batch(model, tokenizer, config)
    batch.loss_mask.zero_()
    before = copy.deepcopy(model)
    metrics = update_policy(model, batch, sgd(model), config)
    assert set(metrics.values()) == {0.0}
    assert_same_weights(model, before, tolerance=0.0)


@every_loss
def test_the_first_update_is_on_policy(tokenizer, loss_type):
    config = GRPOConfig(**SMALL, loss_type=loss_type, **CAP.get(loss_type, {}))
    model = make_model()
    batch = make_batch(model, tokenizer, config)
    metrics = update_policy(model, batch, sgd(model), config)
    assert all(value == 0.0 for key, value in metrics.items() if "clip_ratio" in key)
    assert any("clip_ratio" in key for key in metrics) == bool(LOSSES[loss_type].clips)
    logps, loss = batch.rollout.sampling_per_token_logps, LOSSES[loss_type]
    per_token = loss.token(logps, torch.ones_like(logps), batch.advantages[:, None], 0.2, 5.0)
    weight = token_weights(batch.loss_mask, loss_type=loss_type, max_completion_length=config.max_completion_length)
    assert metrics["loss"] == pytest.approx((per_token * weight).sum().item(), abs=1e-6)
    if loss.token is clipped_loss:  # ratio 1: a token's loss is -A
        assert metrics["loss"] == pytest.approx(-(batch.advantages[:, None] * weight).sum().item(), abs=1e-6)
    if loss_type == "grpo":
        assert metrics["loss"] == pytest.approx(0.0, abs=1e-6)


def test_the_kl_starts_at_0_grows_and_is_measured_from_an_unchanged_reference(tokenizer):
    model = make_model(attention_dropout=0.5).train()
    start, references = copy.deepcopy(model), []

    config = GRPOConfig(**{**SMALL, "max_steps": 4}, learning_rate=0.02, beta=0.01)
    state = trainer.start_training(model, tokenizer, PROBLEMS, config)
    history = []
    for metrics in train(model, tokenizer, PROBLEMS, late_letters, config, state=state):
        history.append(metrics)
        references.append(weights(state.reference))
        assert all(parameter.grad is None for parameter in state.reference.parameters())
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-12)  # also with dropout: it is off
    assert history[-1]["kl"] > 0.005
    assert len(references) == 4
    for reference in references:
        assert_close(reference, weights(start), atol=0.0, rtol=0.0)


def decay(model):
    return 0.5 * 0.3 * sum(parameter.square().sum() for parameter in model.parameters())


def test_a_penalty_adds_its_gradient_and_its_value(tokenizer):
    config = GRPOConfig(**SMALL, max_grad_norm=1e9)
    plain, pulled = make_model(), make_model()
    batch = make_batch(plain, tokenizer, config)
    start = weights(plain)
    update_policy(plain, batch, sgd(plain, lr=0.1), config)
    metrics = update_policy(pulled, batch, sgd(pulled, lr=0.1), config, penalty=decay)
    expected = {name: weight - 0.1 * 0.3 * start[name] for name, weight in weights(plain).items()}
    assert_close(weights(pulled), expected, atol=1e-10, rtol=0.0)
    assert metrics["penalty"] == pytest.approx(0.15 * sum(weight.square().sum().item() for weight in start.values()))


def test_a_penalty_acts_through_train_also_where_all_groups_tie(tokenizer):
    model, history = run(tokenizer, GRPOConfig(**SMALL, learning_rate=0.01), all_tie, penalty=decay)
    assert history[1]["penalty"] < history[0]["penalty"]
    for name, weight in weights(make_model()).items():
        moved = weights(model)[name][weight.abs() > 0.05].abs() < weight[weight.abs() > 0.05].abs()
        assert moved.all(), name


# Metrics


def test_cispo_reports_its_own_clip_share_and_no_kl_without_beta(tokenizer):
    _, history = run(tokenizer, GRPOConfig(**SMALL, loss_type="cispo", epsilon_high=5.0))
    assert {key for key in history[0] if "clip" in key} == {"cispo_clip_ratio", "completions/clipped_ratio"}
    assert "kl" not in history[0] and "penalty" not in history[0]


def test_tokens_and_entropy_are_counted_over_what_was_sampled(tokenizer):
    rollouts = []

    def keep(rollout, *arguments):
        rollouts.append(rollout)
        return trainer.score_rollout(rollout, *arguments)

    _, history = run(tokenizer, GRPOConfig(**SMALL), stages=trainer.Stages(score=keep))
    tokens = [int(r.prompt_mask.sum() + r.completion_mask.sum()) for r in rollouts]
    assert [row["num_tokens"] for row in history] == [tokens[0], sum(tokens)]
    surprise = [-r.sampling_per_token_logps[r.completion_mask == 1].mean().item() for r in rollouts]
    assert [row["entropy"] for row in history] == pytest.approx(surprise, abs=1e-6)
    assert 1.0 < history[0]["entropy"] < math.log(15) + 0.5


# What goes wrong


def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_the_weights(tokenizer):
    start = weights(make_model())
    after_one = {}

    def distance(model):  # the square root's slope at 0 is infinite, and 0 times infinity is NaN
        return torch.sqrt(sum((p - start[name]).square().sum() for name, p in model.named_parameters()))

    def breaks_later(model):
        if not after_one:
            return 0 * sum(parameter.sum() for parameter in model.parameters())
        return distance(model) * torch.nan

    model = make_model()
    with pytest.raises(FloatingPointError, match="gradient norm is nan.*weights were kept.*learning_rate"):
        run(tokenizer, GRPOConfig(**SMALL), model=model, penalty=distance)
    assert_close(weights(model), start, atol=0.0, rtol=0.0)
    steps = train(model, tokenizer, PROBLEMS, share_of_a, GRPOConfig(**SMALL), penalty=breaks_later)
    next(steps)
    after_one = weights(model)
    with pytest.raises(FloatingPointError):
        next(steps)
    assert_close(weights(model), after_one, atol=0.0, rtol=0.0)


def test_too_few_problems_are_refused_with_both_numbers(tokenizer):
    with pytest.raises(ValueError, match="problems .*prompts_per_step = 4.*got 3"):
        run(tokenizer, GRPOConfig(**SMALL), problems=PROBLEMS[:3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "model must be a loaded model.*'tiny'.*load_policy"),
        ({"problems": ["1 + 1?"] * 4}, r"problems\[0\] must be.*Problem.* got '1 \+ 1\?'"),
        ({"config": {"max_steps": 1}}, "config must be a GRPOConfig"),
        ({"reward_funcs": "accuracy"}, "reward_funcs must be one or more functions"),
    ],
)
def test_arguments_of_another_type_are_named(tokenizer, changes, message):
    given = {"model": make_model(), "problems": PROBLEMS, "config": GRPOConfig(**SMALL)}
    given |= {"tokenizer": tokenizer, "reward_funcs": accuracy_reward} | changes
    with pytest.raises(ValueError, match=message):
        next(train(**given))


def test_five_calls_lead_from_train_to_the_loss_of_a_token(tokenizer, monkeypatch):
    """Somebody who steps through a run in a debugger meets these functions, and no callback between them."""
    calls = []

    def spy(*arguments, **options):
        calls.append([frame.name for frame in traceback.extract_stack()])
        return per_token_loss(*arguments, **options)

    monkeypatch.setattr(losses, "per_token_loss", spy)
    run(tokenizer, GRPOConfig(**{**SMALL, "max_steps": 1}))
    (names,) = calls
    calls = "train update_policy optimizer_step micro_batch_loss grpo_loss spy"
    assert names[names.index("train") :] == calls.split()


def test_a_stage_that_returns_too_few_advantages_is_told_so(tokenizer):
    by_group = trainer.Stages(advantages=lambda rewards, config: rewards.view(-1, config.num_generations).mean(dim=1))
    with pytest.raises(ValueError, match=r"^advantages must have one row for each of the \d+ completions"):
        run(tokenizer, GRPOConfig(**SMALL), stages=by_group)
