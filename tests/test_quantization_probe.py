"""The probe of schemes: it times every scheme on the architecture it is given, and names the fastest."""

import pytest
import torch
from random_policy import byte_tokenizer, random_model

from benchmarks import quantization_probe
from benchmarks.quantization_probe import SchemeProbe, probe_schemes
from grpo_edu.config import QUANTIZATION_SCHEMES
from grpo_edu.quantization.model import quantization_scheme


@pytest.fixture(scope="module")
def config():
    return random_model(byte_tokenizer(), hidden_size=64, intermediate_size=96, num_hidden_layers=5).config


def test_the_shortest_step_is_the_fastest():
    probe = SchemeProbe(8, {"float32": 0.4, "bf16": 0.1, "int8-dynamic": 0.2})
    assert probe.fastest == "bf16"
    assert "8 rows: float32 1.0, bf16 4.0, int8-dynamic 2.0; fastest: bf16" in str(probe)
    assert SchemeProbe(1, {"float32": 0.1, "bf16": 0.2}).fastest == "float32"


def test_every_scheme_is_timed_with_the_rows_asked_for(config, monkeypatch):
    timed = []

    def watched(model, rows, layers):
        timed.append((quantization_scheme(model), rows, layers, len(model.get_decoder().layers)))
        return float(len(timed))

    monkeypatch.setattr(quantization_probe, "_step_seconds", watched)
    probe = probe_schemes(config, rows=3, repeats=2)
    assert timed == [(scheme, 3, 5, 2) for scheme in (None, *QUANTIZATION_SCHEMES)] * 3
    assert probe.seconds["float32"] == 8.5  # calls 6 and 11 of fifteen; the first round is the warm-up
    assert probe.fastest == "float32"


def test_a_step_is_scaled_to_all_layers(config, monkeypatch):
    ticks = iter([0.0, 1.0, 1.25])
    monkeypatch.setattr(quantization_probe.time, "perf_counter", lambda: next(ticks))
    with torch.inference_mode():
        model = quantization_probe.shallow_model(config, torch.float32)
        assert quantization_probe._step_seconds(model, 2, 6) == 3.25  # one second for two layers, a quarter behind


def test_options_that_cannot_be_are_refused(config):
    for name in ("rows", "repeats"):
        with pytest.raises(ValueError, match=f"^{name}: must be at least 1, got 0"):
            probe_schemes(config, **{name: 0})
