"""Completions in which a tool writes some of the tokens: the rollout, its masks, and the gradient."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from toy_policy import PROBLEMS, make_model, word_tokenizer

from grpo_edu import GRPOConfig, per_token_logps
from grpo_edu.advantages import group_advantages, turn_advantages
from grpo_edu.batch import rows_with_gradient, score_by_turn, score_rollout
from grpo_edu.losses import grpo_loss
from grpo_edu.problems.environments import (
    WORDS,
    Calculator,
    Step,
    WordGame,
    letter_feedback,
    word_game_problem,
    word_game_splits,
)
from grpo_edu.problems.equations import calculate
from grpo_edu.prompts import render_prompt
from grpo_edu.rollout import generate
from grpo_edu.studies.tool_use import encode_turns, tool_splits
from grpo_edu.trainer import Stages, start_training, train
from grpo_edu.turns import environment_reward, render_observation, reset_environments, use_trl_tool_template

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPTS = [problem.prompt for problem in PROBLEMS]
TOKENIZER = word_tokenizer()
CALL, REPLY = TOKENIZER.encode("a"), TOKENIZER.encode("b c")


class Tool:
    """A tool that replies to every call, which the policy ends with the word `turn_end`."""

    turn_end = "a"

    def __init__(self, reply=lambda text: "b c"):
        self.reply = reply

    def reset(self, **row):
        pass

    def step(self, text):
        return Step(self.reply(text), 0.0, False)


def roll(prompts=PROMPTS, *, environment=Tool, length=12, **options):
    options = {"num_generations": 4, "generator": torch.Generator().manual_seed(3), **options}
    rows = len(prompts) * options["num_generations"]
    environments = None if environment is None else [environment() for _ in range(rows)]
    return generate(
        make_model(), TOKENIZER, prompts, max_completion_length=length, environments=environments, **options
    )


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
    rollout = roll(environment=lambda: Tool(lambda text: "b " * 50))
    called = (rollout.tool_mask == 0).any(dim=1)
    assert called.any() and rollout.completion_ids.shape[1] == 12
    assert rollout.is_truncated[called].all()


def test_the_tool_reads_its_turn_up_to_the_marker():
    seen = []

    def reply(text):
        seen.append(text)
        return "b"

    rollout = roll(environment=lambda: Tool(reply))
    assert seen and all(text.split()[-1] == "a" for text in seen)
    calls = []
    for ids, mask in zip(rollout.completion_ids, rollout.policy_mask, strict=True):
        turn = []
        for token, own in zip(ids.tolist(), mask.tolist(), strict=True):
            turn = [*turn, token] if own else []
            if turn and token == CALL[0]:
                calls.append(TOKENIZER.decode(turn, skip_special_tokens=True))
    assert sorted(calls) == sorted(seen)


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
    class Never(Tool):
        turn_end = "<unk>"

    plain, with_tool = roll(environment=None), roll(environment=Never)
    assert plain.tool_mask is None and plain.policy_mask is plain.completion_mask
    never = (with_tool.tool_mask == 1).all(dim=1)
    assert_close(plain.completion_ids[never], with_tool.completion_ids[never])


def test_a_marker_of_several_tokens_is_refused():
    class Two(Tool):
        turn_end = "a b"

    with pytest.raises(ValueError, match=r"Two\.turn_end.*'a b'.*one token"):
        roll(environment=Two)


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
    state.sampler.environment = Tool
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
    assert Calculator().step(f"245. [{expression}]").observation == f"={result}."


@pytest.mark.parametrize(
    "text",
    ["", "48", "1+", "+1+1", "1/0", "2**9", "(1+2)", "1+1;2", "1e5+1", "a+1", "__import__('os')", "1+1\n", "٣+٤"]
    + ["9" * 60 + "+1", "1 + 1 ", "0xff+1", "1_0+1", "1+1=2"],
)
def test_the_calculator_refuses_what_is_not_arithmetic(text):
    assert calculate(text) is None
    assert Calculator().step(f"{text}]").observation == "=?."


def test_solutions_are_what_the_calculator_would_have_written_and_its_tokens_are_no_targets():
    from grpo_edu import load_policy

    _, tokenizer = load_policy("tiny")
    splits = tool_splits(20, 20, 20)
    for problem in splits["train"] + splits["cold"]:
        calls = problem.solution.split("]")
        for call, after in zip(calls, calls[1:], strict=False):
            assert after.startswith(Calculator().step(f"{call}]").observation)
        ids, is_target = encode_turns(tokenizer, problem)
        written = tokenizer.decode([token for token, target in zip(ids, is_target, strict=True) if target])
        assert written.endswith(f"#### {problem.answer}<|im_end|>")
        assert written.count("]") == len(calls) - 1 and "]=" not in written
    assert sum("[" in problem.solution for problem in splits["cold"]) == 10


# ---- conversations of several messages ----


def chatty_tokenizer():
    """The tokenizer of `tiny`, whose chat template has turns."""
    from grpo_edu import load_policy

    return load_policy("tiny")


class Script:
    """An environment that says "3" after each turn, and ends after `turns` of them."""

    turns = 2

    def __init__(self):
        self.heard, self.rows = [], None

    def reset(self, **row):
        self.rows, self.heard = row, []

    def step(self, text):
        self.heard.append(text)
        return "3", self.pay(text), len(self.heard) == self.turns

    def pay(self, text):
        return 0.5 * len(self.heard)

    def get_reward(self):
        return float(len(self.heard))


def talk(factory, *, length=80, **options):
    model, tokenizer = chatty_tokenizer()
    prompts = [render_prompt(tokenizer, "1 + 2?"), render_prompt(tokenizer, "What is 20 + 31?")]
    environments = [factory() for _ in range(4)]
    options = {"generator": torch.Generator().manual_seed(1), **options}
    rollout = generate(
        model, tokenizer, prompts, num_generations=2, max_completion_length=length, environments=environments, **options
    )
    return model, tokenizer, rollout


def test_a_conversation_has_the_tokens_that_the_chat_template_gives_it():
    model, tokenizer, rollout = talk(Script)
    between = tokenizer.encode("\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n")
    whole = 0
    for row, environment in enumerate(rollout.environments):
        length = int(rollout.completion_mask[row].sum())
        ids, own = rollout.completion_ids[row, :length].tolist(), rollout.tool_mask[row, :length].tolist()
        assert [token for token, mine in zip(ids, own, strict=True) if not mine] in ([], between)
        turns = [[]]
        for token, mine in zip(ids, own, strict=True):
            if mine:
                turns[-1].append(token)
            elif turns[-1]:
                turns.append([])
        ended = [turn for turn in turns if turn and turn[-1] == tokenizer.eos_token_id]
        assert [tokenizer.decode(turn, skip_special_tokens=True) for turn in ended] == environment.heard
        rewards = rollout.turn_rewards[row]
        assert rewards[~rewards.isnan()].tolist() == [0.5, 1.0][: len(environment.heard)]
        assert rollout.is_truncated[row] == (len(environment.heard) < 2)
        whole += len(environment.heard) == 2
    assert whole >= 2, "some conversations came to their end"
    batch = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    plain = per_token_logps(model, *batch).detach() * rollout.policy_mask
    assert_close(plain, rollout.sampling_per_token_logps, atol=1e-4, rtol=1e-4)


def test_max_turns_ends_a_conversation_with_its_turn_and_says_that_none_came_to_its_end():
    class Endless(Script):
        turns = None

    with pytest.warns(RuntimeWarning, match="no conversation with Endless.*max_turns"):
        _, _, rollout = talk(Endless, max_turns=1)
    assert all(len(environment.heard) <= 1 for environment in rollout.environments)
    assert not (rollout.tool_mask == 0).any(), "no observation follows the last turn"
    assert not rollout.is_truncated.any()


def test_an_environment_that_raises_is_named_with_its_turn_and_the_text():
    class Broken(Script):
        def step(self, text):
            raise KeyError("state")

    with pytest.raises(RuntimeError, match=r"the environment 'Broken' raised KeyError: 'state', in step, turn 1 of"):
        talk(Broken)


def test_an_environment_that_hangs_is_interrupted(monkeypatch):
    monkeypatch.setattr("grpo_edu.turns.ENVIRONMENT_SECONDS", 0.2)

    class Hangs(Script):
        def step(self, text):
            time.sleep(60)

    with pytest.raises(RuntimeError, match=r"the environment 'Hangs' did not return within 0\.2 seconds"):
        talk(Hangs)


@pytest.mark.parametrize(
    ("answer", "says"),
    [("3", "observation, reward, done"), (("3", None, True), "number"), (("3", float("nan"), True), "nan")],
)
def test_a_wrong_answer_of_step_is_refused_with_the_answer(answer, says):
    class Wrong(Script):
        def step(self, text):
            return answer

    with pytest.raises(RuntimeError, match=f"the environment 'Wrong' raised TypeError.*{says}"):
        talk(Wrong)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] }}",
        "{{ raise_exception('one question only') }}",
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}",
    ],
)
def test_a_chat_template_without_turns_is_refused_before_anything_is_sampled(template):
    _, tokenizer = chatty_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template cannot render a conversation of several turns.*turn_end"):
        render_observation(tokenizer, "3")


def test_environments_of_a_group_begin_alike():
    class Random(Script):
        count = 0

        def reset(self, **row):
            Random.count += 1
            return f" {row['answer']} {Random.count}"

    with pytest.raises(ValueError, match="'Random' began 2 different conversations for problem 0: ' 1 1'.*a seed$"):
        reset_environments(Random, [{"answer": "1"}], 2)
    environments, openings = reset_environments(Random, [{"answer": "1"}, {"answer": "2"}], 1)
    assert openings == [" 1 3", " 2 4"] and len(environments) == 2


def test_a_class_that_is_no_environment_is_told_what_it_lacks():
    class WithoutRow(Script):
        def reset(self):
            pass

    with pytest.raises(ValueError, match="must be a class, or a function that makes an environment, got <"):
        reset_environments(WordGame(), [{"answer": "CAT"}], 2)
    with pytest.raises(RuntimeError, match=r"'WithoutRow' raised TypeError.*in reset.*made as WithoutRow\(\).*\*\*row"):
        reset_environments(WithoutRow, [{"answer": "1"}], 2)
    with pytest.raises(ValueError, match=r"object has no get_reward\(\)"):
        environment_reward(["1"], [object()])


def test_a_training_step_asks_the_environments_for_their_rewards():
    model, tokenizer = chatty_tokenizer()
    problems = [word_game_problem("CAT", "CAR"), word_game_problem("DOG", "FOG")]
    config = GRPOConfig(max_steps=1, num_generations=2, prompts_per_step=2, max_completion_length=40, seed=2)
    state = start_training(model, tokenizer, problems, config)
    state.sampler.environment = WordGame
    (row,) = train(model, tokenizer, problems, environment_reward, config, state=state)
    games = state.batch.rollout.environments
    assert sorted(game._secret for game in games) == ["CAT", "CAT", "DOG", "DOG"]
    assert row["rewards/environment_reward/mean"] == pytest.approx(sum(game.get_reward() for game in games) / 4)
    assert_close(state.batch.rewards, state.batch.rollout.turn_rewards.nansum(dim=1))


# ---- credit by turn ----

NAN = float("nan")


def test_a_turn_is_compared_with_the_same_turn_of_its_group_by_what_it_leads_to():
    rewards = torch.tensor([[0.0, 1.0], [1.0, NAN], [-0.5, 1.0], [0.0, 0.0]])
    # to go: turn 0: 1, 1, 0.5, 0, with the mean 0.625; turn 1: 1, 1, 0 of three conversations, with the mean 2/3
    expected = torch.tensor([[0.375, 1 / 3], [0.375, 0.0], [-0.125, 1 / 3], [-0.625, -2 / 3]])
    assert_close(turn_advantages(rewards, 4, scale_rewards="none"), expected)
    scaled = turn_advantages(rewards, 4)
    assert_close(scaled[:, 0], group_advantages(torch.tensor([1.0, 1.0, 0.5, 0.0]), 4))
    earlier = rewards + torch.tensor([[5.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    assert_close(turn_advantages(earlier, 4)[:, 1], scaled[:, 1])  # earlier turns are not part of a later turn's credit


def test_with_one_turn_credit_by_turn_is_that_of_the_whole():
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0, 0.0])
    assert_close(turn_advantages(rewards[:, None], 3)[:, 0], group_advantages(rewards, 3))


@pytest.mark.parametrize("rewards", [torch.zeros(4), torch.zeros(4, 2, 1)])
def test_turn_rewards_are_a_table(rewards):
    with pytest.raises(ValueError, match="turn_rewards must have shape"):
        turn_advantages(rewards, 2)


class ByLength(Script):
    """It pays for each turn by the length of its text."""

    def pay(self, text):
        return float(len(text))


def test_every_token_of_a_turn_has_the_advantage_of_its_turn_and_a_turn_that_was_cut_off_has_none():
    _, _, rollout = talk(ByLength)
    problems = [word_game_problem("CAT", "CAR"), word_game_problem("DOG", "FOG")]
    config = GRPOConfig(max_steps=1, num_generations=2, prompts_per_step=2, max_completion_length=80)
    batch = score_by_turn(rollout, problems, [environment_reward], config)
    by_turn = turn_advantages(rollout.turn_rewards, 2)
    assert (by_turn != 0).any() and batch.advantages.shape == rollout.completion_ids.shape
    for row in range(4):
        turn = 0
        for place in range(int(rollout.completion_mask[row].sum())):
            if not rollout.tool_mask[row, place]:
                turn = 1
                continue
            expected = by_turn[row, turn] if turn < len(rollout.environments[row].heard) else 0.0
            assert batch.advantages[row, place] == pytest.approx(float(expected))
    with_entropy = dataclasses.replace(config, entropy_coef=0.1)
    tied = dataclasses.replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert rows_with_gradient(tied, config).tolist() == []
    assert rows_with_gradient(tied, with_entropy).tolist() == [0, 1, 2, 3]
    rows = rows_with_gradient(batch, config).tolist()
    assert rows == [row for group in ([0, 1], [2, 3]) if (by_turn[group] != 0).any() for row in group]
    with pytest.raises(ValueError, match="no turn_rewards"):
        score_by_turn(roll(environment=None), PROBLEMS, [environment_reward], config)
    with pytest.raises(ValueError, match="max_resamples must be 0"):
        score_by_turn(rollout, problems, [environment_reward], dataclasses.replace(config, max_resamples=1))


def test_a_training_step_learns_by_turn():
    model, tokenizer = chatty_tokenizer()
    problems = [word_game_problem("CAT", "CAR"), word_game_problem("DOG", "FOG")]
    config = GRPOConfig(max_steps=1, num_generations=2, prompts_per_step=2, max_completion_length=60, seed=2)
    state = start_training(model, tokenizer, problems, config)
    state.sampler.environment = ByLength
    stages = Stages(score=score_by_turn)
    (row,) = train(model, tokenizer, problems, environment_reward, config, state=state, stages=stages)
    assert row["grad_norm"] > 0 and state.batch.advantages.ndim == 2


# ---- the two environments ----


@pytest.mark.parametrize(
    ("guess", "secret", "signs"),
    [("CAT", "CAT", "+++"), ("CAR", "CAT", "++-"), ("TEA", "EAT", "???"), ("TOT", "CAT", "--+"), ("ANA", "NAN", "??-")],
)
def test_feedback_of_a_guess(guess, secret, signs):
    assert letter_feedback(guess, secret) == signs


def test_a_word_game_is_played_by_its_rules():
    game = WordGame(max_turns=3)
    with pytest.raises(ValueError, match="XYZ"):
        game.reset(answer="XYZ")
    game.reset(prompt="", answer="CAT")
    assert [game.step(text) for text in ("DOG", "C", " cat ")] == [
        ("---", 0.0, False),
        ("illegal", -0.2, False),
        ("+++", 1.0, True),
    ]
    assert game.solved and game.get_reward() == pytest.approx(0.8)
    assert game.step("CAT") == ("over", 0.0, True) and game.get_reward() == pytest.approx(0.8)
    game.reset(answer="DOG")
    assert [game.step("CAT")[2] for _ in range(3)] == [False, False, True] and not game.solved
    assert str(Step("++-", 0.0, False)) == "++-", "what TRL shows the policy"


def test_held_out_games_are_no_training_games_and_every_word_is_a_secret_in_both():
    splits = word_game_splits()
    train_prompts = {(problem.prompt, problem.answer) for problem in splits["train"]}
    heldout = {(problem.prompt, problem.answer) for problem in splits["heldout"]}
    assert not train_prompts & heldout
    assert {answer for _, answer in train_prompts} == {answer for _, answer in heldout} == set(WORDS)
    assert len(set(WORDS)) == len(WORDS) and all(len(set(word)) == 3 for word in WORDS)


def test_the_trainer_that_notebook_16_makes_in_trl_counts_the_reward_of_the_environment_once(tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig as TRLConfig
    from trl import GRPOTrainer

    notebook = json.loads((REPOSITORY / "notebooks" / "16_several_turns.ipynb").read_text(encoding="utf-8"))
    (source,) = (text for cell in notebook["cells"] if "GRPOTrainer(" in (text := "".join(cell["source"])))
    model, tokenizer = chatty_tokenizer()
    names = {"model": model, "tokenizer": tokenizer, "GRPOTrainer": GRPOTrainer, "WordGame": WordGame}
    names["args"] = TRLConfig(tmp_path, per_device_train_batch_size=2, num_generations=2, use_cpu=True, report_to=[])
    names["rows"] = Dataset.from_list([{"prompt": [{"role": "user", "content": "CAR ++-"}], "answer": "CAT"}] * 2)
    exec(source.split("```")[1], names)
    assert names["trainer"].reward_func_names == ["WordGame"]


@pytest.mark.parametrize("environment", [WordGame, Calculator])
def test_the_argument_of_step_has_the_type_hint_and_the_description_that_trl_asks_for(environment):
    from transformers.utils import get_json_schema

    schema = get_json_schema(environment.step)["function"]["parameters"]["properties"]["text"]
    assert schema["type"] == "string" and schema["description"]


@pytest.mark.slow
@pytest.mark.parametrize("environment", [WordGame, pytest.param(Calculator, marks=pytest.mark.long)])
def test_an_environment_runs_unchanged_in_trls_trainer(environment, tmp_path):
    """Two steps of TRL's trainer: every message is a call of `step`, and its tokens are as they are here."""
    from datasets import Dataset
    from trl import GRPOConfig as TRLConfig
    from trl import GRPOTrainer

    model, tokenizer = chatty_tokenizer()
    use_trl_tool_template(tokenizer)
    rows = [{"prompt": [{"role": "user", "content": "CAR ++-"}], "answer": "CAT"}] * 4
    settings = TRLConfig(
        tmp_path,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=48,
        max_tool_calling_iterations=2,
        max_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    seen = []

    def spy(completions, environments, **kwargs):
        seen.append((completions, [type(each) for each in environments]))
        return [float(len(str(completion))) for completion in completions]

    trainer = GRPOTrainer(
        model, spy, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        environment_factory=environment,
    )  # fmt: skip
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 2
    assert all(row["tools/call_frequency"] > 0 and row["tools/failure_frequency"] == 0 for row in logs)
    assert all(kind is environment for _, kinds in seen for kind in kinds)
    heard = [message["content"] for texts, _ in seen for text in texts for message in text if message["role"] == "tool"]
    assert heard and set(heard) <= ({"illegal", "over"} if environment is WordGame else {"=?.", *heard})
    assert environment is WordGame or all(text.startswith("=") for text in heard)
