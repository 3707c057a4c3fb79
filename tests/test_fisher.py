"""The four Fishers: the analytic one of a softmax regression, the Hessian of the KL, and what squares what."""

import copy

import pytest
import torch
from random_policy import byte_tokenizer, random_model
from torch import nn
from torch.nn.functional import kl_div
from torch.testing import assert_close

from grpo_edu.continual.fisher import (
    FISHER_KINDS,
    fisher_diagonal,
    lightning_fisher,
    rollout_examples,
    solution_examples,
    target_forward,
)
from grpo_edu.problems.templates import make_problems
from grpo_edu.prompts import render_prompt
from grpo_edu.rollout import generate


def regression(features=5, classes=4, seed=0, examples=8):
    """A softmax regression in double precision and examples of one input each."""
    torch.manual_seed(seed)
    model = nn.Linear(features, classes).double()
    inputs, labels = torch.randn(examples, 1, features).double(), torch.randint(classes, (examples, 1))
    return model, list(zip(inputs, labels, strict=True))


def plain_forward(model, inputs, labels):
    return model(inputs), labels


def fisher_of(model, examples, **options):
    return fisher_diagonal(model, examples, forward=plain_forward, **options)


def flat(fisher):
    return torch.cat([value.flatten() for value in fisher.values()])


def test_true_fisher_is_the_analytic_one_of_a_softmax_regression():
    """F of W[k, i] is the mean of p_k (1 - p_k) x_i², of the bias the mean of p_k (1 - p_k)."""
    model, examples = regression()
    inputs = torch.cat([x for x, _ in examples])
    p = model(inputs).softmax(dim=-1).detach()
    spread = p * (1 - p)
    fisher = fisher_of(model, examples, kind="true")
    assert_close(fisher["weight"].double(), spread.T @ inputs**2 / len(inputs), atol=1e-6, rtol=0)
    assert_close(fisher["bias"].double(), spread.mean(dim=0), atol=1e-6, rtol=0)


def test_empirical_fisher_is_the_analytic_one_too():
    """With label y the score of W[k, i] is (1[k = y] - p_k) x_i."""
    model, examples = regression()
    inputs, labels = (torch.cat(part) for part in zip(*examples, strict=True))
    scores = nn.functional.one_hot(labels, 4) - model(inputs).softmax(dim=-1).detach()
    fisher = fisher_of(model, examples, kind="empirical")
    assert_close(fisher["weight"].double(), (scores**2).T @ inputs**2 / len(inputs), atol=1e-6, rtol=0)


def test_the_bug_of_squaring_a_mean():
    """Two examples whose gradients cancel: each has information, the squared mean has none."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)  # p = (1/2, 1/2): the scores of label 0 and of label 1 are opposite
    examples = [(torch.ones(1, 1), torch.tensor([0])), (torch.ones(1, 1), torch.tensor([1]))]
    assert_close(fisher_of(model, examples, kind="empirical")["weight"], torch.tensor([[0.25], [0.25]]))
    assert_close(fisher_of(model, examples, kind="batched-empirical")["weight"], torch.zeros(2, 1))


def test_batched_empirical_is_the_square_of_a_batchs_mean_gradient():
    model, examples = regression()
    gradients = []
    for part in (examples[:3], examples[3:6], examples[6:]):
        model.zero_grad()
        inputs, labels = (torch.cat(tensors) for tensors in zip(*part, strict=True))
        nn.functional.cross_entropy(model(inputs), labels).backward()
        gradients.append(len(part) * model.weight.grad**2)
    expected = sum(gradients) / len(examples)
    fisher = fisher_of(model, examples, kind="batched-empirical", batch_size=3)
    assert_close(fisher["weight"], expected, atol=1e-6, rtol=1e-5)
    one_by_one = fisher_of(model, examples, kind="batched-empirical", batch_size=1)
    assert_close(one_by_one, fisher_of(model, examples, kind="empirical"))


def test_a_batch_has_32_examples_unless_told_otherwise():
    model, examples = regression(examples=35)
    usual, larger = (fisher_of(model, examples, kind="batched-empirical", batch_size=size) for size in (32, 33))
    assert_close(fisher_of(model, examples, kind="batched-empirical"), usual, atol=0, rtol=0)
    assert not torch.equal(usual["weight"], larger["weight"])


def test_logits_in_half_precision_are_raised_before_the_softmax():
    model, examples = regression()

    def half(model, inputs, labels):
        return model(inputs).bfloat16(), labels

    def raised(model, inputs, labels):
        return model(inputs).bfloat16().float(), labels

    for kind in ("true", "empirical"):
        one, other = (fisher_diagonal(model, examples, kind=kind, forward=forward) for forward in (half, raised))
        assert_close(one, other, atol=0, rtol=0)


def test_gradients_in_half_precision_are_raised_before_they_are_squared():
    """The score is 2⁻¹⁵, which float16 holds, and its square 2⁻³⁰, which it does not."""
    coin = nn.Linear(1, 2, bias=False).half()
    nn.init.zeros_(coin.weight)
    example = torch.tensor([[2.0**-14]]), torch.tensor([0])
    fisher = fisher_diagonal(
        coin, [example], kind="empirical", forward=lambda model, x, y: (x @ model.weight.float().T, y)
    )
    assert fisher["weight"].tolist() == [[2.0**-30], [2.0**-30]]


def test_tail_by_hand():
    """Labels of 3/4 and 1/4: the scores are ±1/4 and ±3/4. A tail of 0.3 leaves out the second of them only."""
    coin = nn.Linear(1, 2, bias=False)
    coin.weight.data = torch.tensor([[3.0], [1.0]]).log()
    example = torch.ones(1, 1), torch.tensor([0])
    for tail, expected in ((0.0, 3 / 4 / 16 + 1 / 4 * 9 / 16), (0.2, 3 / 16), (0.3, 3 / 4 / 16), (0.99, 3 / 4 / 16)):
        fisher = fisher_of(coin, [example], kind="true", tail=tail)
        assert_close(fisher["weight"], torch.full((2, 1), expected), msg=str(tail))
    nn.init.zeros_(coin.weight)  # 1/2 and 1/2: the second weighs exactly what may be left out
    fisher = fisher_of(coin, [example], kind="true", tail=0.5)
    assert_close(fisher["weight"], torch.full((2, 1), 1 / 2 / 4))


def test_a_weight_that_no_prediction_hangs_on_has_no_information():
    model, examples = regression()
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    for kind in FISHER_KINDS:
        fisher = fisher_of(model, examples, kind=kind)
        assert fisher["spare"].tolist() == [0.0, 0.0, 0.0] and fisher["weight"].all()


# ---- a language model ----


@pytest.fixture(scope="module")
def policy():
    """Ten kinds of tokens, so that the exact expectation and the Hessian are quick; weights large enough to matter."""
    model = random_model(
        byte_tokenizer(),
        vocab_size=260,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sharpness=12.0,
    )
    examples = [
        (torch.tensor([5, 9, 77, 30, 8]), torch.tensor([False, False, False, True, True])),
        (torch.tensor([3, 200, 14, 60]), torch.tensor([False, False, True, True])),
    ]
    return model, examples


def mean_kl(model, before, examples):
    """KL of the predictions before from those now, a mean over predicted tokens."""
    parts = []
    for (ids, is_target), logps in zip(examples, before, strict=True):
        now = target_forward(model, ids, is_target)[0].log_softmax(dim=-1)
        parts.append(kl_div(now, logps, log_target=True, reduction="none").sum(dim=-1))
    return torch.cat(parts).mean()


@pytest.mark.slow
def test_true_fisher_is_the_hessian_of_the_kl(policy):
    """The diagonal, weight by weight, by differentiating the KL twice."""
    model, examples = policy
    model = copy.deepcopy(model).double()
    model.config._attn_implementation = "eager"  # CPU flash attention has no second derivative
    before = [target_forward(model, *example)[0].log_softmax(dim=-1).detach() for example in examples]
    fisher = fisher_diagonal(model, examples, kind="true")
    for name, index in (
        ("model.layers.0.self_attn.q_proj.weight", (3, 2)),
        ("model.layers.0.self_attn.v_proj.bias", (1,)),
        ("model.layers.0.mlp.down_proj.weight", (4, 5)),
        ("model.norm.weight", (6,)),
        ("model.embed_tokens.weight", (30, 1)),
    ):
        weight = dict(model.named_parameters())[name]
        (slope,) = torch.autograd.grad(mean_kl(model, before, examples), weight, create_graph=True)
        assert slope.abs().max() < 1e-9  # the KL is smallest where it starts
        (curvature,) = torch.autograd.grad(slope[index], weight)
        assert fisher[name][index] > 1e-9
        assert fisher[name][index].item() == pytest.approx(curvature[index].item(), rel=1e-4)


@pytest.mark.slow
def test_the_examples_are_squared_one_by_one(policy):
    model, examples = policy
    tokens = [2, 2]
    for kind in ("true", "empirical"):
        apart = [flat(fisher_diagonal(model, [example], kind=kind)) for example in examples]
        together = flat(fisher_diagonal(model, examples, kind=kind))
        mean = sum(n * part for n, part in zip(tokens, apart, strict=True)) / sum(tokens)
        assert_close(together, mean, atol=1e-9, rtol=1e-4)


@pytest.mark.slow
def test_sampled_fisher_of_a_language_model_is_unbiased(policy):
    """Several tokens an example: the cross terms of their scores must average out."""
    model, examples = policy
    truth = flat(fisher_diagonal(model, examples, kind="true"))
    largest = truth.topk(20).indices
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [flat(fisher_diagonal(model, examples, kind="sampled", generator=generator))[largest] for _ in range(300)]
    )
    error = draws.std(dim=0) / 300**0.5
    assert ((draws.mean(dim=0) - truth[largest]).abs() < 4.5 * error).all()


def test_same_generator_same_fisher_and_the_model_is_left_as_it_was(policy):
    model, examples = policy
    before = copy.deepcopy(model.state_dict())
    model.train()
    first, second = (fisher_diagonal(model, examples, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert model.training and all(weight.grad is None for weight in model.parameters())
    assert_close(model.state_dict(), before, atol=0, rtol=0)
    assert torch.equal(flat(first), flat(second))
    assert first.keys() == dict(model.named_parameters()).keys()
    model.eval()


def test_frozen_weights_are_left_out(policy):
    model = copy.deepcopy(policy[0])
    model.model.embed_tokens.weight.requires_grad_(False)
    fisher = fisher_diagonal(model, policy[1])
    assert fisher and "model.embed_tokens.weight" not in fisher


def test_solution_examples_hold_the_prompt_and_mark_the_solution():
    tokenizer = byte_tokenizer()
    (problem,) = make_problems("basic", 1, seed=0)
    ((ids, is_target),) = solution_examples(tokenizer, [problem])
    assert tokenizer.decode(ids[~is_target]) == render_prompt(tokenizer, problem.prompt)
    assert tokenizer.decode(ids[is_target]) == problem.solution + tokenizer.eos_token


def test_rollout_examples_are_the_completions_without_padding():
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, stop_ids=range(0, 256, 16))
    prompts = ["one", "a longer one"]
    rollout = generate(
        model,
        tokenizer,
        prompts,
        num_generations=2,
        max_completion_length=12,
        generator=torch.Generator().manual_seed(0),
    )
    examples = rollout_examples(rollout)
    assert len(examples) == 4
    for row, (ids, is_target) in enumerate(examples):
        assert tokenizer.decode(ids[~is_target]) == prompts[row // 2]
        assert is_target.sum() == rollout.completion_mask[row].sum()
        assert torch.equal(ids[is_target], rollout.completion_ids[row][rollout.completion_mask[row] != 0])


# ---- heuristic and comparison ----


def test_lightning_knows_names_and_sizes_and_nothing_else(policy):
    model, _ = policy
    fisher = lightning_fisher(model)
    weights = dict(model.named_parameters())
    for name, factor in (
        ("model.embed_tokens.weight", 10),
        ("model.layers.0.self_attn.q_proj.weight", 5),
        ("model.layers.0.mlp.up_proj.weight", 2),
    ):
        weight = weights[name].detach()
        assert_close(fisher[name], 0.1 * factor * weight.var() + 0.01 * weight.abs())
    assert fisher.keys() == weights.keys()


def test_lightning_by_hand():
    """A norm of variance 2 and factor 1; a single number has no variance."""
    model = nn.ModuleDict({"norm": nn.Linear(2, 1, bias=False), "one": nn.Linear(1, 1, bias=False)})
    model["norm"].weight.data, model["one"].weight.data = torch.tensor([[1.0, 3.0]]), torch.tensor([[-3.0]])
    expected = {"norm.weight": torch.tensor([[0.21, 0.23]]), "one.weight": torch.tensor([[0.03]])}
    assert_close(lightning_fisher(model), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "exact"}, f"kind: 'exact' is unknown; choose one of {', '.join(FISHER_KINDS)}"),
        ({"tail": 1.0}, "tail must be .*below 1, got 1.0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(policy, options, message):
    with pytest.raises(ValueError, match=message):
        fisher_diagonal(*policy, **options)


def test_no_data_and_nothing_to_predict_are_refused(policy):
    model, examples = policy
    with pytest.raises(ValueError, match="examples is empty"):
        fisher_diagonal(model, [])
    ids = torch.tensor([5, 6, 7])
    with pytest.raises(ValueError, match="number 1 has nothing to predict"):
        fisher_diagonal(model, [examples[0], (ids, torch.zeros(3, dtype=torch.bool))])
    with pytest.raises(ValueError, match="no parameter wants a gradient"):
        fisher_diagonal(copy.deepcopy(model).requires_grad_(False), examples)
