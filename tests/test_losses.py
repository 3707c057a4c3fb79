"""Losses by hand-worked numbers, by their properties and by finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from grpo_edu.config import LOSS_TYPES
from grpo_edu.losses import (
    LOSSES,
    capped_loss,
    clip_fractions,
    clipped_loss,
    grpo_loss,
    importance_ratio,
    loss_without_ratio,
    per_token_kl,
    per_token_policy_loss,
    reduce_loss,
    token_weights,
    weight_by_batch_tokens,
    weight_by_completion,
    weight_by_limit,
    weight_by_rows,
    weight_by_rows_given,
    weighted_sum,
)

LEVELS = ("token", "sequence")
every_loss = pytest.mark.parametrize("loss_type", LOSS_TYPES)
every_level = pytest.mark.parametrize("level", LEVELS)


def random_batch(seed=0, rows=4, columns=5, dtype=torch.float64):
    """logps, old, ref, advantages and mask with rows of several lengths, one of them empty."""
    generator = torch.Generator().manual_seed(seed)
    logps, old, ref = (-2 * torch.rand(rows, columns, generator=generator, dtype=dtype) for _ in range(3))
    advantages = torch.randn(rows, generator=generator, dtype=dtype)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    lengths[-1] = 0
    return logps, old, ref, advantages, (torch.arange(columns) < lengths[:, None]).long()


def divides_by_update(loss_type):
    """Whether a loss divides by the tokens of the whole update, where it is told their number."""
    mask, options = torch.ones(2, 2), {"loss_type": loss_type, "max_completion_length": 8}
    return not token_weights(mask, **options).equal(token_weights(mask, num_items=99, **options))


def divides_by_rows(loss_type):
    """Whether a row without tokens makes the weight of the others smaller."""
    options = {"loss_type": loss_type, "max_completion_length": 8}
    one, two = torch.ones(1, 2), torch.tensor([[1, 1], [0, 0]])
    return not token_weights(one, **options)[0].equal(token_weights(two, **options)[0])


def full_loss(logps, old, ref, advantages, mask, **options):
    options = {"epsilon_high": 0.3, "beta": 0.1, "max_completion_length": 8, **options}
    return grpo_loss(logps, old, advantages, mask, ref_per_token_logps=ref, **options)


def gradient(loss, logps):
    return torch.autograd.grad(loss, logps)[0]


# Two completions, of 2 tokens and of 1; ratios 2, 0.5 and 1.5; advantages 1 and -1; epsilon 0.2.
# Row 1: min(2, 1.2) = 1.2 and min(0.5, 0.8) = 0.5. Row 2: min(-1.5, -1.2) = -1.5. Losses: -1.2, -0.5, 1.5.
OLD = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
LOGPS = OLD + torch.tensor([[2.0, 0.5], [1.5, 7.0]]).log()
ADVANTAGES = torch.tensor([1.0, -1.0])
MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "grpo"}, (-0.85 + 1.5) / 2),
        ({"loss_type": "bnpo"}, -0.2 / 3),
        ({"loss_type": "dapo"}, -0.2 / 3),
        ({"loss_type": "bnpo", "num_items": 10}, -0.2 / 3),  # its own tokens only
        ({"loss_type": "dapo", "num_items": 10}, -0.02),
        ({"loss_type": "dapo", "num_items": torch.tensor(10)}, -0.02),
        ({"loss_type": "dr_grpo", "max_completion_length": 5}, -0.02),
        ({"loss_type": "bnpo", "epsilon_high": 0.6}, (-1.6 - 0.5 + 1.5) / 3),
        # cispo: -min(ratio, 1.6) * advantage * logp, logps being -0.30685, -2.69315 and -2.59453
        ({"loss_type": "cispo", "epsilon_high": 1.6}, (1.6 * 0.306853 + 0.5 * 2.693147 - 1.5 * 2.594535) / 3),
        ({"loss_type": "reinforce"}, (0.306853 + 2.693147 - 2.594535) / 2),
        # advantages per token: 1, -1 and -1; the second token's loss is 0.8
        ({"loss_type": "bnpo", "advantages": torch.tensor([[1.0, -1.0], [-1.0, 9.0]])}, (-1.2 + 0.8 + 1.5) / 3),
        # sequence: sqrt(2 * 0.5) = 1 and 1.5; losses -1 and 1.5
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, 0.25),
        ({"loss_type": "bnpo", "importance_sampling_level": "sequence"}, (-1.0 - 1.0 + 1.5) / 3),
        ({"loss_type": "bnpo", "importance_weights": torch.tensor([[0.5, 1.0], [2.0, 9.0]])}, (-0.6 - 0.5 + 3) / 3),
    ],
)
def test_hand_worked_losses(options, expected):
    options = {"advantages": ADVANTAGES, **options}
    loss = grpo_loss(LOGPS, OLD, completion_mask=MASK, **options)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


@every_level
@every_loss
def test_advantages_per_token_may_be_those_of_the_row(loss_type, level):
    logps, old, ref, advantages, mask = random_batch()
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    per_token = advantages[:, None].expand_as(logps).masked_fill(mask == 0, math.nan)
    expected = full_loss(logps, old, ref, advantages, mask, **options)
    assert_close(full_loss(logps, old, ref, per_token, mask, **options), expected)
    shares = clip_fractions(logps, old, advantages, mask, loss_type=loss_type)
    assert_close(clip_fractions(logps, old, per_token, mask, loss_type=loss_type), shares)


def test_hand_worked_kl_penalty():
    """Reference twice and half as likely as the policy: k3 = 2 - log 2 - 1 and 0.5 + log 2 - 1."""
    ref = OLD + torch.tensor([[2.0, 0.5], [1.0, 1.0]]).log()
    low, high = 1 - math.log(2), math.log(2) - 0.5
    assert_close(per_token_kl(OLD, ref), torch.tensor([[low, high], [0.0, 0.0]]))
    options = {"ref_per_token_logps": ref, "loss_type": "bnpo", "beta": 0.3}
    loss = grpo_loss(OLD, OLD, torch.zeros(2), MASK, **options)
    assert float(loss) == pytest.approx(0.3 * (low + high) / 3)
    # with bias correction, and only with it, each token's k3 is multiplied by its ratio: 2 and 0.5
    options["ref_per_token_logps"] = LOGPS + torch.tensor([[2.0, 0.5], [1.0, 1.0]]).log()
    assert float(grpo_loss(LOGPS, OLD, torch.zeros(2), MASK, **options)) == pytest.approx(0.3 * (low + high) / 3)
    options["use_bias_correction_kl"] = True
    loss = grpo_loss(LOGPS, OLD, torch.zeros(2), MASK, **options)
    assert float(loss) == pytest.approx(0.3 * (2 * low + 0.5 * high) / 3)


def test_without_beta_the_reference_has_no_say():
    nothing_known = torch.full((2, 2), -math.inf)
    expected = grpo_loss(LOGPS, OLD, ADVANTAGES, MASK)
    assert_close(grpo_loss(LOGPS, OLD, ADVANTAGES, MASK, ref_per_token_logps=nothing_known), expected)


def test_kl_estimator_is_unbiased_under_the_policy_and_not_under_the_other_sign():
    """Three symbols: KL(p ‖ q) = 0.5 log(0.5/0.2) + 0.3 log(0.3/0.2) + 0.2 log(0.2/0.6) = 0.3601."""
    policy, reference = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    expected = 0.5 * math.log(2.5) + 0.3 * math.log(1.5) - 0.2 * math.log(3)
    assert float((policy * per_token_kl(policy.log(), reference.log())).sum()) == pytest.approx(expected)
    assert float((policy * per_token_kl(reference.log(), policy.log())).sum()) != pytest.approx(expected, rel=0.1)


def test_bias_correction_makes_the_gradient_that_of_the_reverse_kl():
    """On-policy, in expectation: with the ratio ∇KL(policy ‖ reference), without it ∇KL(reference ‖ policy)."""
    logits = torch.tensor([0.4, -0.3, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    logps = logits.log_softmax(0)
    weights = logps.detach().exp()[:, None]  # every symbol as one completion, weighted by its probability
    reverse = (logps.exp() * (logps - reference)).sum()
    forward = (reference.exp() * (reference - logps)).sum()
    batch = torch.zeros(1, dtype=torch.float64), torch.ones(1, 1)  # advantages and mask
    for corrected, divergence in ((True, reverse), (False, forward)):
        terms = []
        for i in range(4):
            options = {"ref_per_token_logps": reference[i].view(1, 1), "use_bias_correction_kl": corrected}
            terms.append(weights[i] * grpo_loss(logps[i].view(1, 1), None, *batch, beta=1.0, **options))
        result = torch.autograd.grad(torch.cat(terms).sum(), logits, retain_graph=True)[0]
        assert_close(result, torch.autograd.grad(divergence, logits, retain_graph=True)[0])


def test_the_reduction_by_itself():
    """Rows 1 2 | 5: (1.5 + 5) / 2 by rows, which is the default; one value of a row is that of each of its tokens."""
    loss = torch.tensor([[1.0, 2.0], [5.0, 9.0]])
    assert float(reduce_loss(loss, MASK)) == pytest.approx(3.25)
    by_row = torch.tensor([[2.0], [5.0]])
    assert float(reduce_loss(by_row, MASK, loss_type="bnpo")) == pytest.approx((2 + 2 + 5) / 3)


@every_loss
def test_at_ratio_one_the_gradient_is_the_policy_gradient(loss_type):
    """−A ∇log π, times the weight of the token; on-policy, cispo's cap is out of reach at 5.

    The three formulas of the papers have this gradient at ratio 1. Of another formula it is what autograd says.
    """
    logps, _, _, advantages, mask = random_batch()
    logps.requires_grad_()
    weight = token_weights(mask, loss_type=loss_type, max_completion_length=8)
    expected = -advantages[:, None].expand_as(logps)
    formula = LOSSES[loss_type].token
    if formula not in (clipped_loss, capped_loss, loss_without_ratio):
        ratio = (logps - logps.detach()).exp()
        expected = gradient(formula(logps, ratio, advantages[:, None], 0.2, 5.0).sum(), logps)
    for old in (None, logps.detach()):
        loss = grpo_loss(logps, old, advantages, mask, loss_type=loss_type, max_completion_length=8, epsilon_high=5.0)
        assert_close(gradient(loss, logps), expected * weight)


def test_at_ratio_one_the_sequence_gradient_is_shared_by_a_completions_tokens():
    logps, _, _, advantages, mask = random_batch()
    logps.requires_grad_()
    loss = grpo_loss(logps, None, advantages, mask, importance_sampling_level="sequence")
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    assert_close(gradient(loss, logps), -advantages[:, None] * mask / lengths / len(mask))


@every_level
@every_loss
def test_gradients_by_finite_differences(loss_type, level):
    logps, old, ref, advantages, mask = random_batch(seed=3)
    held = logps.clone()  # gradcheck moves logps in place
    logps.requires_grad_()
    options = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.3}
    for corrected in (False, True):
        options["use_bias_correction_kl"] = corrected

        def function(values):
            if LOSSES[loss_type].clips != "weight":
                return full_loss(values, old, ref, advantages, mask, **options)
            # it detaches its weight, so hold the weight still while logps move
            ratio = importance_ratio(held, old, mask, importance_sampling_level=level)
            policy = per_token_policy_loss(values, ratio, advantages, epsilon_high=0.3, loss_type=loss_type)
            moving = importance_ratio(values, old, mask, importance_sampling_level=level)
            kl = per_token_kl(values, ref) * (moving if options["use_bias_correction_kl"] else 1)
            return reduce_loss(policy + 0.3 * kl, mask, loss_type=loss_type)

        assert torch.autograd.gradcheck(function, logps)
        expected = gradient(function(logps), logps)
        assert_close(gradient(full_loss(logps, old, ref, advantages, mask, **options), logps), expected)


@every_level
@every_loss
def test_content_of_padding_is_irrelevant(loss_type, level):
    tensors = random_batch()
    mask, options = tensors[4], {"loss_type": loss_type, "importance_sampling_level": level}

    def value_and_gradient(fill):
        logps, old, ref = (t.masked_fill(mask == 0, fill) for t in tensors[:3])
        logps.requires_grad_()
        weights = torch.ones_like(logps).masked_fill(mask == 0, fill)
        loss = full_loss(logps, old, ref, tensors[3], mask, importance_weights=weights, **options)
        return loss, gradient(loss, logps)

    expected = value_and_gradient(-1.0)
    assert expected[1][mask == 0].eq(0).all()
    for fill in (0.0, 50.0, 1e30, float("inf"), float("-inf"), float("nan")):
        loss, grads = value_and_gradient(fill)
        assert torch.equal(loss, expected[0]), fill
        assert torch.equal(grads, expected[1]), fill


@every_level
@every_loss
@given(seed=st.integers(0, 50), random=st.randoms(use_true_random=False))
def test_rows_in_another_order_give_the_same_loss(loss_type, level, seed, random):
    tensors = random_batch(seed)
    order = list(range(len(tensors[0])))
    random.shuffle(order)
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    shuffled = [tensor[order] for tensor in tensors]
    assert_close(full_loss(*shuffled, **options), full_loss(*tensors, **options))


@every_loss
def test_more_padding_gives_the_same_loss(loss_type):
    """Dr. GRPO divides by the generation's limit, so not even it sees the width of the batch."""
    tensors = random_batch()
    wider = [torch.nn.functional.pad(t, (0, 3)) if t.ndim == 2 else t for t in tensors]
    assert_close(full_loss(*wider, loss_type=loss_type), full_loss(*tensors, loss_type=loss_type))


@pytest.mark.parametrize(
    "loss_type", [name for name, loss in LOSSES.items() if loss.weight is not weight_by_rows_given]
)
def test_micro_batches_add_up_to_the_whole_batch(loss_type):
    """Not so with bnpo, which divides by each micro-batch's own tokens."""
    tensors = random_batch(rows=6)
    options = {"loss_type": loss_type}
    halves = [[tensor[part] for tensor in tensors] for part in (slice(0, 3), slice(3, 6))]
    if divides_by_update(loss_type):
        parts = [full_loss(*half, num_items=tensors[4].sum(), **options) for half in halves]
    else:
        parts = [full_loss(*half, **options) / 2 for half in halves]
    assert_close(sum(parts), full_loss(*tensors, **options))


@every_level
@every_loss
def test_a_truncated_completion_is_left_out_by_zeroing_its_mask(loss_type, level):
    """It stops contributing, yet stays among the B rows of those that divide by them, as in TRL."""
    logps, old, ref, advantages, mask = random_batch()
    keep = mask.sum(1) > 0
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    with_row = full_loss(logps, old, ref, advantages, mask, **options)
    without = full_loss(logps[keep], old[keep], ref[keep], advantages[keep], mask[keep], **options)
    share = float(keep.double().mean()) if divides_by_rows(loss_type) else 1.0
    assert_close(with_row, without * share)


@every_loss
def test_a_batch_without_tokens_has_loss_zero_and_a_gradient(loss_type):
    logps, old, ref, advantages, mask = random_batch()
    logps.requires_grad_()
    loss = full_loss(logps, old, ref, advantages, mask * 0, loss_type=loss_type)
    assert loss == 0
    assert gradient(loss, logps).eq(0).all()


@every_loss
def test_the_mask_may_be_of_any_type(loss_type):
    tensors = random_batch()
    expected = full_loss(*tensors, loss_type=loss_type)
    for dtype in (torch.bool, torch.int32, torch.float32):
        assert_close(full_loss(*tensors[:4], tensors[4].to(dtype), loss_type=loss_type), expected)


def test_the_gradient_stops_where_clipping_took_hold():
    logps = LOGPS.clone().requires_grad_()
    grads = gradient(grpo_loss(logps, OLD, ADVANTAGES, MASK, loss_type="bnpo"), logps)
    assert grads[0, 0] == 0  # ratio 2, advantage 1: high enough
    assert grads[0, 1] == pytest.approx(-0.5 / 3)  # ratio 0.5, advantage 1: may rise
    assert grads[1, 0] == pytest.approx(1.5 / 3)  # ratio 1.5, advantage -1: must fall
    cispo = gradient(grpo_loss(logps, OLD, ADVANTAGES, MASK, loss_type="cispo", epsilon_high=1.6), logps)
    assert cispo[0, 0] == pytest.approx(-1.6 / 3)  # the weight is capped, the gradient stays


def test_hand_worked_clip_fractions():
    """Ratios 2, 0.5 and 1.5 with advantages 1 1 -1: one of three is clipped, above."""

    def shares(advantages, **options):
        found = clip_fractions(LOGPS, OLD, advantages, MASK, **options)
        return {key.removeprefix("clip_ratio/"): float(value) for key, value in found.items()}

    assert shares(ADVANTAGES) == pytest.approx({"low_mean": 0, "high_mean": 1 / 3, "region_mean": 1 / 3})
    # now 0.5 is clipped below and 1.5 above; ratios of the rows: 1 and 1.5
    assert shares(-ADVANTAGES) == pytest.approx({"low_mean": 1 / 3, "high_mean": 1 / 3, "region_mean": 2 / 3})
    by_row = shares(-ADVANTAGES, importance_sampling_level="sequence")
    assert by_row == pytest.approx({"low_mean": 0, "high_mean": 0.5, "region_mean": 0.5})
    capped = shares(ADVANTAGES, loss_type="cispo", epsilon_high=1.6)
    assert capped == pytest.approx({"cispo_clip_ratio": 1 / 3})


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_neither_a_ratio_on_the_bound_nor_an_advantage_of_zero_is_clipped(loss_type):
    bound = {"epsilon": 0.0, "epsilon_high": 1.0 if loss_type == "cispo" else 0.0}  # both say 1
    for advantages in (ADVANTAGES, -ADVANTAGES):
        assert not any(clip_fractions(OLD, OLD, advantages, MASK, loss_type=loss_type, **bound).values())
    assert not any(clip_fractions(LOGPS, OLD, torch.zeros(2), MASK, loss_type=loss_type).values())
    one = clip_fractions(LOGPS[:1, :1], OLD[:1, :1], ADVANTAGES[:1], MASK[:1, :1], loss_type=loss_type)
    assert max(one.values()) == 1.0  # of a single token, all


@given(st.integers(0, 200))
def test_clipped_tokens_are_those_without_a_gradient(seed):
    logps, old, _, advantages, mask = random_batch(seed)
    logps.requires_grad_()
    loss = grpo_loss(logps, old, advantages, mask, loss_type="bnpo", epsilon_high=0.3)
    still = (gradient(loss, logps) == 0) & (mask == 1)
    share = clip_fractions(logps, old, advantages, mask, epsilon_high=0.3)["clip_ratio/region_mean"]
    assert float(share) == pytest.approx(float(still.sum() / mask.sum()))


@given(st.lists(st.floats(-5, 0), min_size=3, max_size=3), st.lists(st.floats(-5, 0), min_size=3, max_size=3))
def test_kl_is_never_negative_and_zero_where_the_policies_agree(first, second):
    logps, ref = torch.tensor([first], dtype=torch.float64), torch.tensor([second], dtype=torch.float64)
    assert per_token_kl(logps, ref).ge(-1e-12).all()
    assert per_token_kl(logps, logps).eq(0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_token_logps": torch.zeros(4)}, r"per_token_logps .*\(B, C\)"),
        ({"old_per_token_logps": torch.zeros(2, 3)}, r"old_per_token_logps .*\(2, 2\).*got \(2, 3\)"),
        ({"completion_mask": torch.ones(2, 1)}, r"completion_mask .*\(2, 2\)"),
        ({"advantages": torch.zeros(3)}, r"advantages .*\(2,\).*got \(3,\)"),
        ({"advantages": torch.zeros(2, 1)}, r"advantages .*\(2,\).* \(2, 2\), got \(2, 1\)"),
        ({"ref_per_token_logps": torch.zeros(1, 2), "beta": 0.1}, "ref_per_token_logps must"),
        ({"importance_weights": torch.zeros(2)}, "importance_weights must"),
        ({"beta": 0.1}, "ref_per_token_logps .*None.*beta is 0.1"),
        ({"loss_type": "ppo"}, "loss_type must be one of grpo, bnpo, dr_grpo, .*; got 'ppo'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        ({"loss_type": "dr_grpo"}, "max_completion_length must be at least 1 .*got None"),
        ({"completion_mask": torch.tensor([[1.0, 0.5], [1.0, 0.0]])}, "completion_mask .*only 0 and 1, got 0.5"),
        ({"completion_mask": torch.tensor([[1, 2], [1, 0]])}, "completion_mask .*only 0 and 1, got 2"),
        ({"completion_mask": torch.tensor([[1, -1], [1, 0]])}, "completion_mask .*only 0 and 1, got -1"),
    ],
)
def test_bad_input_is_refused_with_a_word(changes, message):
    usual = {"per_token_logps": LOGPS, "old_per_token_logps": OLD, "advantages": ADVANTAGES, "completion_mask": MASK}
    with pytest.raises(ValueError, match=message):
        grpo_loss(**usual | changes)


@every_loss
def test_half_precision_is_computed_in_float32(loss_type):
    """A difference of 0.03 has a k3 of 0.00046, which float16 rounds to 0, because it subtracts numbers near 1."""
    logps, old, ref, advantages, mask = (value.half() for value in random_batch())
    ref = logps + 0.03
    options = {"loss_type": loss_type, "epsilon_high": 0.3}
    half = full_loss(logps, old, ref, advantages, mask, **options)
    full = full_loss(logps.float(), old.float(), ref.float(), advantages.float(), mask, **options)
    assert_close(half, full, atol=1e-6, rtol=1e-3)
    assert_close(per_token_kl(logps, ref), per_token_kl(logps.float(), ref.float()))


def test_bad_input_of_the_steps_is_refused_too():
    with pytest.raises(ValueError, match=r"ref_per_token_logps .*\(2, 2\).*got \(1, 2\)"):
        per_token_kl(LOGPS, torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"per_token_loss .*\(2, 2\) or \(2, 1\), got \(1, 2\)"):
        reduce_loss(torch.zeros(1, 2), MASK)
    with pytest.raises(ValueError, match="loss_type must be one of .*; got 'ppo'"):
        reduce_loss(torch.zeros(2, 2), MASK, loss_type="ppo")
    for function in (importance_ratio, lambda *batch: clip_fractions(*batch[:2], ADVANTAGES, batch[2])):
        with pytest.raises(ValueError, match=r"old_per_token_logps .*\(2, 2\).*got \(1, 2\)"):
            function(LOGPS, OLD[:1], MASK)
        with pytest.raises(ValueError, match=r"completion_mask .*\(2, 2\).*got \(2, 1\)"):
            function(LOGPS, OLD, MASK[:, :1])
    with pytest.raises(ValueError, match=r"ratio .*\(2, 2\) or \(2, 1\), got \(1, 2\)"):
        per_token_policy_loss(LOGPS, torch.ones(1, 2), ADVANTAGES)
    for function in (per_token_policy_loss, lambda *batch: clip_fractions(LOGPS, OLD, batch[2], MASK)):
        with pytest.raises(ValueError, match=r"advantages .*\(2,\).*got \(1,\)"):
            function(LOGPS, LOGPS, ADVANTAGES[:1])
    with pytest.raises(ValueError, match="loss_type must be one of .*; got 'ppo'"):
        clip_fractions(LOGPS, OLD, ADVANTAGES, MASK, loss_type="ppo")
    for mask in (torch.ones(2), torch.ones(2, 0)):
        with pytest.raises(ValueError, match=r"completion_mask .*\(B, C\)"):
            reduce_loss(torch.zeros(2, 2), mask)


def reduced_by_definition(loss, mask, loss_type, limit):
    """The reductions as the papers write them, without token weights."""
    sums, lengths = (loss * mask).sum(dim=1), mask.sum(dim=1)
    return {
        weight_by_completion: (sums / lengths.clamp(min=1)).mean(),
        weight_by_rows: sums.mean(),
        weight_by_limit: sums.sum() / (len(loss) * limit),
        weight_by_rows_given: sums.sum() / lengths.sum(),
        weight_by_batch_tokens: sums.sum() / lengths.sum(),
    }[LOSSES[loss_type].weight]


@every_loss
def test_token_weights_give_every_reduction_whole_and_in_parts(loss_type):
    draws = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(0, 7, (6, 1), generator=draws)
        lengths[0] = 3
        mask = (torch.arange(6) < lengths).long()
        loss = torch.randn(6, 6, generator=draws, dtype=torch.float64)
        weights = token_weights(mask, loss_type=loss_type, max_completion_length=9)
        expected = reduced_by_definition(loss, mask, loss_type, 9).item()
        whole = weighted_sum(loss, weights).item()
        parts = weighted_sum(loss[:2], weights[:2]) + weighted_sum(loss[2:], weights[2:])
        assert whole == pytest.approx(expected, abs=1e-14) and parts.item() == pytest.approx(expected, abs=1e-14)
        found = reduce_loss(loss, mask, loss_type=loss_type, max_completion_length=9).item()
        assert found == pytest.approx(whole, abs=1e-14)
