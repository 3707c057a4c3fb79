"""The dashboards of the web book on stored numbers: their JavaScript computes what the package computes."""

import json

import pytest
import torch
from close import assert_close
from test_playground import javascript

from benchmarks.dashboards import paid_to_exploits
from grpo_edu.continual.forgetting import forgetting
from grpo_edu.dashboards import ForgettingDashboard
from grpo_edu.problems.templates import data_dir
from grpo_edu.quantization.numbers import quantize, relative_error
from grpo_edu.rewards import REWARDS
from grpo_edu.studies.exploits import judge_reward

CURVES = data_dir() / "curves"


def recording(name):
    return json.loads((CURVES / name).read_text(encoding="utf-8"))


def test_the_stored_rewards_of_the_exploits_are_those_that_the_package_pays():
    stored = recording("exploits.json")
    assert stored.pop("command") == "python -m benchmarks.dashboards --parts exploits"
    assert_close(paid_to_exploits(), stored)


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0, 0.0), (0.5, 1.0, -0.3, 0.2), (0.0, 1.0, 1.0, 0.0)])
def test_the_reward_lab_judges_a_weighted_sum_as_the_package(weights, node):
    stored = recording("exploits.json")
    code = "given => courseExplorers.unpunished(given.rows, given.weights)"
    found = javascript(code, {"rows": stored["rows"], "weights": weights})
    expected = judge_reward([REWARDS[name] for name in stored["rewards"]], weights=weights)
    assert [one["pays"] for one in found] == [not verdict.holds for verdict in expected]
    assert [one["paid"] for one in found] == pytest.approx([verdict.paid_to_exploit for verdict in expected], abs=1e-6)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("size", "scale"), [(None, {}), (64, {"dim": 0}), (32, {"group_size": 32})], ids=["tensor", "row", "group"]
)
def test_a_matrix_is_quantized_as_by_the_package(affine, size, scale, node):
    matrix = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0.0  # a row whose scale would be 0
    code = """given => {
      const values = new Float32Array(new Uint8Array(given.bytes).buffer);
      const { after, bytes } = courseExplorers.quantizeMatrix(values, given);
      return { after: [...after], bytes, error: courseExplorers.relativeError(values, after) };
    }"""
    for bits in (2, 3, 8):
        given = {
            "bytes": list(matrix.numpy().tobytes()),
            "bits": bits,
            "affine": affine,
            "size": size or matrix.numel(),
        }
        found = javascript(code, given)
        parts = quantize(matrix, bits=bits, symmetric=not affine, **scale)
        assert found["after"] == pytest.approx(parts.dequantize().flatten().tolist(), abs=1e-7), bits
        assert found["error"] == pytest.approx(relative_error(matrix, parts.dequantize()), abs=1e-6)
        assert found["bytes"] == matrix.numel() * bits / 8 + 4 * parts.scale.numel() * (1 + affine)


def test_what_was_forgotten_is_computed_as_by_the_package(node):
    board, runs = ForgettingDashboard(), recording("curriculum.json")["runs"]
    code = "runs => { const m = courseExplorers.meanMatrix(runs); return [m, courseExplorers.forgotten(m)]; }"
    for arm in ("none", "ewc 1000", "replay 0.2"):
        matrix, lost = javascript(code, [run for run in runs if (run["curriculum"], run["arm"]) == ("domains", arm)])
        expected = board.matrix(arm)
        assert [value for row in matrix for value in row] == pytest.approx([value for row in expected for value in row])
        assert lost == pytest.approx(forgetting(expected))
