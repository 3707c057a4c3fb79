"""Completions in which a tool writes some of the tokens: the rollout, its masks, and the gradient."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close
from toy_policy import PROBLEMS, make_model, word_tokenizer

from grpo_edu import GRPOConfig, per_token_logps
from grpo_edu.batch import score_rollout
from grpo_edu.extras.tools import Tool
from grpo_edu.losses import grpo_loss
from grpo_edu.problems.equations import calculate
from grpo_edu.rollout import generate
from grpo_edu.studies.tool_use import CALCULATOR, encode_turns, tool_splits
from grpo_edu.trainer import Stages, start_training, train

PROMPTS = [problem.prompt for problem in PROBLEMS]
TOKENIZER = word_tokenizer()
CALL, REPLY = TOKENIZER.encode("a"), TOKENIZER.encode("b c")
TOOL = Tool("a", lambda text: "b c")


def roll(prompts=PROMPTS, *, tool=TOOL, length=12, **options):
    options = {"num_generations": 4, "generator": torch.Generator().manual_seed(3), **options}
    return generate(make_model(), TOKENIZER, prompts, max_completion_length=length, tool=tool, **options)


def test_every_call_is_followed_by_the_reply_and_nothing_else_is_the_tools():
    rollout, calls = roll(), 0
    for ids, tool_mask, mask in zip(
        rollout.completion_ids.tolist(), rollout.tool_mask.tolist(), rollout.completion_mask.tolist(), strict=True
    ):
        place, length = 0, sum(mask)
        while place < length:
            assert tool_mask[place] == 1
            if ids[place] == CALL[0]:
                calls += 1
                reply = ids[place + 1 : place + 3]
                assert reply == REPLY[: len(reply)] and tool_mask[place + 1 : place + 3] == [0] * len(reply)
                place += 2
            place += 1
    assert calls > 20
    assert_close(rollout.policy_mask, rollout.completion_mask * rollout.tool_mask)


def test_a_reply_that_does_not_fit_is_cut_and_the_completion_is_truncated():
    rollout = roll(tool=Tool("a", lambda text: "b " * 50))
    called = (rollout.tool_mask == 0).any(dim=1)
    assert called.any() and rollout.completion_ids.shape[1] == 12
    assert rollout.is_truncated[called].all()


def test_the_tool_reads_the_completion_up_to_its_marker():
    seen = []

    def reply(text):
        seen.append(text)
        return "b"

    rollout = roll(tool=Tool("a", reply))
    assert seen and all(text.split()[-1] == "a" for text in seen)
    written = [TOKENIZER.decode(ids) for ids in rollout.completion_ids]
    assert all(any(text.startswith(call) for text in written) for call in seen)


def test_log_probabilities_of_the_policys_tokens_are_those_of_a_plain_forward_pass():
    rollout, model = roll(), make_model()
    batch = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    logps = per_token_logps(model, *batch).detach()
    assert_close(rollout.sampling_per_token_logps.double(), logps * rollout.policy_mask, atol=1e-6, rtol=1e-6)
    assert (logps * (rollout.completion_mask - rollout.policy_mask)).abs().sum() > 1, "the tool's tokens have some too"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_alone_gives_the_completion_that_it_gives_in_a_batch(temperature):
    """With the random numbers of its row in the batch, which come one row after the other."""
    together = roll(num_generations=1, temperature=temperature)
    generator = torch.Generator().manual_seed(3)
    for row, prompt in enumerate(PROMPTS):
        alone = roll([prompt], num_generations=1, temperature=temperature, generator=generator)
        length = alone.completion_mask.sum()
        assert together.completion_mask[row].sum() == length
        assert_close(together.completion_ids[row, :length], alone.completion_ids[0, :length])
        assert_close(together.tool_mask[row, :length], alone.tool_mask[0, :length])


def test_without_a_call_the_tool_changes_nothing():
    plain, with_tool = roll(tool=None), roll(tool=Tool("<unk>", lambda text: "b"))
    assert plain.tool_mask is None and plain.policy_mask is plain.completion_mask
    never = (with_tool.tool_mask == 1).all(dim=1)
    assert_close(plain.completion_ids[never], with_tool.completion_ids[never])


def test_a_marker_of_several_tokens_is_refused():
    with pytest.raises(ValueError, match=r"tool\.marker.*'a b'.*one token"):
        roll(tool=Tool("a b", str))


def gradients_of_a_step(score=score_rollout):
    """The batch of a training step, and the gradient of its loss by the log-probability of each token, (rows, C)."""
    found = []

    def spy(logps, *arguments, **options):
        logps.register_hook(found.append)
        return grpo_loss(logps, *arguments, **options)

    def lengths(completions, **kwargs):
        return [len(completion) for completion in completions]

    model = make_model()
    config = GRPOConfig(max_steps=1, num_generations=4, prompts_per_step=4, max_completion_length=12)
    state = start_training(model, TOKENIZER, PROBLEMS, config)
    state.sampler.tool = TOOL
    (row,) = train(model, TOKENIZER, PROBLEMS, lengths, config, state=state, stages=Stages(loss=spy, score=score))
    return state.batch, torch.cat(found), row


def test_the_gradient_at_the_tools_tokens_is_zero_and_elsewhere_it_is_not():
    batch, gradient, row = gradients_of_a_step()
    assert len(gradient) == len(batch.rewards), "no group ties, so all rows are in the loss"
    paid = (batch.advantages != 0)[:, None]
    policy, tool = batch.rollout.policy_mask.bool(), batch.rollout.tool_mask == 0
    assert tool.any() and gradient[tool].abs().max() == 0
    assert gradient[policy & paid].abs().min() > 0
    entropy = -(batch.rollout.sampling_per_token_logps * policy).sum() / policy.sum()
    assert row["entropy"] == pytest.approx(entropy.item(), rel=1e-5)


def test_without_the_mask_the_tools_tokens_have_a_gradient():
    def unmasked(rollout, *arguments):
        return score_rollout(dataclasses.replace(rollout, tool_mask=None), *arguments)

    batch, gradient, _ = gradients_of_a_step(unmasked)
    ids = batch.rollout.completion_ids
    after_call = torch.zeros_like(ids, dtype=torch.bool)
    after_call[:, 1:] = ids[:, :-1] == CALL[0]
    replied = after_call & batch.rollout.completion_mask.bool() & (batch.advantages != 0)[:, None]
    assert replied.any() and gradient[replied].abs().min() > 0


@pytest.mark.parametrize(
    ("expression", "result"), [("190+55", "245"), ("1680-810-1", "869"), ("2+3*4", "14"), ("7/2", "3.5"), ("3-8", "-5")]
)
def test_the_calculator_computes(expression, result):
    assert calculate(expression) == result
    assert CALCULATOR.reply(f"245. [{expression}]") == f"={result}."


@pytest.mark.parametrize(
    "text",
    ["", "48", "1+", "+1+1", "1/0", "2**9", "(1+2)", "1+1;2", "1e5+1", "a+1", "__import__('os')", "1+1\n", "٣+٤"]
    + ["9" * 60 + "+1", "1 + 1 ", "0xff+1", "1_0+1", "1+1=2"],
)
def test_the_calculator_refuses_what_is_not_arithmetic(text):
    assert calculate(text) is None
    assert CALCULATOR.reply(f"{text}]") == "=?."


def test_solutions_are_what_the_calculator_would_have_written_and_its_tokens_are_no_targets():
    from grpo_edu import load_policy

    _, tokenizer = load_policy("tiny")
    splits = tool_splits(20, 20, 20)
    for problem in splits["train"] + splits["cold"]:
        calls = problem.solution.split("]")
        for call, after in zip(calls, calls[1:], strict=False):
            assert after.startswith(CALCULATOR.reply(f"{call}]"))
        ids, is_target = encode_turns(tokenizer, problem)
        written = tokenizer.decode([token for token, target in zip(ids, is_target, strict=True) if target])
        assert written.endswith(f"#### {problem.answer}<|im_end|>")
        assert written.count("]") == len(calls) - 1 and "]=" not in written
    assert sum("[" in problem.solution for problem in splits["cold"]) == 10
