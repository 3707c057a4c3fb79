"""LoRA: what learns and what does not, the reference for nothing, and adapters into files and into the weights."""

import copy
import json

import pytest
import torch
from toy_policy import SMALL, late_letters, make_batch, make_model, run, sgd, update_policy, weights

from grpo_edu import trainer
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.lora import (
    adapter_base,
    adapters_off,
    add_lora,
    has_adapters,
    load_adapters,
    merge_lora,
    reference_policy,
    save_adapters,
)
from grpo_edu.fast.packing import per_token_logps
from grpo_edu.models import load_config, load_policy, save_policy
from grpo_edu.trainer import logps_of_rows

IDS = torch.tensor([[3, 4, 7, 9, 1]])


def lora(seed=1, **options):
    """Return the toy policy with adapters whose weights start where no other test's do."""
    base = make_model()
    torch.manual_seed(seed)
    return add_lora(base, **{"rank": 2, **options})


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_fresh_adapters_change_nothing_and_are_all_that_learns():
    model = lora()
    torch.testing.assert_close(logits(model), logits(make_model()))
    learns = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert learns and all("lora_" in name for name in learns)
    assert not any("lm_head" in name for name in learns)
    # per layer of H 16, MLP 32, head width 8: rank 2 times (in + out) of q, k, v, o, gate, up, down
    pairs = [(16, 16), (16, 8), (16, 8), (16, 16), (16, 32), (16, 32), (32, 16)]
    expected = 2 * 2 * sum(inputs + outputs for inputs, outputs in pairs)
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == expected
    assert not model.training


def test_a_run_trains_the_adapters_and_leaves_the_base_to_the_last_bit(tokenizer):
    config = GRPOConfig(**{**SMALL, "max_steps": 20, "num_generations": 8}, learning_rate=0.05)
    model, history = run(tokenizer, config, late_letters, model=lora(rank=4))
    rewards = [row["reward"] for row in history]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1
    base = [weight for name, weight in model.named_parameters() if "lora_" not in name]
    assert all(map(torch.equal, base, make_model().parameters()))
    with adapters_off(model):
        torch.testing.assert_close(logits(model), logits(make_model()))
    assert not torch.allclose(logits(model), logits(make_model()))


def test_the_gradient_is_that_of_the_merged_weights(tokenizer):
    """dL/dB = scale · dL/dW · Aᵀ and dL/dA = scale · Bᵀ · dL/dW, W being trained as a whole."""
    model = lora(alpha=6)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    whole = merge_lora(copy.deepcopy(model))
    config = GRPOConfig(**SMALL, max_grad_norm=0.0)
    batch = make_batch(whole, tokenizer, config)
    update_policy(model, batch, sgd(model, 0.0), config)
    update_policy(whole, batch, sgd(whole, 0.0), config)
    layer = model.get_decoder().layers[1].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    slope = whole.model.layers[1].mlp.up_proj.weight.grad
    torch.testing.assert_close(b.grad, 3.0 * slope @ a.T)
    torch.testing.assert_close(a.grad, 3.0 * b.T @ slope)


def test_the_reference_is_the_base_and_no_copy(tokenizer, monkeypatch):
    seen = []

    def watch(model, rollout, rows, config, **options):
        logps, _ = logps_of_rows(model, rollout, rows, config, **options)
        if not torch.is_grad_enabled():
            arguments = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
            seen.append((model, logps, per_token_logps(make_model(), *(part[rows] for part in arguments))))
        return logps, logps

    monkeypatch.setattr(trainer, "logps_of_rows", watch)
    model = lora()
    assert reference_policy(model) is model
    config = GRPOConfig(**{**SMALL, "max_steps": 3}, learning_rate=0.05, beta=0.05)
    _, history = run(tokenizer, config, model=model)
    assert len(seen) == 3
    for scorer, found, expected in seen:
        assert scorer is model
        torch.testing.assert_close(found, expected)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-12) and history[2]["kl"] > 1e-4
    assert all(weight.requires_grad for name, weight in model.named_parameters() if "lora_" in name)


def test_the_reference_of_a_whole_model_is_a_frozen_copy():
    model = make_model().train()
    reference = reference_policy(model)
    assert reference is not model and not reference.training
    assert not any(weight.requires_grad for weight in reference.parameters())
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    torch.testing.assert_close(weights(reference), weights(make_model()), atol=0.0, rtol=0.0)


def test_merged_weights_compute_the_same_and_are_saved_whole(tokenizer, tmp_path):
    config = GRPOConfig(**SMALL, learning_rate=0.05)
    model, _ = run(tokenizer, config, model=lora())
    expected = logits(model)
    with pytest.raises(ValueError, match="model has adapters"):
        save_policy(model, tokenizer, tmp_path / "policy")
    merged = merge_lora(model)
    torch.testing.assert_close(logits(merged), expected)
    assert type(merged) is type(make_model()) and all(weight.requires_grad for weight in merged.parameters())
    save_policy(merged, tokenizer, tmp_path / "policy")


def test_adapters_go_through_a_folder_and_learn_on(tokenizer, tmp_path):
    config = GRPOConfig(**SMALL, learning_rate=0.05)
    model, _ = run(tokenizer, config, model=lora())
    save_adapters(model, tmp_path / "adapters")
    sizes = {path.suffix: path.stat().st_size for path in (tmp_path / "adapters").iterdir()}
    assert 0 < sizes[".safetensors"] < 40_000 and set(sizes) == {".safetensors", ".json"}
    again = load_adapters(make_model(), tmp_path / "adapters")
    torch.testing.assert_close(logits(again), logits(model))
    learns = {name for name, weight in again.named_parameters() if weight.requires_grad}
    assert learns == {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_bfloat16_models_get_float32_adapters():
    model = add_lora(make_model(dtype=torch.bfloat16), rank=2)
    assert model.dtype == torch.bfloat16
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}


def test_adding_adapters_warns_of_nothing(recwarn):
    lora()
    assert [str(warning.message) for warning in recwarn] == []


def test_bad_input_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(ValueError, match="rank .*got 0"):
        lora(rank=0)
    with pytest.raises(ValueError, match="already has adapters.*merge_lora"):
        add_lora(lora())
    for names in (["nowhere"], ["q_proj", "nowhere"], ["proj"]):
        with pytest.raises(ValueError, match=f"target_modules.*'{names[-1]}'.*down_proj, .*q_proj"):
            lora(target_modules=names)
    for function in (merge_lora, lambda model: save_adapters(model, tmp_path / "x")):
        with pytest.raises(ValueError, match="no adapters.*add_lora"):
            function(make_model())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    with pytest.raises(FileExistsError, match="full is not empty; choose another"):
        save_adapters(lora(), tmp_path / "full")
    with pytest.raises(FileNotFoundError, match="has no adapter_config.json"):
        load_adapters(make_model(), tmp_path / "full")
    save_adapters(lora(), tmp_path / "adapters")
    with pytest.raises(ValueError, match="already has adapters"):
        load_adapters(lora(), tmp_path / "adapters")
    with pytest.raises(ValueError, match="do not fit this model"):
        load_adapters(make_model(hidden_size=32), tmp_path / "adapters")


def test_a_folder_of_adapters_is_a_policy(tokenizer, tmp_path):
    """`load_policy` finds the base model by its name and merges; the logits are those of base and adapters."""
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    save_policy(make_model(), tokenizer, base)
    model = add_lora(load_policy(base)[0], rank=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    save_adapters(model, adapters)
    assert adapter_base(adapters) == str(base)
    loaded, _ = load_policy(adapters)
    assert not has_adapters(loaded) and all(weight.requires_grad for weight in loaded.parameters())
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(loaded), logits(load_policy(base)[0]))
    assert load_config(adapters).hidden_size == model.config.hidden_size

    weights = (adapters / "adapter_model.safetensors").read_bytes()
    (adapters / "adapter_model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged"):
        load_policy(adapters)
    (adapters / "adapter_model.safetensors").write_bytes(weights)

    config = adapters / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match=r"base_model_name_or_path"):
        load_policy(adapters)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json is damaged"):
        load_policy(adapters)
    config.write_text(json.dumps(settings | {"base_model_name_or_path": "tiny"}))
    with pytest.raises(ValueError, match=r"do not fit"):
        load_policy(adapters)
