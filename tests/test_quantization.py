"""Quantized layers and models: against their own dequantized weights, their size, and what must be refused."""

import copy

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from safetensors.torch import save
from torch import nn
from torch.testing import assert_close

from grpo_edu.config import QUANTIZATION_SCHEMES, GRPOConfig, SupervisedConfig
from grpo_edu.fast.optimizers import build_optimizer
from grpo_edu.fast.packing import group_logps, per_token_logps
from grpo_edu.quantization import layers as quantized_layers
from grpo_edu.quantization.layers import DynamicInt8Linear, Int4Linear, Int8Embedding, Int8Linear
from grpo_edu.quantization.model import quantization_scheme, quantize_model, stored_bytes, stored_tensors
from grpo_edu.rollout import generate

MAKERS = {"int8-dynamic": DynamicInt8Linear, "int8-weight": Int8Linear.of, "int4-group": Int4Linear}
every_scheme = pytest.mark.parametrize("scheme", QUANTIZATION_SCHEMES)
every_layer = pytest.mark.parametrize("scheme", MAKERS)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    # 259 tokens, which 16 does not divide: the output layer must not go through the int4 kernel
    return random_model(tokenizer, sharpness=3.0, hidden_size=64, intermediate_size=96, stop_ids=range(0, 256, 16))


def linear(inputs=64, outputs=48, bias=True):
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs, bias=bias)


def overflowing(q, packed, scale, zero, *, shift=128):
    """oneDNN's product on a processor without VNNI: two products of 8 bits are added in 16 bits."""
    weight = packed.to_dense().int()  # (K, N)
    pairs = ((q + shift).int()[:, :, None] * weight).unflatten(1, (-1, 2)).sum(dim=2)
    return (pairs.clamp(-(2**15), 2**15 - 1).sum(dim=1) - shift * weight.sum(dim=0)) * scale


def broken(*args, **options):
    return torch.zeros(len(args[0]), len(args[-1]))


# ---- layers ----


@every_layer
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_layer_multiplies_its_dequantized_weights(scheme, rows):
    layer = linear()
    quantized = MAKERS[scheme](layer)
    x = torch.randn(rows, 2, 64, generator=torch.Generator().manual_seed(2))
    wanted = x @ quantized.parts().dequantize().t() + layer.bias
    got = quantized(x)
    # int8-dynamic rounds x to 1/127 of its row's largest number, the others to bfloat16 (2⁻⁹ of each)
    per_number = x.abs().amax(dim=-1, keepdim=True) / 254 if scheme == "int8-dynamic" else x.abs() / 256
    bound = per_number.expand(x.shape) @ quantized.parts().dequantize().abs().t() + wanted.abs() / 128 + 1e-3
    assert got.shape == wanted.shape and ((got - wanted).abs() <= bound).all()


@every_layer
def test_the_weights_of_a_layer_are_within_half_a_step(scheme):
    layer = linear()
    parts = MAKERS[scheme](layer).parts()
    difference = (layer.weight - parts.dequantize()).abs()
    assert parts.bits == (4 if scheme == "int4-group" else 8)
    steps = parts.scale if parts.group_size is None else parts.scale.expand(-1, -1, parts.group_size).flatten(1)
    assert (difference <= 0.5 * steps + 0.02 * layer.weight.abs().max()).all()  # int4 keeps its scales in bfloat16


@every_layer
def test_without_a_kernel_a_layer_says_so_and_gives_the_same(scheme, monkeypatch):
    fast, x = MAKERS[scheme](linear()), torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(quantized_layers, "kernel_way", lambda scheme: quantized_layers.DEQUANTIZED)
    with pytest.warns(RuntimeWarning, match=f"no kernel for '{scheme}'"):
        slow = MAKERS[scheme](linear())
    assert torch.equal(slow.parts().q, fast.parts().q)
    assert_close(slow(x), fast(x), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("way", ["that of this processor", quantized_layers.HALVES, quantized_layers.DEQUANTIZED])
@pytest.mark.filterwarnings("ignore:this processor")
def test_int8_products_are_exact_in_every_way(way, monkeypatch):
    if way in (quantized_layers.HALVES, quantized_layers.DEQUANTIZED):
        monkeypatch.setattr(quantized_layers, "kernel_way", lambda scheme: way)
    for inputs in (64, 512):
        plain = linear(inputs)
        layer = DynamicInt8Linear(plain)
        assert f"way={layer.way!r}" in repr(layer)
        for rows in (1, 5, 40):
            x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(7))
            step = x.abs().amax(dim=1, keepdim=True) / 127
            weight = plain.weight.detach()
            scale = weight.abs().amax(dim=1) / 127
            sums = (x / step).round().long() @ (weight / scale[:, None]).round().long().t()
            assert_close(layer(x), step * sums * scale + plain.bias.detach(), atol=1e-5, rtol=1e-5)


def test_a_kernel_that_overflows_gets_half_of_each_number_at_a_time(monkeypatch):
    plain, x = linear(512), torch.randn(5, 512, generator=torch.Generator().manual_seed(8))
    before = DynamicInt8Linear(plain)(x)
    monkeypatch.setattr(quantized_layers, "_onednn_product", overflowing)
    monkeypatch.setattr(quantized_layers, "kernel_way", quantized_layers.kernel_way.__wrapped__)  # ask again
    layer = DynamicInt8Linear(plain)
    assert layer.way == quantized_layers.HALVES
    assert_close(layer(x), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "scheme, kernel",
    [("int8-dynamic", "_onednn_product"), ("int8-weight", "_int8_weight_product"), ("int4-group", "_int4_product")],
)
def test_a_kernel_with_wrong_results_is_not_used(scheme, kernel, monkeypatch):
    monkeypatch.setattr(quantized_layers, kernel, broken)
    assert quantized_layers.kernel_way.__wrapped__(scheme) == quantized_layers.DEQUANTIZED


def test_a_row_does_not_depend_on_the_others_of_its_batch():
    layer = DynamicInt8Linear(linear())
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4))
    loud = torch.cat([x[:1], 1000 * x[1:]])
    assert_close(layer(loud)[0], layer(x)[0])
    assert_close(layer(torch.zeros(1, 64))[0], layer.bias)


def test_an_embedding_gives_its_dequantized_rows():
    table = torch.randn(7, 4, generator=torch.Generator().manual_seed(5))
    embedding = Int8Embedding(table)
    ids = torch.tensor([[6, 0], [3, 3]])
    assert_close(embedding(ids), embedding.parts().dequantize()[ids])
    assert_close(embedding(ids), table[ids], atol=0.02, rtol=0.0)


# ---- models ----


@every_scheme
@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_the_original_is_left_as_it_was(tokenizer, scheme, embeddings, tie_word_embeddings):
    model = random_model(tokenizer, hidden_size=64, intermediate_size=96, tie_word_embeddings=tie_word_embeddings)
    before = copy.deepcopy(model.state_dict())
    small = quantize_model(model.train(), scheme, embeddings=embeddings)
    assert model.training and not small.training
    with torch.no_grad():
        for tensor in (*small.parameters(), *small.buffers()):
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert quantization_scheme(model) is None and quantization_scheme(small) == scheme


@every_scheme
def test_a_quantized_model_is_close_and_can_be_sampled_and_scored(model, tokenizer, scheme):
    small = quantize_model(model, scheme)
    options = dict(num_generations=3, max_completion_length=6)
    rollout = generate(small, tokenizer, ["ab", "abcd"], generator=torch.Generator().manual_seed(0), **options)
    batch = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    with torch.no_grad():
        own, truth = per_token_logps(small, *batch), per_token_logps(model, *batch)
        shared = group_logps(small, *batch, num_generations=3)
    assert_close(own, rollout.sampling_per_token_logps, atol=0.15, rtol=0.0)  # bfloat16 sums in other orders
    assert_close(shared, own, atol=0.15, rtol=0.0)
    largest = {"bf16": 0.2, "int8-dynamic": 0.6, "int8-weight": 0.4, "int4-group": 4.0}[scheme]
    assert 0 < (own - truth).abs().max() < largest


@every_scheme
@pytest.mark.parametrize("embeddings", [True, False])
def test_sizes_equal_the_bytes_of_a_file(model, scheme, embeddings):
    small = quantize_model(model, scheme, embeddings=embeddings)
    content = save(stored_tensors(small))
    assert len(content) == 8 + int.from_bytes(content[:8], "little") + stored_bytes(small)


def test_embeddings_are_quantized_unless_told_otherwise(model):
    assert isinstance(quantize_model(model, "int8-weight").get_input_embeddings(), Int8Embedding)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_the_output_layer_rounds_what_it_reads_in_one_scheme_only(tokenizer, tie_word_embeddings):
    model = random_model(tokenizer, hidden_size=64, intermediate_size=96, tie_word_embeddings=tie_word_embeddings)
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, len(tokenizer)))
    kinds = {"int8-dynamic": DynamicInt8Linear, "int8-weight": Int8Linear, "int4-group": Int8Linear, "bf16": nn.Linear}
    for scheme, kind in kinds.items():
        output = quantize_model(model, scheme).get_output_embeddings()
        assert type(output) is kind, scheme
        assert_close(output.bias.float(), model.lm_head.bias.detach(), atol=0.01, rtol=0.0)


def test_sizes_by_hand(model, tokenizer):
    matrices = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)  # q and o, k and v, gate, up and down
    outputs = 3 * (2 * 64 + 2 * 32 + 2 * 96 + 64)
    rest = 4 * (7 * 64 + 3 * (64 + 32 + 32))  # norms, and the biases of q, k, v, in float32
    rows = len(tokenizer)
    assert stored_bytes(model) == 4 * (matrices + rows * 64) * 1 + rest + (0 if tied(model) else 4 * rows * 64)
    table = rows * 64 + 4 * rows
    copies = 1 if tied(model) else 2
    assert stored_bytes(quantize_model(model, "int8-weight")) == matrices + 4 * outputs + copies * table + rest
    assert stored_bytes(quantize_model(model, "int8-dynamic")) == matrices + 4 * outputs + 2 * table + rest
    int4 = matrices // 2 + 3 * matrices // 32  # a bfloat16 scale and a byte of zero point for 32 numbers
    assert stored_bytes(quantize_model(model, "int4-group")) == int4 + copies * table + rest
    assert 2 * stored_bytes(quantize_model(model, "bf16")) == stored_bytes(model)


def tied(model):
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_tied_table_is_held_once(tokenizer):
    tied_model = random_model(tokenizer, hidden_size=32, tie_word_embeddings=True)
    assert tied(tied_model)
    assert stored_bytes(tied_model) == sum(4 * weight.numel() for weight in tied_model.parameters())
    names = stored_tensors(quantize_model(tied_model, "int8-weight"))
    assert [name for name in names if "embed" in name or "head" in name] == [
        "model.embed_tokens.q",
        "model.embed_tokens.scale",
    ]
    kept = quantize_model(tied_model, "int8-weight", embeddings=False)
    assert kept.get_input_embeddings().weight.dtype == torch.float32
    assert torch.equal(kept.get_input_embeddings().weight, tied_model.get_input_embeddings().weight)


def test_a_model_in_bfloat16_can_be_quantized(model):
    small = quantize_model(copy.deepcopy(model).to(torch.bfloat16), "int8-weight")
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.isfinite(small(torch.tensor([[1, 2, 3]])).logits).all()


# ---- bad input ----


def test_an_unknown_scheme_is_refused_with_the_known_ones(model):
    with pytest.raises(ValueError, match="scheme.*int3.*bf16"):
        quantize_model(model, "int3")


@every_scheme
def test_a_quantized_model_is_not_quantized_again_and_learns_nothing(model, scheme):
    small = quantize_model(model, scheme)
    with pytest.raises(ValueError, match=f"model.*already.*{scheme}"):
        quantize_model(small, "int8-weight")
    for config in (GRPOConfig(), SupervisedConfig()):
        with pytest.raises(ValueError, match=f"model.*quantized.*{scheme}.*rollout_quantization"):
            build_optimizer(small, config)


def test_a_shape_that_the_kernel_does_not_take_is_named(tokenizer):
    odd = random_model(tokenizer, hidden_size=48, intermediate_size=96)
    with pytest.raises(ValueError, match=r"0\.self_attn\.q_proj \(48 inputs.* 32.*'int8-weight'"):
        quantize_model(odd, "int4-group")
    with pytest.warns(RuntimeWarning, match="multiple of 32 inputs, and a layer has 48"):
        assert quantization_scheme(quantize_model(odd, "int8-weight")) == "int8-weight"


@pytest.mark.filterwarnings("ignore:the int8 kernel needs")
@pytest.mark.parametrize("inputs", [8, 36, 100])
def test_the_int8_kernel_does_not_read_beyond_the_end_of_a_row(inputs):
    """Where the number of inputs does not fit, PyTorch's kernel gives NaN or ends the process."""
    layer = Int8Linear.of(linear(inputs, 16))
    x = torch.randn(2, inputs, generator=torch.Generator().manual_seed(4))
    assert_close(layer(x), x @ layer.parts().dequantize().t() + layer.bias)


def test_a_model_without_linear_layers_or_with_adapters_is_refused(tokenizer, model):
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    with pytest.raises(ValueError, match="GPT2LMHeadModel.*nn.Linear"):
        quantize_model(gpt2, "int8-weight")
    carrying = copy.deepcopy(model)
    carrying.peft_config = {}
    with pytest.raises(ValueError, match="adapters.*merge_and_unload"):
        quantize_model(carrying, "int8-weight")


def test_weights_that_diverged_are_refused(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        quantize_model(broken, "int8-dynamic")


def test_one_row_gives_what_it_gives_among_others():
    """A single row takes another way through the kernel."""
    layer = DynamicInt8Linear(linear())
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    for row in range(3):
        assert_close(layer(x[row : row + 1]), layer(x)[row : row + 1])
