"""The audited claims as data, and how a judgment prints."""

import re

import pytest

from grpo_edu.claims import CLAIMS, SOURCES, VERDICTS, judge


def test_each_claim_names_its_source_and_holds_a_number_or_a_direction():
    assert len(CLAIMS) >= 30
    assert {claim.source for claim in CLAIMS.values()} == set(SOURCES)
    for key, claim in CLAIMS.items():
        assert re.search(r"\d|degradation", claim.quote), key
        assert claim.quote == " ".join(claim.quote.split()), f"{key}: one line, single spaces"
    assert len({claim.quote for claim in CLAIMS.values()}) == len(CLAIMS)


@pytest.mark.parametrize(("holds", "verdict"), [(True, "holds"), (False, "cannot hold"), (None, "not shown")])
def test_a_judgment_prints_quote_source_verdict_and_reason(holds, verdict):
    judgment = judge("ducks", holds, "Because " + "of the eggs " * 20)
    assert judgment.verdict == verdict == VERDICTS[holds]
    text = str(judgment)
    assert text.startswith("“Janet's ducks") and "(tutorial)" in text and f"→ {verdict.upper()}: Because" in text
    assert max(map(len, text.splitlines())) <= 92


def test_a_numpy_truth_counts_as_one():
    import numpy as np

    assert judge("memory", np.bool_(False), "16 bytes").verdict == "cannot hold"


def test_judge_refuses():
    with pytest.raises(ValueError, match="key must be one of the claims"):
        judge("moon landing", True, "seen")
    with pytest.raises(ValueError, match="because must say why the claim 'memory'"):
        judge("memory", False, "  ")
