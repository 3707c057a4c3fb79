"""Log-probabilities chunk by chunk against autograd over all logits at once."""

import pytest
import torch
from torch.testing import assert_close

from grpo_edu.fast import chunked_logps as module
from grpo_edu.fast.chunked_logps import chunked_logps

PLACE = torch.tensor([4, 0, 0, 3, 1, 4, 4])  # nothing is drawn from distribution 2
IDS = torch.tensor([5, 0, 8, 8, 2, 5, 1])


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    states, weight = (torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) for rows in (5, 9))
    return states, weight


def at_once(states, weight, temperature=1.0):
    """The definition, all logits in one tensor."""
    distribution = (states @ weight.T / temperature).log_softmax(dim=1)
    return distribution[PLACE, IDS], -(distribution.exp() * distribution).sum(dim=1)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_the_definition(inputs, chunk_size, temperature):
    grad = torch.linspace(-1, 2, 7, dtype=torch.float64)
    expected, entropies = at_once(*inputs, temperature)
    slope = torch.linspace(2, -1, 5, dtype=torch.float64)
    both = torch.autograd.grad((expected, entropies), inputs, (grad, slope), retain_graph=True)
    expected_gradients = torch.autograd.grad(expected, inputs, grad, retain_graph=True)
    of_entropies = torch.autograd.grad(entropies, inputs, slope)
    logps, found = chunked_logps(*inputs, PLACE, IDS, temperature=temperature, chunk_size=chunk_size, with_entropy=True)
    assert_close(logps, expected)
    assert_close(found, entropies)
    assert_close(torch.autograd.grad((logps, found), inputs, (grad, slope), retain_graph=True), both)
    assert_close(torch.autograd.grad(found, inputs, slope, retain_graph=True), of_entropies)
    assert_close(torch.autograd.grad(logps, inputs, grad), expected_gradients)


@pytest.mark.parametrize("learns", [(True, False), (False, True)])
def test_either_gradient_alone(inputs, learns):
    for tensor, wanted in zip(inputs, learns, strict=True):
        tensor.requires_grad_(wanted)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    for with_entropy in (False, True):
        found = chunked_logps(*inputs, PLACE, IDS, temperature=0.5, chunk_size=2, with_entropy=with_entropy)
        expected = at_once(*inputs, 0.5)
        found, expected = (sum(part.sum() for part in parts[: 1 + with_entropy]) for parts in (found, expected))
        assert_close(torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted))


def test_one_chunk_of_logits_at_a_time_and_no_second_look_where_the_weights_are_frozen(inputs, monkeypatch):
    states, weight = inputs
    seen, real = [], module._logits

    def watched(*arguments):
        seen.append(real(*arguments))
        return seen[-1]

    monkeypatch.setattr(module, "_logits", watched)
    for wants_gradient, passes in ((True, 2), (False, 1)):
        seen.clear()
        logps, _ = chunked_logps(states, weight.requires_grad_(wants_gradient), PLACE, IDS, chunk_size=2)
        logps.sum().backward()
        assert [len(logits) for logits in seen] == [2, 2, 1] * passes


def test_bfloat16_is_raised_to_float32(inputs):
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    logps, _ = chunked_logps(*half, PLACE, IDS, chunk_size=2)
    assert logps.dtype == torch.float32
    assert_close(logps.double(), at_once(*inputs)[0], atol=0.1, rtol=0.02)
    logps.sum().backward()
    assert half[0].grad.dtype == half[1].grad.dtype == torch.bfloat16
