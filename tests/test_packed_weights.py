"""Packed weights give the same products, only inside their context, and only where there is plenty of memory."""

import pytest
import torch
from random_policy import byte_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_edu import GRPOConfig, generate
from grpo_edu.fast import packed_weights as module
from grpo_edu.fast.lora import add_lora
from grpo_edu.fast.packed_weights import packed_dtypes, packed_weights
from grpo_edu.rollout import Sampler

SIZES = dict(hidden_size=512, intermediate_size=640, num_attention_heads=8, num_key_value_heads=2)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_hidden_layers=2, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return Qwen2ForCausalLM(config).eval()


def packed(model) -> list[str]:
    """The layers that compute with packed weights now."""
    return [name for name, layer in model.named_modules() if "forward" in layer.__dict__]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_same_and_the_layers_come_back(model, dtype):
    model.to(dtype)
    ids = torch.arange(12).view(4, 3)
    plain = model(ids).logits
    with packed_weights(model, rows=4, steps=16):
        names = packed(model)
        if dtype == torch.bfloat16 and dtype not in packed_dtypes():
            assert not names  # the test below shows that a rollout continues
            return
        # q, o (512 × 512), gate, up, down (512 × 640); k and v (512 × 128) and the output layer are small
        assert len(names) == 2 * 5 and all("k_proj" not in name and "v_proj" not in name for name in names)
        inside = model(ids).logits
        torch.testing.assert_close(inside, plain, atol=2e-5 if dtype == torch.float32 else 5e-2, rtol=0)
    assert not packed(model)
    assert torch.equal(model(ids).logits, plain)


def test_a_format_that_the_processor_cannot_pack_is_sampled_without(model, tokenizer, monkeypatch):
    pack = torch.ops.mkldnn._reorder_linear_weight

    def refuse(weight, *args):
        if weight.dtype == torch.bfloat16:
            raise RuntimeError("bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq")
        return pack(weight, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    monkeypatch.setattr(module, "packed_dtypes", module.packed_dtypes.__wrapped__)  # ask again
    assert module.packed_dtypes() == (torch.float32,)
    options = dict(num_generations=4, max_completion_length=16, generator=torch.Generator().manual_seed(0))
    assert len(generate(model.to(torch.bfloat16), tokenizer, ["Two and two?"], **options).completion_ids) == 4


@torch.inference_mode()
def test_an_exception_inside_leaves_the_model_as_it_was(model):
    with pytest.raises(KeyError), packed_weights(model, rows=4, steps=16):
        raise KeyError
    assert not packed(model)


@pytest.mark.parametrize("setting", [dict(rows=1), dict(steps=4), dict(active=False)])
@torch.inference_mode()
def test_nothing_is_packed_where_it_does_not_help(model, setting):
    with packed_weights(model, **{"rows": 4, "steps": 16} | setting):
        assert not packed(model)


@torch.inference_mode()
def test_nothing_is_packed_without_plenty_of_memory(model, monkeypatch):
    size = 2 * 4 * (2 * 512 * 512 + 3 * 512 * 640)
    for available, expected in ((3 * size, True), (3 * size - 1, False)):
        monkeypatch.setattr(module, "memory_bytes", lambda room=available: (10**12, room))
        with packed_weights(model, rows=4, steps=16):
            assert bool(packed(model)) == expected


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_rollout_is_the_same_with_packed_weights(model, tokenizer, monkeypatch, lora_rank):
    """Below adapters the frozen layers are packed; the adapters are added as before."""
    seen = []
    if lora_rank:
        model = add_lora(model, rank=lora_rank)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    original = module._product
    monkeypatch.setattr(module, "_product", lambda *args: seen.append(1) or original(*args))
    rollouts = [
        generate(
            model,
            tokenizer,
            ["Two and two?"],
            num_generations=4,
            max_completion_length=16,
            pack_weights=pack,
            generator=torch.Generator().manual_seed(0),
        )
        for pack in (False, True)
    ]
    assert seen
    assert torch.equal(rollouts[0].completion_ids, rollouts[1].completion_ids)
    torch.testing.assert_close(*(rollout.sampling_per_token_logps for rollout in rollouts), atol=1e-4, rtol=0)


@pytest.mark.parametrize("memory_budget_gib", [None, 20.0])
def test_a_run_with_a_memory_budget_packs_nothing(model, tokenizer, monkeypatch, memory_budget_gib):
    asked = []
    monkeypatch.setattr("grpo_edu.rollout.generate", lambda *args, **options: asked.append(options["pack_weights"]))
    config = GRPOConfig(num_generations=2, memory_budget_gib=memory_budget_gib)
    Sampler(model, tokenizer, config).generate(["x"], None)
    assert asked == [memory_budget_gib is None]
