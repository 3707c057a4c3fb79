"""Losses, gradients, advantages and metrics against those that TRL's own GRPOTrainer computes.

Nothing of TRL is copied here: a real trainer is built, its settings are changed, and its own methods are called on
the tensors that this package gets.
"""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import trl
from torch.testing import assert_close
from toy_policy import late_letters, run, word_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_edu.advantages import group_advantages
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.packing import group_logps, per_token_logps
from grpo_edu.losses import LOSSES, grpo_loss, token_weights
from grpo_edu.rewards import combine_rewards
from grpo_edu.trainer import Training, Update, policy_metrics

CLOSE = {"atol": 1e-5, "rtol": 0.0}
GENERATIONS, MAX_COMPLETION_LENGTH, EOS, PAD = 4, 12, 1, 0
TEMPERATURE = 0.9
every_loss = pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if loss.trl])


def make_model(**options):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        **options,
    )
    return Qwen2ForCausalLM(config)


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_trainer(folder, reward=None, model=None, **options):
    from datasets import Dataset

    return trl.GRPOTrainer(
        model=model or make_model(),
        reward_funcs=reward or (lambda completions, **kwargs: [0.0] * len(completions)),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            report_to="none",
            use_cpu=True,
            bf16=False,
            num_generations=GENERATIONS,
            per_device_train_batch_size=2 * GENERATIONS,
            max_completion_length=MAX_COMPLETION_LENGTH,
            temperature=TEMPERATURE,
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2", "w3"]}),
        processing_class=make_tokenizer(),
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    logging.getLogger("trl").setLevel(logging.ERROR)
    trainer = make_trainer(tmp_path_factory.mktemp("trl"))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by Trainer's loop, which does not run here
    return trainer


@pytest.fixture(scope="module")
def batch():
    """Two groups of four, with padding on both sides, one truncated completion masked out and one of one token."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([3, 10, 1, 6, 8, 0, 5, 10])[:, None]
    prompt_lengths = torch.tensor([6, 4]).repeat_interleave(GENERATIONS)[:, None]
    prompt_mask = (torch.arange(6) >= 6 - prompt_lengths).long()
    completion_mask = (torch.arange(10) < lengths).long()
    prompts = torch.randint(2, 64, (2, 6), generator=generator).repeat_interleave(GENERATIONS, 0)
    completions = torch.randint(2, 64, (8, 10), generator=generator)
    return {
        "prompt_ids": prompts.masked_fill(prompt_mask == 0, PAD),
        "prompt_mask": prompt_mask,
        "completion_ids": completions.masked_fill(completion_mask == 0, PAD),
        "completion_mask": completion_mask,
        "advantages": torch.randn(8, generator=generator),
        "num_items_in_batch": completion_mask.sum(),
    }


@pytest.fixture(scope="module")
def ours(trainer, batch):
    """The same weights in a model that TRL has not touched, and log-probabilities of other policies."""
    model = make_model()
    assert all(map(torch.equal, model.parameters(), trainer.model.parameters()))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        logps = per_token_logps(model, *ids(batch), temperature=TEMPERATURE)
    noise = [torch.randn(logps.shape, generator=generator) for _ in range(2)]
    mask = batch["completion_mask"]
    return model, (logps + 0.3 * noise[0]) * mask, (logps + 0.5 * noise[1]) * mask


def ids(batch):
    return [batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]


def our_loss(model, batch, old, *, logps=None, **options):
    """The loss of this package for the batch, by default with the log-probabilities of `per_token_logps`."""
    if logps is None:
        logps = per_token_logps(model, *ids(batch), temperature=TEMPERATURE)
    options["max_completion_length"] = MAX_COMPLETION_LENGTH
    return grpo_loss(logps, old, batch["advantages"], batch["completion_mask"], **options)


def loss_and_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def theirs(trainer, batch, old, ref, monkeypatch, **settings):
    """What TRL's trainer computes with these settings, and the metrics it logs."""
    options = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "importance_sampling_level": "token", **settings}
    arguments = {name: options.pop(name) for name in ("use_bias_correction_kl",) if name in options}
    with monkeypatch.context() as patch:
        for name, value in options.items():
            patch.setattr(trainer, name, value)
        for name, value in arguments.items():
            patch.setattr(trainer.args, name, value)
        patch.setattr(trainer, "_metrics", copy.deepcopy(trainer._metrics))
        inputs = {**batch, **({} if old is None else {"old_per_token_logps": old}), "ref_per_token_logps": ref}
        result = loss_and_gradients(trainer.model, trainer.compute_loss(trainer.model, inputs))
        return *result, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def assert_same(ours, theirs):
    assert_close(ours[0], theirs[0], **CLOSE)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert_close(ours[1][name], gradient, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    assert max(float(gradient.abs().max()) for gradient in theirs[1].values()) > 1e-3


@pytest.mark.parametrize("epsilon_high", [None, 0.28, 5.0])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
@every_loss
def test_loss_and_gradients(trainer, batch, ours, monkeypatch, loss_type, level, beta, epsilon_high):
    model, old, ref = ours
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta}
    high = 0.2 if epsilon_high is None else epsilon_high
    for corrected in (False, True) if beta else (False,):
        settings["use_bias_correction_kl"] = corrected
        expected = theirs(trainer, batch, old, ref, monkeypatch, epsilon_high=high, **settings)
        loss = our_loss(model, batch, old, ref_per_token_logps=ref, epsilon_high=epsilon_high, **settings)
        assert_same(loss_and_gradients(model, loss), expected)


@every_loss
def test_first_update_after_the_rollout(trainer, batch, ours, monkeypatch, loss_type):
    """No old log-probabilities: TRL and this package then take the current ones. Forward with a shared prefix."""
    model, _, ref = ours
    expected = theirs(trainer, batch, None, ref, monkeypatch, loss_type=loss_type, beta=0.1)
    logps = group_logps(model, *ids(batch), num_generations=GENERATIONS, temperature=TEMPERATURE)
    options = {"ref_per_token_logps": ref, "beta": 0.1, "loss_type": loss_type, "use_bias_correction_kl": True}
    loss = our_loss(model, batch, None, logps=logps, **options)
    assert_same(loss_and_gradients(model, loss), expected)


@every_loss
def test_importance_weights(trainer, batch, ours, monkeypatch, loss_type):
    model, old, ref = ours
    weights = torch.rand(old.shape, generator=torch.Generator().manual_seed(7)) * 2
    weights = torch.where(batch["completion_mask"] == 1, weights, 1.0)  # as TRL makes them
    settings = {"loss_type": loss_type}
    vllm = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    weighted = {**batch, "importance_sampling_ratio": weights}
    expected = theirs(trainer, weighted, old, ref, monkeypatch, **settings, **vllm)
    loss = our_loss(model, batch, old, importance_weights=weights, **settings)
    assert_same(loss_and_gradients(model, loss), expected)


@every_loss
def test_micro_batches(trainer, batch, ours, monkeypatch, loss_type):
    """One of two micro-batches: the denominators of a whole update."""
    model, old, ref = ours
    part = slice(0, GENERATIONS)
    half = {name: value[part] if value.ndim else value for name, value in batch.items()}
    with monkeypatch.context() as patch:
        patch.setattr(trainer.args, "steps_per_generation", 2)
        expected = theirs(
            trainer, half, old[part], ref[part], monkeypatch, loss_type=loss_type, current_gradient_accumulation_steps=2
        )
    loss = our_loss(model, half, old[part], loss_type=loss_type, num_items=batch["num_items_in_batch"])
    mask, options = half["completion_mask"], {"loss_type": loss_type, "max_completion_length": MAX_COMPLETION_LENGTH}
    if token_weights(mask, **options).equal(token_weights(mask, **options, num_items=99)):  # divided by its own rows
        loss = loss / 2
    assert_same(loss_and_gradients(model, loss), expected)


@pytest.mark.parametrize("per_token", [False, True])
@every_loss
def test_entropies_and_advantages_per_token(trainer, batch, ours, monkeypatch, loss_type, per_token):
    """The entropy bonus, next to a KL term, with advantages of each completion or of each token."""
    model, old, ref = ours
    advantages = batch["advantages"]
    if per_token:
        advantages = advantages[:, None] * torch.randn(old.shape, generator=torch.Generator().manual_seed(8))
    changed, settings = {**batch, "advantages": advantages}, {"loss_type": loss_type, "beta": 0.1}
    options = {"use_bias_correction_kl": False, "entropy_coef": 0.3, "_entropy_bonus_enabled": True}
    expected = theirs(trainer, changed, old, ref, monkeypatch, **settings, **options)
    mask = batch["completion_mask"]
    logps, entropies = per_token_logps(model, *ids(batch), temperature=TEMPERATURE, with_entropy=True)
    loss = our_loss(model, changed, old, logps=logps, ref_per_token_logps=ref, **settings)
    loss = loss - 0.3 * (entropies * mask).sum() / mask.sum()
    assert_same(loss_and_gradients(model, loss), expected)


def test_reinforce_is_trls_cispo_without_cap_at_ratio_one(trainer, batch, ours, monkeypatch):
    model, _, ref = ours
    by_rows = {**batch, "num_items_in_batch": torch.tensor(len(batch["advantages"]))}
    expected = theirs(trainer, by_rows, None, ref, monkeypatch, loss_type="cispo", epsilon_high=1e9)
    loss = our_loss(model, batch, None, loss_type="reinforce")
    assert_same(loss_and_gradients(model, loss), expected)


@pytest.mark.parametrize("options", [{}, {"use_bias_correction_kl": True}], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_metrics(trainer, batch, ours, monkeypatch, loss_type, level, options):
    model, old, ref = ours
    high = 1.1 if loss_type == "cispo" else 0.1
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1, "epsilon_high": high}
    settings |= {"use_bias_correction_kl": False, **options}
    _, _, expected = theirs(trainer, batch, old, ref, monkeypatch, epsilon_low=0.05, **settings)
    mask = batch["completion_mask"]
    with torch.no_grad():
        logps, entropy = per_token_logps(model, *ids(batch), temperature=TEMPERATURE, with_entropy=True)
    scored = SimpleNamespace(advantages=batch["advantages"], loss_mask=mask)
    training = Training(model, None, (), (), GRPOConfig(epsilon=0.05, **settings), None)
    update = Update(training, scored, torch.arange(len(mask)), mask, ref, old)
    metrics = policy_metrics(update, logps)
    assert metrics["kl"] > 0 and any(value > 0 for name, value in metrics.items() if "clip" in name)
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], abs=1e-5), name
    assert float(entropy.sum() / mask.sum()) == pytest.approx(expected["entropy"], abs=1e-5)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("mask_truncated", [False, True])
def test_advantages_and_masks(trainer, monkeypatch, scale_rewards, mask_truncated):
    """TRL's rollout method with the generation alone replaced: its rewards, its advantages, its masks."""
    monkeypatch.setattr(trainer, "scale_rewards", scale_rewards)
    monkeypatch.setattr(trainer, "mask_truncated_completions", mask_truncated)
    rewards = torch.tensor([1.0, 0.0, 2.5, -1.0, 0.5, 0.5, 0.5, 0.5])
    result = score(trainer, monkeypatch, rewards[:, None])
    expected = group_advantages(rewards, GENERATIONS, scale_rewards=scale_rewards)
    assert_close(expected, result["advantages"], **CLOSE)
    assert expected[:4].abs().max() > 0.5 and expected[4:].eq(0).all()
    # the conventions on which the losses' masks rest: the end token counts, a truncated row is all zeros
    assert result["completion_mask"][0].tolist() == [1, 1, 1, 0, 0]
    assert result["completion_mask"].sum(1)[[1, 4]].tolist() == ([0, 0] if mask_truncated else [5, 2])


def test_advantages_of_several_functions_that_do_not_apply_to_every_row(trainer, monkeypatch):
    """A row with one reward of two, a row without any, and a group of which one row alone is scored."""
    nan = float("nan")
    columns = [1.0, 0.0, 2.5, nan, 0.5, nan, nan, nan], [3.0, nan, 1.0, nan, 0.0, nan, nan, nan]
    rewards, weights = torch.tensor(columns).T, torch.tensor([1.0, -0.5])
    monkeypatch.setattr(trainer, "reward_weights", weights)
    result = score(trainer, monkeypatch, rewards)["advantages"]
    expected = group_advantages(combine_rewards(rewards, weights), GENERATIONS)
    assert_close(expected, result, **CLOSE)
    assert expected[:3].abs().min() > 0.1 and expected[3:].eq(0).all()


def score(trainer, monkeypatch, rewards):
    """What TRL's rollout method returns for given rewards (8, K) of eight given completions."""
    completions = [[7, 8, EOS], [9] * 5, [10, EOS], [EOS], [11, 12], [13, EOS], [14, 15, 16, EOS], [17, EOS]]
    texts = [" ".join(f"w{i}" for i in tokens) for tokens in completions]
    generated = ([[5, 6]] * 4 + [[7]] * 4, completions, None, texts, None, {}, None, None)
    monkeypatch.setattr(trainer, "_generate", lambda prompts: generated)
    columns = [[None if value != value else value for value in column] for column in rewards.T.tolist()]
    monkeypatch.setattr(trainer, "reward_funcs", [lambda column=column, **kwargs: column for column in columns])
    names = [f"reward_{number}" for number in range(len(columns))]
    monkeypatch.setattr(trainer, "reward_func_names", names)
    monkeypatch.setattr(trainer, "reward_processing_classes", [None] * len(columns))
    return trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * 4 + [{"prompt": "w3"}] * 4)


def test_the_keys_are_those_that_trl_logs(tmp_path):
    sizes = {"num_generations": 4, "max_completion_length": 5, "max_steps": 1}
    options = {"beta": 0.1, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "loss_type": "grpo"}
    make_model().save_pretrained(tmp_path / "model")  # with a KL term TRL loads it a second time
    theirs = make_trainer(tmp_path, late_letters, model=str(tmp_path / "model"), **options, max_steps=1)
    theirs.train()
    _, history = run(word_tokenizer(), GRPOConfig(**sizes, prompts_per_step=4, beta=0.1), [late_letters])
    assert set(history[0]) <= {"step", *theirs.state.log_history[0]}
    assert {"loss", "reward", "reward_std", "kl", "entropy", "num_tokens", "clip_ratio/region_mean"} <= set(history[0])
    assert all(isinstance(value, int | float) for row in history for value in row.values())


def test_settings_reach_the_trainer_under_the_same_names(tmp_path):
    """The names that `grpo_loss` shares with TRL's config mean the same attributes of its trainer."""
    trainer = make_trainer(
        tmp_path,
        loss_type="cispo",
        importance_sampling_level="sequence",
        epsilon=0.1,
        epsilon_high=4.0,
        beta=0.0,
        scale_rewards="batch",
        mask_truncated_completions=True,
        use_bias_correction_kl=False,
    )
    names = ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta", "scale_rewards")
    assert [getattr(trainer, name) for name in names] == ["cispo", "sequence", 0.1, 4.0, 0.0, "batch"]
    assert not trainer.args.use_bias_correction_kl
    assert trainer.max_completion_length == MAX_COMPLETION_LENGTH and trainer.mask_truncated_completions
