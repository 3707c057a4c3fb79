"""Rewards: literals, what must not be paid, arithmetic by properties, faults by name, and TRL's own call."""

import asyncio
import functools
import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_edu.problems.equations import check_equations
from grpo_edu.rewards import (
    accuracy_reward,
    combine_rewards,
    compute_rewards,
    for_trl,
    format_reward,
    length_reward,
    reward_name,
    steps_reward,
)


def chat(text):
    return [{"role": "assistant", "content": text}]


# accuracy


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("14 + 34 = 48. #### 48", "48", 1.0),
        ("#### $48.00", "48", 1.0),
        ("#### 48", 48, 1.0),
        ("#### 48", "6 * 8 = 48\n#### 48", 1.0),
        ("#### 7, 15, 23", "7, 15, 23", 1.0),
        ("#### Heads.", "heads", 1.0),
        ("#### 49", "48", 0.0),
        ("48", "48", 0.0),
        ("", "48", 0.0),
        # exploits
        ("#### 48 or 49", "48", 0.0),
        ("#### 48, 49", "48", 0.0),
        ("#### 48 49 50", "48", 0.0),
        ("#### 96/2", "48", 0.0),
        ("#### 40 + 8", "48", 0.0),
        ("#### 48\n#### 49", "48", 0.0),
        ("#### 48 or 49 \\boxed{48} the answer is 48", "48", 0.0),
        ("#### 715", "7, 15", 0.0),
        ("#### heads or tails", "heads", 0.0),
        ("#### nan", "48", 0.0),
        ("the answer, calculated step by step: 48 = 48 apples therefore 48", "48", 0.0),
    ],
)
def test_accuracy_pays_for_the_answer_alone(completion, answer, reward):
    assert accuracy_reward([completion], [answer]) == [reward]
    assert accuracy_reward(completions=[chat(completion)], answer=[answer], prompts=["q"], level=["basic"]) == [reward]


def test_accuracy_is_none_where_there_is_no_ground_truth():
    assert accuracy_reward(["#### 48", "#### 48"], [None, "48"]) == [None, 1.0]


@pytest.mark.parametrize("gold", ["", "no idea at all", "48 or 49", "#### ", "nan", float("nan"), "?", "n/a"])
@pytest.mark.parametrize("completion", ["#### 48", "", "#### ", "#### nan"])
def test_an_unreadable_ground_truth_raises_and_never_pays(gold, completion):
    with pytest.raises(ValueError, match=r"answer\[1\] .*got .*data"):
        accuracy_reward(["#### 5", completion], ["5", gold])


def test_accuracy_refuses_lists_that_do_not_match():
    with pytest.raises(ValueError, match="answer has 1 entries for 2"):
        accuracy_reward(["#### 5", "#### 5"], ["5"])
    with pytest.raises(ValueError, match="answer must be a list .* got str"):
        accuracy_reward(["#### 5", "#### 5"], "55")


# format


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("2 + 3 = 5. #### 5", 1.0),
        ("#### 7, 15, 23", 1.0),
        ("\n#### heads\n", 1.0),
        ("#### 5\nand more", 0.0),
        ("#### 5 #### 5", 0.0),
        ("########", 0.0),
        ("####", 0.0),
        ("#### 5 or 6", 0.0),
        ("The answer is 5", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion, reward):
    assert format_reward([completion, chat(completion)]) == [reward, reward]


# steps


@pytest.mark.parametrize(
    ("text", "verdicts"),
    [
        ("14 + 34 = 48. 48 - 12 = 36. #### 36", [True, True]),
        ("14 + 34 = 47.", [False]),
        ("8 - 2 * 3 = 2", [True]),
        ("8 - 6 / 3 + 1 = 7", [True]),
        ("12 / 3 / 2 = 2", [True]),
        ("3 x 4 = 12, 3×4=12, 12 ÷ 4 = 3, 3 \\times 4 = 12, 3·4 = 12", [True] * 5),
        ("0.1 + 0.2 = 0.3", [True]),
        ("1 / 3 = 0.33", [False]),
        ("1 / 2 + 1 / 2 = 1", [True]),
        ("1,200 + $300 = $1,500.", [True]),
        ("5 − 8 = −3", [True]),
        ("-6 + 2 = -4", [True]),
        ("5 - -3 = 8", [True]),
        ("- 14 + 34 = 48\n* 2 x 3 = 6", [True, True]),
        ("1 / 0 = 0", [False]),
        ("0 / 0 = 1", [False]),
        ("36 = 48 - 12", [True]),
        ("14 + 34 = 48 - 12 = 36", [False, True]),
        ("5 = 2 + 3 = 10 / 2", [True, True]),
        ("9*2 = $<<9*2=18>>18", [True]),
        ("14 + 34 = 48 (apples)", [True]),
        # not read: nothing calculated, or more than plain numbers
        ("48 = 48", []),
        ("x = 48, 48", []),
        ("14 + 34", []),
        ("(2 + 3) * 4 = 20, (2 + 3) * 4 + 1 = 21, 5 = 1 * (2 + 3)", []),
        ("2^3 + 1 = 9, 40 / 2 = 20%, 26 = 5 + 3x, 2x + 3 = 9", []),
        ("1 1/2 * 60 = 90, 1 000 + 1 000 = 2 000", []),
        ("14 apples + 34 apples = 48 apples", []),
        ("", []),
    ],
)
def test_written_equations(text, verdicts):
    assert check_equations(text) == verdicts
    share = sum(verdicts) / len(verdicts) if verdicts else 0.0
    assert steps_reward([text, chat(text)]) == [share, share]


operands = st.integers(-999, 999) | st.decimals(0, 99, places=2, allow_nan=False)


@given(st.lists(operands, min_size=2, max_size=5), st.data())
def test_generated_equations_are_judged_as_exact_arithmetic_judges_them(values, data):
    operators = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(values) - 1, max_size=len(values) - 1))
    pieces = [piece for value, sign in zip(values, [*operators, ""], strict=True) for piece in (str(value), sign)]
    exact = eval("".join(f"Fraction('{p}')" if i % 2 == 0 else p for i, p in enumerate(pieces)), {"Fraction": Fraction})
    scaled = exact * 10**20
    assert scaled.denominator == 1
    sign, digits = ("-" if scaled < 0 else ""), f"{abs(int(scaled)):021d}"
    right = f"{sign}{digits[:-20]}.{digits[-20:]}"
    assert check_equations(f"{' '.join(pieces)}= {right}") == [True]
    wrong = data.draw(st.integers(1, 10**6))
    assert check_equations(f"{''.join(pieces)} = {right}{wrong}") == [False]


def test_almost_all_equations_of_gsm8k_hold(gsm8k_dir):
    from grpo_edu.problems.files import load_gsm8k

    verdicts = [check_equations(problem.solution) for problem in load_gsm8k("test", gsm8k_dir)]
    held, written = sum(map(sum, verdicts)), sum(map(len, verdicts))
    assert written > 3000
    assert held / written > 0.99


# length


def test_length_in_words_and_in_tokens():
    texts = ["", "a b", "a b c", "a b c d", "a b c d e f g"]
    assert length_reward(texts, target=2) == [1.0, 1.0, 0.5, 0.0, 0.0]
    ids = [[1] * count for count in (8, 10, 15, 20, 99)]
    assert length_reward(texts, ids, target=10) == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert length_reward(prompts=texts, completions=texts, completion_ids=ids, answer=texts, target=99)[-1] == 1.0


def test_length_refuses():
    with pytest.raises(ValueError, match="target must be at least 1, got 0"):
        length_reward(["a"], target=0)
    with pytest.raises(ValueError, match="completion_ids has 1 entries for 2 completions"):
        length_reward(["a", "b"], [[1]])


# computing and combining

B = {"prompts": ["q1", "q2"], "completions": ["2 + 3 = 5. #### 5", "#### 6"], "answer": ["5", "5"]}


def test_compute_rewards():
    rewards = compute_rewards([accuracy_reward, steps_reward, format_reward], **B)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    assert compute_rewards(accuracy_reward, **B).tolist() == [[1.0], [0.0]]


def returning(value):
    def my_reward(completions, **kwargs):
        return value

    return my_reward


def test_none_becomes_nan():
    rewards = compute_rewards([returning([None, 0.25]), returning([1, None])], **B)
    assert torch.equal(rewards.isnan(), torch.tensor([[True, False], [False, True]]))
    assert (rewards[1, 0], rewards[0, 1]) == (0.25, 1.0)


def test_a_row_that_no_function_scores_is_nan_and_said():
    with pytest.warns(RuntimeWarning, match=r"\(my_reward, my_reward\) returned None for 1 of 2 .*'q2'; add"):
        rewards = compute_rewards([returning([0.5, None]), returning([None, None])], **B)
    assert rewards.isnan().tolist() == [[False, True], [True, True]]
    assert combine_rewards(rewards).isnan().tolist() == [False, True]
    with pytest.warns(RuntimeWarning, match=r"\(my_reward\) returned None for 2 of 2 .* of prompt 'q1'; .* leave"):
        assert compute_rewards(returning([None, None]), **B).isnan().all()


def waiting_for(together, name, rewards):
    """An asynchronous reward that returns only when as many functions wait as `together` holds."""

    async def judge(completions, **kwargs):
        completions.clear()  # of its own copy
        await asyncio.wait_for(together.wait(), timeout=60)
        return rewards

    judge.__name__ = name
    return judge


class AsyncReward:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]


def test_asynchronous_functions_wait_together_and_keep_their_columns():
    together = asyncio.Barrier(2)
    slow = functools.partial(waiting_for(together, "slow", [0.25, None]), target=3)
    functions = [slow, accuracy_reward, waiting_for(together, "other", torch.tensor([1, 2])), AsyncReward()]
    expected = torch.tensor([[0.25, 1.0, 1.0, 17.0], [math.nan, 0.0, 2.0, 6.0]])
    torch.testing.assert_close(compute_rewards(functions, **B), expected, equal_nan=True)
    assert [reward_name(function) for function in functions[::3]] == ["slow", "AsyncReward"]


def test_asynchronous_functions_work_inside_a_running_loop_as_in_a_notebook():
    async def cell():
        return compute_rewards([AsyncReward(), accuracy_reward], **B)

    assert asyncio.run(cell()).tolist() == [[17.0, 1.0], [6.0, 0.0]]


def test_an_asynchronous_function_that_fails_is_named():
    async def unreachable(completions, **kwargs):
        await asyncio.sleep(0)
        raise ConnectionError("no route to host")

    with pytest.raises(RuntimeError, match="'unreachable' raised ConnectionError: no route") as caught:
        compute_rewards([accuracy_reward, unreachable, AsyncReward()], **B)
    assert isinstance(caught.value.__cause__, ConnectionError)

    async def short(completions, **kwargs):
        return [1.0]

    with pytest.raises(ValueError, match="'short' returned 1 rewards for 2 completions"):
        compute_rewards([short], **B)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_ctrl_c_ends_the_waiting():
    async def slow(completions, **kwargs):
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        await asyncio.sleep(10)

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        compute_rewards(slow, **B)
    assert time.perf_counter() - started < 9


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_an_asynchronous_function_that_hangs_does_not_keep_the_process_alive():
    code = (
        "import asyncio, os, signal, threading; from grpo_edu.rewards import compute_rewards\n"
        "async def hangs(completions, **kwargs):\n"
        "    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()\n"
        "    await asyncio.sleep(600)\n"
        "compute_rewards(hangs, prompts=['p'], completions=['c'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode and "KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize(
    "value",
    [
        [True, False],
        (1, 0),
        np.array([1.0, 0.0]),
        torch.tensor([1, 0]),
        [np.float32(1), np.bool_(False)],
        [torch.tensor(1.0), Fraction(0)],
    ],
    ids=["bools", "tuple", "array", "tensor", "numpy scalars", "scalars"],
)
def test_numbers_of_every_kind_are_taken(value):
    assert compute_rewards(returning(value), **B).tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions; return .*one per completion"),
        ([1.0, 0.0, 0.0], "returned 3 rewards for 2 completions"),
        (1.0, "returned float; return a list of 2 numbers"),
        (None, "returned NoneType; return a list of 2 numbers"),
        ("10", "returned str; return a list of 2 numbers"),
        ({0: 1.0, 1: 0.0}, "returned dict; return a list"),
        (torch.tensor(1.0), "returned Tensor; return a list"),
        ([1.0, "1.0"], r"returned '1.0' \(str\) for completion 1.*None"),
        ([[1.0], [0.0]], r"returned \[1.0\] \(list\) for completion 0"),
        ([1.0, math.nan], "returned nan for completion 1.*number.*None"),
        ([math.inf, 1.0], "returned inf for completion 0"),
        ([-math.inf, 1.0], "returned -inf for completion 0"),
        ([1e39, 1.0], "returned 1e\\+39 for completion 0.*at most 1e\\+15"),
        ([1.0, -3e38], "returned -3e\\+38 for completion 1.*at most 1e\\+15"),
        (torch.tensor([1.0, math.nan]), "returned nan for completion 1"),
    ],
)
def test_a_bad_return_is_named(value, message):
    with pytest.raises(ValueError, match=message) as caught:
        compute_rewards([returning(value)], **B)
    assert "my_reward" in str(caught.value)


def test_a_function_that_edits_its_input_changes_nothing_for_the_next_one():
    def stripping_reward(prompts, completions, answer, **kwargs):
        for row, completion in enumerate(completions):
            completion[0]["content"] = ""
            answer[row] = prompts[row] = "1"
        return [0.0] * len(completions)

    stripping_reward.takes_messages = True
    chats = [chat(text) for text in B["completions"]]
    given = B | {"completions": chats}
    untouched = compute_rewards(accuracy_reward, **given)
    rewards = compute_rewards([stripping_reward, accuracy_reward], **given)
    assert torch.equal(rewards[:, 1:], untouched) and untouched.any()
    assert chats == [chat(text) for text in B["completions"]]


@pytest.mark.parametrize("form", [str, chat], ids=["text", "chat"])
def test_a_reward_gets_texts_or_the_messages_that_it_declares(form):
    def texts(prompts, completions, **kwargs):
        return [
            float(f"{prompt}{completion}" == "q#### 6") for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def messages(prompts, completions, **kwargs):
        pairs = zip(prompts, completions, strict=True)
        return [float(prompt[-1]["content"] + one[-1]["content"] == "q#### 6") for prompt, one in pairs]

    messages.takes_messages = True
    given = {"prompts": ["q", [{"role": "user", "content": "q"}]], "completions": [form("no"), form("#### 6")]}
    assert compute_rewards([texts, messages], **given).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert for_trl(texts)(**given) == for_trl(messages)(**given) == [0.0, 1.0]
    del messages.takes_messages
    with pytest.raises(RuntimeError, match=r"'messages' raised TypeError.*set messages\.takes_messages = True"):
        compute_rewards(messages, **given)


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (lambda: exec("exit()"), "raised SystemExit"),
        (lambda: os._exit(0), "raised SystemExit"),
        (lambda: raise_(KeyboardInterrupt), "raised KeyboardInterrupt"),
        (lambda: raise_(GeneratorExit), "raised GeneratorExit"),
    ],
)
@pytest.mark.parametrize("call", [lambda one: compute_rewards(one, **B), lambda one: for_trl(one)(**B)])
def test_a_reward_that_leaves_is_named(leave, words, call):
    def leaving(completions, **kwargs):
        leave()

    usual = os._exit
    with pytest.raises(RuntimeError, match=f"'leaving' {words}.*completion 0.* in a process of its own"):
        call(leaving)
    assert os._exit is usual


def test_an_asynchronous_reward_that_leaves_is_named():
    async def leaving(completions, **kwargs):
        raise SystemExit

    with pytest.raises(RuntimeError, match="'leaving' raised SystemExit"):
        compute_rewards(leaving, **B)


def test_torch_computes_gradients_after_a_reward_that_switched_them_off():
    def careless(completions, **kwargs):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return [0.0] * len(completions)

    with pytest.warns(RuntimeWarning, match="'careless' changed or closed torch's gradient mode or default dtype"):
        compute_rewards(careless, **B)
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


def test_what_a_reward_closes_or_changes_is_set_back_and_named(tmp_path, capfd):
    def careless(completions, **kwargs):
        os.chdir(tmp_path)
        os.close(1)
        sys.stderr = io.StringIO()
        return [0.0] * len(completions)

    folder, streams = os.getcwd(), (sys.stdout, sys.stderr)
    with pytest.warns(
        RuntimeWarning, match="'careless' changed or closed file 1 and sys.stderr and the working folder"
    ):
        compute_rewards(careless, **B)
    assert os.getcwd() == folder and (sys.stdout, sys.stderr) == streams
    os.write(1, b"still open")
    assert capfd.readouterr().out == "still open"


def test_a_function_that_raises_is_named_and_its_error_chained():
    def broken_reward(completions, **kwargs):
        return [1 / 0]

    with pytest.raises(RuntimeError, match="'broken_reward' raised ZeroDivisionError: division by zero") as caught:
        compute_rewards([accuracy_reward, broken_reward], **B)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def narrow_reward(completions):
        return [0.0] * len(completions)

    with pytest.raises(RuntimeError, match=r"'narrow_reward' raised TypeError.*\*\*kwargs"):
        compute_rewards(narrow_reward, **B)
    with pytest.raises(RuntimeError, match=r"'accuracy_reward' raised ValueError: answer\[0\].*got '\?'"):
        compute_rewards(accuracy_reward, **(B | {"answer": ["?", "5"]}))


def test_compute_rewards_refuses_bad_arguments():
    with pytest.raises(ValueError, match="reward_funcs must be one or more functions"):
        compute_rewards([], **B)
    with pytest.raises(ValueError, match="reward_funcs must be one or more functions"):
        compute_rewards(["accuracy"], **B)
    with pytest.raises(ValueError, match="completions is empty"):
        compute_rewards(accuracy_reward, prompts=[], completions=[], answer=[])
    with pytest.raises(ValueError, match="prompts has 1 entries for 2 completions"):
        compute_rewards(accuracy_reward, **(B | {"prompts": ["q"]}))
    with pytest.raises(ValueError, match="answer has 3 entries for 2 completions"):
        compute_rewards(accuracy_reward, **(B | {"answer": ["5"] * 3}))


def test_combine_rewards_by_hand():
    rewards = torch.tensor([[1.0, 0.5], [0.0, math.nan], [math.nan, 0.5]])
    assert combine_rewards(rewards).tolist() == [1.5, 0.0, 0.5]
    torch.testing.assert_close(combine_rewards(rewards, [2.0, -1.0]), torch.tensor([1.5, 0.0, -0.5]))
    torch.testing.assert_close(combine_rewards(rewards, torch.tensor([0.0, 1.0])), torch.tensor([0.5, 0.0, 0.5]))


def test_combine_rewards_refuses():
    rewards = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"rewards_per_func must be \(B, K\), got shape \(3,\)"):
        combine_rewards(torch.ones(3))
    with pytest.raises(ValueError, match=r"weights .*2 .*got shape \(1,\)"):
        combine_rewards(rewards, [1.0])
    with pytest.raises(ValueError, match="weights must be finite"):
        combine_rewards(rewards, [1.0, math.nan])


# TRL


class CallableReward:
    def __call__(self, completions, **kwargs):
        return [0.5] * len(completions)


ALL = [accuracy_reward, format_reward, steps_reward, functools.partial(length_reward, target=4), CallableReward()]
ASYNC = [AsyncReward(), functools.partial(AsyncReward.__call__, AsyncReward())]


@pytest.mark.slow
@pytest.mark.parametrize("form", [str, chat], ids=["plain", "chat"])
def test_trls_own_call_gives_the_same_rewards(form):
    """The method of the installed `GRPOTrainer` that calls reward functions, on a stand-in trainer."""
    from accelerate import Accelerator
    from trl import GRPOTrainer
    from trl.trainer.utils import get_callable_name, shutdown_event_loop_in_daemon, start_event_loop_in_daemon

    texts = ["2 + 3 = 5. #### 5", "#### 6", "no", "#### heads"]
    completions = [form(text) for text in texts]
    answers, ids = ["5", "5", None, "heads"], [[1] * 4, [1] * 5, [1] * 6, [1] * 9]
    inputs = [{"prompt": "q", "answer": answer, "level": "basic"} for answer in answers]
    functions = [ASYNC[0], *ALL, ASYNC[1]]
    names = [get_callable_name(function) for function in functions]
    assert [reward_name(function) for function in functions] == names
    assert [get_callable_name(for_trl(function)) for function in functions] == names
    thread, loop, ready = start_event_loop_in_daemon()
    ready.wait()
    trainer = SimpleNamespace(
        async_loop=loop,
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
        environments=None,
        reward_funcs=[for_trl(function) for function in functions],
        reward_func_names=names,
        reward_processing_classes=[None] * len(functions),
        _log_completion_extra=None,
        _log_metric=None,
    )
    theirs = GRPOTrainer._calculate_rewards(trainer, inputs, ["q"] * 4, completions, ids)
    shutdown_event_loop_in_daemon(thread, loop)
    ours = compute_rewards(
        functions, prompts=["q"] * 4, completions=completions, completion_ids=ids, answer=answers, level=["basic"] * 4
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours[:, 1].isnan().tolist() == [False, False, True, False]
