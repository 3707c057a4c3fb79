"""Log-probabilities against the model's own full logits, token by token."""

import copy
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_edu.fast import chunked_logps, packing
from grpo_edu.fast.packing import block_mask_obstacle, group_logps, pack_groups, per_token_logps
from grpo_edu.logprobs import entropies, logps_from_logits

VOCAB, GENERATIONS, EOS = 64, 3, 2
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
)


def make_model(kind=Qwen2ForCausalLM, config=None, **options):
    torch.manual_seed(0)
    return kind(config or Qwen2Config(**{**SIZES, **options})).eval()


def make_gpt2():
    """The random GPT-2 starts nearly uniform; wider weights make its gradients large enough to compare."""
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    return make_model(GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, **options))


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_batch(prompt_lengths, completion_lengths, seed=0, extra=1):
    """Prompts for groups of GENERATIONS, with random tokens in the padding as well."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(completion_lengths)
    width, columns = max(prompt_lengths) + extra, max(completion_lengths) + extra
    lengths = torch.tensor(prompt_lengths)[:, None]
    prompt_ids = torch.randint(VOCAB, (len(prompt_lengths), width), generator=generator)
    prompt_mask = (torch.arange(width) >= width - lengths).long()
    completion_ids = torch.randint(VOCAB, (rows, columns), generator=generator)
    completion_mask = (torch.arange(columns) < torch.tensor(completion_lengths)[:, None]).long()
    repeat = rows // len(prompt_lengths)
    return (
        prompt_ids.repeat_interleave(repeat, 0),
        prompt_mask.repeat_interleave(repeat, 0),
        completion_ids,
        completion_mask,
    )


BATCH = make_batch([5, 2], [4, 1, 6, 0, 3, 7])


def one_by_one(model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature=1.0):
    """The definition: each row alone, without padding, log-softmax of the model's full logits."""
    logps, entropy = torch.zeros(completion_ids.shape), torch.zeros(completion_ids.shape)
    for row in range(len(prompt_ids)):
        prompt = prompt_ids[row][prompt_mask[row] == 1]
        completion = completion_ids[row][completion_mask[row] == 1]
        logits = model(torch.cat([prompt, completion])[None]).logits[0] / temperature
        for t, token in enumerate(completion):
            distribution = logits[len(prompt) + t - 1].log_softmax(-1)
            logps[row, t] = distribution[token]
            entropy[row, t] = -(distribution.exp() * distribution).sum()
    return logps, entropy


def both_ways(model, batch, **options):
    return (
        per_token_logps(model, *batch, **options),
        group_logps(model, *batch, num_generations=GENERATIONS, **options),
    )


def gradients(model, logps, weights):
    model.zero_grad()
    (logps * weights).sum().backward(retain_graph=True)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_hand_worked_log_probabilities_and_entropies():
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]).log()[None]
    assert_close(logps_from_logits(logits, torch.tensor([[1, 1]])), torch.tensor([[math.log(0.25), 0.0]]))
    assert_close(entropies(logits), torch.tensor([[1.5 * math.log(2), 0.0]]))
    assert_close(entropies(torch.full((1, 1, 10), 3.0)), torch.tensor([[math.log(10)]]))


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=8), st.floats(-50, 50))
def test_probabilities_sum_to_one_and_a_shift_of_logits_is_nothing(row, shift):
    logits = torch.tensor(row, dtype=torch.float64)[None]
    ids = torch.arange(len(row))
    logps = logps_from_logits(logits.expand(len(row), -1), ids)
    assert_close(logps.exp().sum(), torch.tensor(1.0, dtype=torch.float64))
    assert_close(logps_from_logits((logits + shift).expand(len(row), -1), ids), logps)
    assert_close(entropies(logits)[0], -(logps.exp() * logps).sum())


def test_gradients_of_the_pure_functions_by_finite_differences():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    ids = torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert torch.autograd.gradcheck(lambda z: logps_from_logits(z, ids), logits)
    assert torch.autograd.gradcheck(entropies, logits)


def test_half_precision_logits_are_raised_to_float32():
    logits = torch.tensor([[[8.0, 0.0, 0.0]]])
    ids = torch.tensor([[0]])
    assert_close(logps_from_logits(logits.bfloat16(), ids), logps_from_logits(logits, ids))
    assert entropies(logits.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_both_functions_agree_with_the_definition(model, temperature, chunk_size):
    expected = one_by_one(model, *BATCH, temperature)
    for result in both_ways(model, BATCH, temperature=temperature, chunk_size=chunk_size, with_entropy=True):
        assert_close(result[0], expected[0])
        assert_close(result[1], expected[1])
        assert result[0].requires_grad and result[1].requires_grad


def test_both_functions_have_the_gradients_of_the_definition(model):
    """In float64, except for the norms, which transformers computes in float32."""
    model = copy.deepcopy(model).double()
    weights = torch.randn(BATCH[3].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = gradients(model, one_by_one(model, *BATCH)[0], weights)
    for result in both_ways(model, BATCH):
        assert_close(gradients(model, result, weights), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_shared_prefix_equals_plain_for_any_lengths(prompt_lengths, data):
    size = len(prompt_lengths) * GENERATIONS
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    model = make_model(num_hidden_layers=1)
    with torch.no_grad():
        plain, shared = both_ways(model, make_batch(prompt_lengths, lengths, seed=data.draw(st.integers(0, 9))))
    assert_close(shared, plain)


def test_content_and_amount_of_padding_are_irrelevant(model):
    ids, masks = BATCH[::2], BATCH[1::2]
    changed = []
    for token in (0, 63, -100, 10_000):
        filled = [tokens.masked_fill(mask == 0, token) for tokens, mask in zip(ids, masks, strict=True)]
        changed.append((filled[0], masks[0], filled[1], masks[1]))
    sides, fills = ((3, 0), (3, 0), (0, 2), (0, 2)), (9, 0, 9, 0)
    wider = [
        torch.nn.functional.pad(tensor, side, value=fill)
        for tensor, side, fill in zip(BATCH, sides, fills, strict=True)
    ]
    for function, options in ((per_token_logps, {}), (group_logps, {"num_generations": GENERATIONS})):
        expected = function(model, *BATCH, **options)
        for batch in changed:
            assert torch.equal(function(model, *batch, **options), expected)
        assert_close(function(model, *wider, **options), torch.nn.functional.pad(expected, (0, 2)))


def test_padding_scores_zero_and_passes_no_gradient(model):
    logps, entropy = per_token_logps(model, *BATCH, with_entropy=True)
    padding = BATCH[3] == 0
    assert logps[padding].eq(0).all() and entropy[padding].eq(0).all()
    assert logps[~padding].lt(0).all() and entropy[~padding].gt(0).all()
    assert gradients(model, logps, padding.float()).eq(0).all()


def test_the_end_token_inside_the_mask_is_scored(model):
    """Stopping is an action: its log-probability counts, also where the padding is the same token."""
    prompt, completion = torch.tensor([[7, 8]]), torch.tensor([[11, 12, EOS, EOS]])
    mask = torch.tensor([[1, 1, 1, 0]])
    logps = per_token_logps(model, prompt, torch.ones_like(prompt), completion, mask)
    logits = model(torch.tensor([[7, 8, 11, 12]])).logits[0, -1]
    assert_close(logps[0, 2], logits.log_softmax(-1)[EOS])
    assert logps[0, 3] == 0


def test_rows_of_zeros_score_nothing_even_when_all_are(model):
    batch = (*BATCH[:3], torch.zeros_like(BATCH[3]))
    for logps in both_ways(model, batch):
        assert logps.eq(0).all()
        assert gradients(model, logps, torch.ones(logps.shape)).eq(0).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
def test_chunks_change_neither_values_nor_gradients(chunk_size, with_bias):
    model = make_gpt2().double()
    if with_bias:
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB, dtype=torch.float64))
    weights = torch.randn(BATCH[3].shape, generator=torch.Generator().manual_seed(1))
    expected, entropy = per_token_logps(model, *BATCH, with_entropy=True)
    expected_gradients = gradients(model, expected, weights), gradients(model, entropy, weights)
    exact = {"rtol": 0.0, "atol": 1e-11}
    for logps, chunked_entropy in both_ways(model, BATCH, chunk_size=chunk_size, with_entropy=True):
        assert_close(logps, expected, **exact)
        assert_close(chunked_entropy, entropy, **exact)
        found = gradients(model, logps, weights), gradients(model, chunked_entropy, weights)
        assert_close(found, expected_gradients, **exact)


@pytest.fixture
def seen(monkeypatch):
    """The shapes of the logits that are computed."""
    shapes, chunk_logits = [], chunked_logps._logits

    def watched(*arguments):
        logits = chunk_logits(*arguments)
        shapes.append(logits.shape)
        return logits

    monkeypatch.setattr(chunked_logps, "_logits", watched)
    return shapes


@pytest.mark.parametrize("with_bias", [False, True])
def test_never_more_logits_than_a_chunk_and_never_for_the_prompt(seen, with_bias):
    model = make_model()
    if with_bias:
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
        model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with torch.no_grad():
        both_ways(model, BATCH, chunk_size=4)
    assert all(shape[0] <= 4 and len(shape) == 2 for shape in seen)
    tokens = int(BATCH[3].sum())
    # with a shared prefix, the first tokens of a group (3 and, next to an empty completion, 2) share their logits
    assert sum(shape[0] for shape in seen) == tokens + tokens - 2 - 1


def test_as_many_logits_at_once_as_make_128_mib(monkeypatch, seen):
    assert 4 * chunked_logps.LOGITS_PER_CHUNK == 128 * 2**20
    model = make_model()
    for room, rows in ((5 * VOCAB - 1, 4), (1, 1)):  # four whole rows of logits; never less than one
        seen.clear()
        monkeypatch.setattr(chunked_logps, "LOGITS_PER_CHUNK", room)
        with torch.no_grad():
            per_token_logps(model, *BATCH)
        sizes = [shape[0] for shape in seen]
        assert set(sizes[:-1]) == {rows} and sum(sizes) == BATCH[3].sum()


def test_logits_of_several_chunks_are_computed_again_and_those_of_one_are_kept():
    model, calls, tokens = make_model(), [], int(BATCH[3].sum())
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    model.lm_head.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    for chunk_size, forward, with_backward in ((tokens, 1, 1), (tokens - 1, 2, 4), (tokens // 3, 3, 6)):
        calls.clear()
        logps = per_token_logps(model, *BATCH, chunk_size=chunk_size)
        assert len(calls) == forward
        logps.sum().backward()
        assert len(calls) == with_backward


def test_no_keys_and_values_are_kept_for_tokens_to_come():
    model, kept = make_model(), []
    model.get_decoder().register_forward_hook(lambda module, inputs, output: kept.append(output.past_key_values))
    both_ways(model, BATCH)
    assert kept == [None, None]


def test_packed_rows_hold_no_padding_between_completions():
    prompt = torch.tensor([[0, 0, 8, 9], [1, 2, 3, 4]]).repeat_interleave(GENERATIONS, 0)
    completion = torch.tensor([[30, 31, 5], [20, 5, 0], [5, 0, 0], [10, 5, 0], [0, 0, 0], [11, 12, 5]])
    rows = pack_groups(prompt, prompt.sign(), completion, completion.sign(), GENERATIONS)
    # in alphabetical order, the closing 5s left out; the second row has one token more than the first
    assert rows.input_ids.tolist() == [[8, 9, 20, 30, 31, 0, 0], [1, 2, 3, 4, 10, 11, 12]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 2, 3, 0, 0], [0, 1, 2, 3, 4, 4, 5]]
    assert rows.seen_until.tolist() == [[7, 7, 3, 5, 5, 0, 0], [7, 7, 7, 7, 5, 7, 7]]
    assert rows.source[completion != 0].tolist() == [1, 3, 4, 1, 2, 1, 3, 4, 3, 5, 6]


def test_a_common_beginning_stands_once():
    """A tree by hand: 5 5 6 | 5 5 7 | 5 | 5 5 6 again | 9, each closed by a 2, behind a prompt of two tokens."""
    completion = torch.tensor([[5, 5, 6, 2], [5, 5, 7, 2], [5, 2, 0, 0], [5, 5, 6, 2], [9, 2, 0, 0]])
    prompt = torch.tensor([[8, 8]]).expand(5, 2)
    rows = pack_groups(prompt, prompt.sign(), completion, completion.sign(), 5)
    assert rows.input_ids.tolist() == [[8, 8, 5, 5, 6, 7, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 2]]
    assert rows.seen_until.tolist() == [[7, 7, 6, 6, 5, 6, 7]]
    expected = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [1, 2, 3, 4], [1, 6]]
    found = [row[mask != 0].tolist() for row, mask in zip(rows.source, completion, strict=True)]
    assert found == expected


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_trees_of_completions_have_the_values_and_gradients_of_plain_rows(data):
    """Completions over two tokens begin alike nearly always. GPT-2 keeps to float64 (Qwen2's norms do not)."""
    model = make_gpt2().double()
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=2 * GENERATIONS, max_size=2 * GENERATIONS))
    batch = list(make_batch([3, 5], lengths, seed=data.draw(st.integers(0, 99))))
    batch[2] = batch[2] % 2
    weights = torch.randn(batch[3].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (plain, shared), (_, chunked) = both_ways(model, batch), both_ways(model, batch, chunk_size=2)
    exact = {"rtol": 0.0, "atol": 1e-11}
    for logps in (shared, chunked):
        assert_close(logps, plain, **exact)
        assert_close(gradients(model, logps, weights), gradients(model, plain, weights), **exact)
        plain = per_token_logps(model, *batch)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
        (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
        (LlamaForCausalLM, LlamaConfig(**SIZES)),
        (GPT2LMHeadModel, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    ],
)
def test_other_models_and_attention_implementations(kind, config, attention):
    model = make_model(kind, config)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        expected = one_by_one(model, *BATCH)[0]
        for logps in both_ways(model, BATCH):
            assert_close(logps, expected)


def test_bfloat16_models_score_in_float32():
    model = make_model()
    expected = per_token_logps(model, *BATCH)
    for logps in both_ways(model.to(torch.bfloat16), BATCH):
        assert logps.dtype == torch.float32
        assert_close(logps, expected, atol=0.25, rtol=0.05)


def test_a_sliding_window_is_kept():
    model = make_model(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with torch.no_grad():
        assert_close(per_token_logps(model, *BATCH), one_by_one(model, *BATCH)[0])


def test_a_group_is_read_together_where_that_is_possible_and_else_with_a_word(monkeypatch):
    """The longest row is a prompt of 5 and 3 + 0 + 5 inner tokens of its completions: 13, one more than a window."""
    options = {"num_generations": GENERATIONS, "temperature": 0.7}
    narrow, wide = (make_model(use_sliding_window=True, sliding_window=n, max_window_layers=0) for n in (12, 13))
    with torch.no_grad():
        expected = [per_token_logps(model, *BATCH, temperature=0.7) for model in (narrow, wide)]
        with pytest.warns(RuntimeWarning, match="sliding window of 12 .*once per completion") as said:
            assert_close(group_logps(narrow, *BATCH, **options), expected[0])
        assert said[0].filename == __file__  # it points at who called
        usual = per_token_logps(wide, *BATCH)
        monkeypatch.setattr(packing, "per_token_logps", None)
        assert_close(group_logps(wide, *BATCH, **options), expected[1])
        assert_close(group_logps(wide, *BATCH, num_generations=GENERATIONS), usual)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be .*positive"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"prompt_mask": torch.ones(6, 5)}, "prompt_ids and prompt_mask .*shape"),
        ({"completion_ids": torch.ones(6, 0), "completion_mask": torch.ones(6, 0)}, "not be empty"),
        ({"prompt_ids": torch.ones(2, 6), "prompt_mask": torch.ones(2, 6)}, "prompt_ids and completion_ids .*2 and 6"),
        ({"prompt_mask": torch.zeros(6, 6)}, "prompt_mask has a row of zeros"),
        ({"completion_mask": torch.tensor([[1, 0, 1, 0, 0, 0, 0, 0]] * 6)}, "ones, then zeros"),
        ({"prompt_ids": BATCH[0].masked_fill(BATCH[1] == 1, -3)}, "prompt_ids must not be negative.*got -3 in row 0"),
        ({"completion_ids": BATCH[2].masked_fill(BATCH[3] == 1, -1)}, "completion_ids must not be negative.*got -1"),
    ],
)
def test_bad_input_is_refused_with_a_word(model, changes, message):
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    arguments = {**dict(zip(names, BATCH, strict=True)), **changes}
    with pytest.raises(ValueError, match=message):
        per_token_logps(model, **arguments)
    with pytest.raises(ValueError, match=message):
        group_logps(model, **arguments, num_generations=GENERATIONS)


def test_groups_that_are_no_groups_are_refused(model):
    with pytest.raises(ValueError, match="num_generations = 4 does not divide the 6 rows"):
        group_logps(model, *BATCH, num_generations=4)
    with pytest.raises(ValueError, match="prompt_ids differs within a group"):
        group_logps(model, *BATCH, num_generations=2)


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="causal language model of transformers, got Linear"):
        per_token_logps(torch.nn.Linear(2, 2), *BATCH)
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    assert re.search("'flash_attention_2' attention.*attn_implementation='sdpa'", block_mask_obstacle(model, 4))


@pytest.mark.parametrize(
    "name", ["final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "output_multiplier"]
)
def test_logits_that_change_behind_the_output_layer_are_refused(name):
    model = make_model(num_hidden_layers=1)
    for usual in (None, 1.0):  # both say: unchanged
        setattr(model.config, name, usual)
        assert per_token_logps(model, *BATCH).isfinite().all()
    setattr(model.config, name, 30.0)
    with pytest.raises(ValueError, match=rf"output layer \({name}\)"):
        per_token_logps(model, *BATCH)


def test_models_whose_tokens_cannot_share_a_prompt_are_known():
    """Bloom knows places by distances between tokens, and other layers than attention read a row as it comes."""
    bloom = make_model(BloomForCausalLM, BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4))
    mixed = make_model()
    mixed.config.layer_types = ["full_attention", "linear_attention"]
    for model, message in (
        (bloom, "takes no position_ids, so completions cannot share a prompt"),
        (mixed, "has linear_attention layers, which support no block mask"),
    ):
        assert message in block_mask_obstacle(model, 4)


def test_shapes_of_pure_functions_are_checked():
    with pytest.raises(ValueError, match="ids .*got"):
        logps_from_logits(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"logits .*\(B, C, V\)"):
        entropies(torch.zeros(5))
