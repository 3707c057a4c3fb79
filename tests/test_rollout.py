"""Rollouts against transformers' own `generate`, a plain forward, and exact probabilities."""

import itertools

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from scipy.stats import chi2
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from grpo_edu.fast.decoding import TreeDecoder
from grpo_edu.rollout import Rollout, filter_logits, generate, sample_tokens

PROMPTS = ["Two and two?", "A much longer question about 17 apples and 4 pears.", "x", "How many?"]
# A random model stops at one token in 259; with these bytes as stop tokens too, rows end early and at
# different times.
STOPS = tuple(range(0, 256, 16))


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return random_model(tokenizer, stop_ids=STOPS)


def transformers_greedy(model, tokenizer, prompt, length, **options):
    """Completion ids of one prompt, alone in its batch."""
    ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).input_ids
    with torch.no_grad():
        mask = torch.ones_like(ids)
        rows = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=length, **options)
    return rows[0, ids.shape[1] :].tolist()


def through_first(stops, tokens):
    """The tokens through the first of `stops`."""
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))]


def written(rollout):
    return [
        row[mask.bool()].tolist() for row, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)
    ]


def sampled(model, tokenizer, prompts=PROMPTS, *, seed=0, **options):
    options = {"num_generations": 4, "max_completion_length": 24, **options}
    return generate(model, tokenizer, prompts, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize(
    "kind, config, options",
    [
        (Qwen2ForCausalLM, Qwen2Config, {}),
        (Qwen2ForCausalLM, Qwen2Config, {"attn_implementation": "eager"}),
        (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
        (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
        (LlamaForCausalLM, LlamaConfig, {}),
        (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
        (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 8, "head_dim": 8}),
        (GPT2LMHeadModel, GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
    ids=["qwen2", "eager", "tied", "qwen2-sliding", "qwen3", "llama", "mistral", "gemma3", "gpt2"],
)
def test_greedy_tokens_are_those_of_transformers(tokenizer, kind, config, options):
    model = random_model(tokenizer, kind, config, **options)
    unstopped = [transformers_greedy(model, tokenizer, prompt, 24) for prompt in PROMPTS]
    # Stop at the last token that is new in the first prompt's completion, and likewise in the second's.
    stops = {list(dict.fromkeys(tokens))[-1] for tokens in unstopped[:2]}
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    expected = [through_first(stops, tokens) for tokens in unstopped]
    assert len(set(map(len, expected))) > 1  # rows do end at different steps
    rollout = generate(model, tokenizer, PROMPTS, num_generations=2, max_completion_length=24, temperature=0)
    assert written(rollout) == [tokens for tokens in expected for _ in range(2)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_logps_are_those_of_a_plain_forward(model, tokenizer, temperature):
    rollout = sampled(model, tokenizer, temperature=temperature, top_p=0.9)
    mask = torch.cat([rollout.prompt_mask, rollout.completion_mask], dim=1)
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    width = rollout.completion_ids.shape[1]
    logps = (logits[:, -width - 1 : -1] / temperature).log_softmax(-1)
    logps = logps.gather(2, rollout.completion_ids[..., None]).squeeze(2) * rollout.completion_mask
    torch.testing.assert_close(rollout.sampling_per_token_logps, logps, rtol=0, atol=1e-4)


def test_greedy_logps_are_at_temperature_one(model, tokenizer):
    rollout = generate(model, tokenizer, ["x"], num_generations=1, max_completion_length=1, temperature=0)
    with torch.no_grad():
        logps = model(rollout.prompt_ids).logits[0, -1].log_softmax(-1)
    assert rollout.sampling_per_token_logps.item() == pytest.approx(logps.max().item(), abs=1e-5)


def exact_probabilities(model, tokenizer, prompt, length, stops, **filters):
    """Probability of every sequence of up to `length` tokens, by enumeration with plain forwards."""
    prompt_ids = tokenizer(prompt).input_ids
    probabilities, open_sequences = {}, {(): 1.0}
    for step in range(length):
        batch = torch.tensor([[*prompt_ids, *sequence] for sequence in open_sequences])
        with torch.no_grad():
            logits = model(batch).logits[:, -1]
        following = filter_logits(logits, **filters).softmax(-1).double()
        longer = {}
        for (sequence, weight), row in zip(open_sequences.items(), following, strict=True):
            for token in row.nonzero().squeeze(1).tolist():
                share = row[token].item()
                ended = token in stops or step + 1 == length
                (probabilities if ended else longer)[(*sequence, token)] = weight * share
        open_sequences = longer
    return probabilities


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.8}], ids=["plain", "filtered"])
def test_sampled_sequences_have_the_exact_distribution(tokenizer, filters):
    """χ² of 8,000 sequences of up to 3 tokens over an alphabet that the model's head narrows to 7."""
    model = random_model(tokenizer, stop_ids=(3,), sharpness=5.0, tie_word_embeddings=False)
    narrow_to_seven_tokens(model)
    exact = exact_probabilities(model, tokenizer, "Go:", 3, {3, tokenizer.eos_token_id}, **filters)
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-5)
    rollout = generate(
        model,
        tokenizer,
        ["Go:", "A longer neighbor in the batch:"],
        num_generations=8_000,
        max_completion_length=3,
        generator=torch.Generator().manual_seed(3),
        **filters,
    )
    counts = {}
    for row in written(rollout)[:8_000]:
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    assert all(exact[sequence] > 0 for sequence in counts)
    likely = {sequence: 8_000 * share for sequence, share in exact.items() if 8_000 * share >= 5}
    rest = 8_000 - sum(likely.values())
    statistic = sum((counts.get(sequence, 0) - mean) ** 2 / mean for sequence, mean in likely.items())
    if rest >= 5:
        statistic += (8_000 - sum(counts.get(sequence, 0) for sequence in likely) - rest) ** 2 / rest
    assert len(likely) >= 20
    assert chi2.sf(statistic, df=len(likely) - (rest < 5)) > 0.001


def narrow_to_seven_tokens(model):
    """Give the head a bias that leaves only tokens 0 to 6 a probability."""
    bias = torch.full((model.config.vocab_size,), -1e4)
    bias[:7] = 0.0
    model.lm_head.bias = torch.nn.Parameter(bias)


def test_tokens_do_not_depend_on_which_rows_still_run(tokenizer):
    """A row samples the same whether its neighbors stop early, and are dropped, or never stop."""
    stopping = sampled(random_model(tokenizer, stop_ids=STOPS), tokenizer)
    running = sampled(random_model(tokenizer), tokenizer)
    assert stopping.completion_mask.sum() < running.completion_mask.sum()
    for short, long in zip(written(stopping), written(running), strict=True):
        assert short == long[: len(short)]


def test_a_prompt_samples_the_same_beside_longer_ones(model, tokenizer):
    """Left padding is invisible: the first prompt's greedy rows do not change with its neighbors."""
    alone = sampled(model, tokenizer, PROMPTS[:1], temperature=0)
    beside = sampled(model, tokenizer, PROMPTS, temperature=0)
    assert written(alone) == written(beside)[:4]
    assert beside.prompt_mask[:4].sum() == alone.prompt_mask.sum() < beside.prompt_mask[:4].numel()


def test_content_of_padding_is_irrelevant(model, tokenizer):
    ids = torch.tensor([[258, 258, 65, 66], [67, 68, 69, 70]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    garbage = torch.where(mask.bool(), ids, 7)
    logits = []
    for prompt_ids in (ids, garbage):
        with torch.inference_mode():
            decoder = TreeDecoder(model, prompt_ids, mask, 2, 8)
            decoder.step(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 2, 3, 4]))
            logits.append(decoder.logits)
    assert torch.equal(*logits)


def test_rows_of_a_group_are_adjacent_and_shapes_hold(model, tokenizer):
    rollout = sampled(model, tokenizer)
    assert rollout.prompts == [prompt for prompt in PROMPTS for _ in range(4)]
    assert rollout.prompt_ids.shape == (16, len(PROMPTS[1])) == rollout.prompt_mask.shape
    for row, mask, prompt in zip(rollout.prompt_ids, rollout.prompt_mask, rollout.prompts, strict=True):
        assert row[mask.bool()].tolist() == tokenizer(prompt).input_ids
        assert mask.tolist() == sorted(mask.tolist())  # left padding
        assert (row[~mask.bool()] == tokenizer.pad_token_id).all()
    assert rollout.completion_mask.sum(1).max() == rollout.completion_ids.shape[1]  # trimmed to the longest
    assert rollout.num_generations == 4


def test_masks_run_through_the_first_stop_token(model, tokenizer):
    rollout = sampled(model, tokenizer)
    stops = {tokenizer.eos_token_id, *STOPS}
    assert 0 < rollout.is_truncated.sum() < 16  # the case has both
    for row, mask, truncated in zip(rollout.completion_ids, rollout.completion_mask, rollout.is_truncated, strict=True):
        tokens = row[mask.bool()].tolist()
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
        assert not stops.intersection(tokens[:-1])
        assert (tokens[-1] not in stops) == truncated.item()
        assert len(tokens) == 24 or not truncated
        assert (row[len(tokens) :] == tokenizer.pad_token_id).all()
    assert (rollout.sampling_per_token_logps[rollout.completion_mask == 0] == 0).all()
    assert (rollout.sampling_per_token_logps[rollout.completion_mask == 1] < 0).all()


def test_completions_are_decoded_without_special_tokens(model, tokenizer):
    rollout = sampled(model, tokenizer)
    for completion, ids in zip(rollout.completions, written(rollout), strict=True):
        assert completion == tokenizer.decode(ids, skip_special_tokens=True)
        assert "<|" not in completion


def test_all_rows_may_stop_in_the_first_step(tokenizer):
    model = random_model(tokenizer, stop_ids=range(len(tokenizer)))
    rollout = sampled(model, tokenizer)
    assert rollout.completion_ids.shape == (16, 1)
    assert not rollout.is_truncated.any()


def test_one_token_of_room(model, tokenizer):
    rollout = sampled(model, tokenizer, max_completion_length=1, num_generations=1)
    assert rollout.completion_ids.shape == (4, 1)


def test_a_seed_repeats_the_rollout(model, tokenizer):
    first, again, other = (sampled(model, tokenizer, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert torch.equal(first.sampling_per_token_logps, again.sampling_per_token_logps)
    assert written(first) != written(other)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    sampled(model, tokenizer)
    assert torch.equal(before, torch.get_rng_state())  # the global state is left alone


def test_the_context_may_be_filled_to_the_last_position(tokenizer):
    model = random_model(tokenizer, max_position_embeddings=20)
    rollout = generate(model, tokenizer, ["0123456789"], num_generations=2, max_completion_length=10, temperature=0)
    assert rollout.completion_ids.shape[1] <= 10
    with pytest.raises(ValueError, match=r"prompts\[1\] .*11 tokens.*up to 10.*context of 20.*max_completion_length"):
        generate(model, tokenizer, ["a", "0123456789+"], num_generations=2, max_completion_length=10)


def test_the_model_is_left_as_it_came(model, tokenizer):
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    sampled(model, tokenizer)
    assert [module.training for module in model.modules()] == modes
    for name, exception in (("interrupt", KeyboardInterrupt), ("failure", RuntimeError)):
        handle = model.lm_head.register_forward_hook(raising_after(3, exception(name)))
        with pytest.raises(exception, match=name):
            sampled(model, tokenizer)
        handle.remove()
        assert [module.training for module in model.modules()] == modes
    model.eval()


def raising_after(calls, exception):
    counter = itertools.count(1)

    def hook(*_):
        if next(counter) == calls:
            raise exception

    return hook


def test_dropout_is_off_and_what_returns_can_be_trained_on(tokenizer):
    model = random_model(tokenizer, attention_dropout=0.5).train()
    rollout = sampled(model, tokenizer, temperature=0)
    assert written(rollout) == written(sampled(model.eval(), tokenizer, temperature=0))
    ids = torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)
    loss = model(ids).logits.logsumexp(-1).mean() + (model(ids).logits[:, 0, 0] * rollout.is_truncated).sum()
    loss.backward()  # inference tensors could not be saved for this
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


def test_bfloat16_models_sample_too(tokenizer):
    model = random_model(tokenizer, stop_ids=STOPS).to(torch.bfloat16)
    rollout = sampled(model, tokenizer)
    assert rollout.sampling_per_token_logps.dtype == torch.float32
    assert rollout.sampling_per_token_logps.isfinite().all()


def test_a_diverged_model_is_named(tokenizer):
    model = random_model(tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for temperature in (0, 1.0):
        with pytest.raises(ValueError, match="logits are not finite"):
            sampled(model, tokenizer, temperature=temperature)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": "one string"}, "prompts must be a list"),
        ({"prompts": [[{"role": "user", "content": "hi"}]]}, "render_prompt"),
        ({"prompts": ["fine", ""]}, r"prompts\[1\] has no tokens"),
        ({"num_generations": 0}, "num_generations .*got 0"),
        ({"max_completion_length": 0}, "max_completion_length .*got 0"),
        ({"temperature": -0.5}, "temperature .*got -0.5"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_bad_arguments_are_named(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        sampled(model, tokenizer, **options)


def test_a_tokenizer_without_pad_or_stop_token_is_refused(tokenizer):
    model = random_model(tokenizer)
    lacking = byte_tokenizer()
    lacking.pad_token = None
    with pytest.raises(ValueError, match="has no pad token; set tokenizer.pad_token"):
        sampled(model, lacking)
    endless = byte_tokenizer()
    endless.eos_token = None
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="has no EOS token"):
        sampled(model, endless)


def test_a_rollout_checks_its_shapes(model, tokenizer):
    fields = dict(vars(sampled(model, tokenizer)))
    for name, value in [
        ("num_generations", 3),
        ("completions", fields["completions"][1:]),
        ("prompt_mask", fields["prompt_mask"][:, 1:]),
        ("completion_mask", fields["completion_mask"][1:]),
        ("is_truncated", fields["is_truncated"][:, None]),
    ]:
        with pytest.raises(ValueError, match="prompts" if name == "num_generations" else name):
            Rollout(**{**fields, name: value})


def test_filters_are_those_of_transformers():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    for top_k, top_p in itertools.product([0, 1, 5, 80], [1.0, 0.9, 0.3, 0.01]):
        expected = logits
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        torch.testing.assert_close(filter_logits(logits, top_k=top_k, top_p=top_p), expected)


def test_inverse_cdf_edges():
    """u = 0 skips a leading impossible token, u just below 1 stops at the last possible one."""
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log().repeat(2, 1)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits, uniform)[0].tolist() == [0, 3]
    assert sample_tokens(logits, uniform, top_k=2)[0].tolist() == [1, 2]


def test_a_tree_of_samples_decodes_as_its_branches_alone_would(model, tokenizer):
    """Seven samples of two prompts that run together, part, end and leave gaps, against full forwards."""
    prompts = ["Two and two?", "x"]
    encoded = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    histories = [[] for _ in range(7)]
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    going = list(range(7))
    script = [([1, 1, 1, 2, 5, 5, 6], []), ([3, 3, 4, 4, 7, 8, 7], [3, 5]), ([1, 1, 1, 9, 9], [0, 1]), ([2, 2, 2], [])]
    sizes = []
    with torch.inference_mode():
        decoder = TreeDecoder(model, encoded.input_ids, encoded.attention_mask, 8, 8)
        for tokens, leaving in script:
            rows = decoder.step(rows, torch.tensor(tokens))
            sizes.append(len(decoder.logits))
            for sample, token in zip(going, tokens, strict=True):
                histories[sample].append(token)
            for sample, row in zip(going, rows.tolist(), strict=True):
                prompt = tokenizer(prompts[0 if sample < 4 else 1]).input_ids
                expected = model(torch.tensor([[*prompt, *histories[sample]]])).logits[0, -1]
                torch.testing.assert_close(decoder.logits[row], expected, rtol=0, atol=1e-4)
            stays = torch.tensor([sample not in leaving for sample in going])
            rows, going = rows[stays], [sample for sample in going if sample not in leaving]
    assert sizes == [4, 6, 4, 3]


def test_samples_that_agree_are_one_row(tokenizer):
    """A greedy group is one row from beginning to end, and costs what a single sample costs."""
    model = random_model(tokenizer)
    seen = []
    hook = model.model.register_forward_hook(lambda module, inputs, output: seen.append(len(output[0])))
    rollout = sampled(model, tokenizer, PROMPTS[:2], num_generations=16, max_completion_length=5, temperature=0)
    hook.remove()
    assert len(rollout.prompts) == 32 and seen == [2] * 5


def test_stop_tokens_end_a_completion_too(tokenizer):
    model = random_model(tokenizer)
    plain = written(sampled(model, tokenizer))
    letters = [token for token in sum(plain, []) if tokenizer.decode([token]).isalpha()][:2]
    expected = [through_first({*letters, tokenizer.eos_token_id}, tokens) for tokens in plain]
    assert expected != plain
    for stops in (letters, [tokenizer.decode(letters[:1]), letters[1]]):
        assert written(sampled(model, tokenizer, stop_tokens=stops)) == expected
    for stops, message in ((["AB"], "'AB' .*single token"), ([len(tokenizer)], "single token"), ("A", "a list")):
        with pytest.raises(ValueError, match=f"stop_tokens.*{message}"):
            sampled(model, tokenizer, stop_tokens=stops)
