"""The numeric claims that notebook 06 audits, as data: where each stands, in its own words, and how it was judged.

They come from public documents about training with GRPO on a CPU or a small GPU. A quote is cut with "…" and
otherwise as it was printed. The judging is done by arithmetic in the notebook, never here.
"""

import textwrap
from dataclasses import dataclass

RL_GRPO = "https://github.com/shyamsridhar123/RL-GRPO"
SOURCES = {
    "README": f"{RL_GRPO}, README.md",
    "analysis": f"{RL_GRPO}, documentation/CPU_GRPO_IMPLEMENTATION_ANALYSIS.md",
    "assessment": f"{RL_GRPO}, documentation/CONSOLIDATED_SCIENTIFIC_ASSESSMENT.md",
    "bottlenecks": f"{RL_GRPO}, documentation/GRPO_BOTTLENECK_ANALYSIS.md",
    "tutorial": "a public tutorial on GRPO with DeepSpeed, LoRA and GSM8K",
}
VERDICTS = {True: "holds", False: "cannot hold", None: "not shown"}


@dataclass(frozen=True)
class Claim:
    """What a document says: a key of `SOURCES`, and its words."""

    source: str
    quote: str


@dataclass(frozen=True)
class Judgment:
    """A claim, its verdict (one of `VERDICTS`) and the reason; printed as three short paragraphs."""

    claim: Claim
    verdict: str
    because: str

    def __str__(self) -> str:
        quote = textwrap.fill(f"“{self.claim.quote}” ({self.claim.source})", 88)
        reason = textwrap.fill(f"{self.verdict.upper()}: {self.because}", 88, subsequent_indent="    ")
        return f"{quote}\n  → {reason}\n"


CLAIMS = {
    # what a calculator settles
    "parameters": Claim("README", "Model: Qwen2-0.5B-Instruct (494M parameters)"),
    "startup sum": Claim(
        "bottlenecks",
        "Model import time: 13.76s … Dataset creation: 8.06s … TRL library import: 19.64s … "
        "Total startup overhead: ~41.4s",
    ),
    "startup share": Claim(
        "bottlenecks",
        "Initialization: 41 seconds (34% of total time) … Actual training: 79 seconds (66% of total time)",
    ),
    "two minutes": Claim(
        "bottlenecks",
        "Current: 41s init + 79s training = 120s total … Optimized: 15s init + 79s training = 94s total … "
        "Improvement: 22% faster overall",
    ),
    "ten minutes": Claim(
        "bottlenecks",
        "Current: 41s init + 559s training = 600s total … Optimized: 15s init + 559s training = 574s total … "
        "Improvement: 4% faster",
    ),
    "startup target": Claim(
        "bottlenecks", "Target: 10-15s initialization … Improvement: 25-30s faster (60-75% reduction)"
    ),
    "dataset": Claim("tutorial", "Dataset: GSM8K (8K math reasoning samples)"),
    # speed
    "slow samples": Claim("README", "Training throughput: 0.004 samples/second … 80 samples = 75 minutes"),
    "samples a step": Claim(
        "bottlenecks", "Full GRPO step: 742.5ms per step … Effective throughput: 21.55 samples/second"
    ),
    "fast samples": Claim("bottlenecks", "The GRPO algorithm itself performs well (21.55 samples/second)"),
    "63 seconds": Claim("analysis", "Training Time | 63 seconds | 3 stages, 30 samples total"),
    "linear scaling": Claim("README", "Linear scaling observed (80 samples = 75 minutes)"),
    "200 samples": Claim("README", "Training effectiveness requires 200+ samples"),
    "faster with LoRA": Claim(
        "bottlenecks",
        "GRPO | ~41s | 21.55 samples/s … LoRA/QLoRA | ~5-10s | 50-100 samples/s … "
        "5-10x faster initialization, 2-3x faster training",
    ),
    "fine-tuning": Claim(
        "bottlenecks", "GRPO | ~41s | 21.55 samples/s … Standard Fine-tuning | ~15-25s | 10-15 samples/s"
    ),
    "loading": Claim("README", "Model loading: 2-3 seconds"),
    "matrix product": Claim("bottlenecks", "Large matrix multiplication: 173.8ms per operation"),
    # machine and memory
    "cores": Claim("README", "Hardware: 14-core CPU, 15.6 GB RAM"),
    "processor use": Claim("bottlenecks", "CPU cores utilized: 8/14 (57%) … Peak CPU usage: 53%"),
    "memory": Claim("analysis", "Memory Usage | 3.32-4.07 GB peak"),
    "price": Claim("assessment", "Hardware Cost | <$1000 | 14-core consumer CPU setup"),
    "1% of parameters": Claim("tutorial", "Only trains ~1% of parameters"),
    "full model": Claim("tutorial", "Full model | 24 GB"),
    "offloading": Claim("tutorial", "LoRA + ZeRO-2 | 12 GB … LoRA + Offload | 8 GB"),
    # accuracy
    "relative gain": Claim("analysis", "Accuracy Improvement | +2.3% relative | 87% → 89% correctness"),
    "three levels": Claim(
        "analysis", "Basic Problems: Slight decrease (-2%) … Intermediate Problems: … (0% change) … (+8%)"
    ),
    "89% of 60": Claim("analysis", "Overall Accuracy: 89% … Evaluation: 60 problems across 3 difficulty levels"),
    "93% of 20": Claim("analysis", "Advanced Problems: Significant improvement (+8%) - 85% → 93% accuracy"),
    "-2% of 20": Claim("analysis", "Basic Problems: Slight decrease (-2%) - likely due to over-optimization"),
    "step by step": Claim("analysis", "Reasoning Quality | +8.3% | 71.7% → 80.0% step-by-step"),
    "calculation steps": Claim("analysis", "Average Calculation Steps: 17.6 … Average Calculation Steps: 19.1"),
    "enhanced": Claim(
        "analysis",
        "The 2.3% improvement in mathematical reasoning accuracy, while modest, validates that the optimization "
        "techniques preserve and slightly enhance model performance.",
    ),
    "degradation": Claim("README", "Progressive training issues: Multi-stage approach shows accuracy degradation"),
    "ducks": Claim(
        "tutorial",
        "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her "
        "friends. How many eggs does she have left? … 16 - 3 = 13. #### 13",
    ),
}


def judge(key: str, holds: bool | None, because: str) -> Judgment:
    """Give a claim its verdict: True it holds, False it cannot hold, None it is not shown.

    Args:
        key: of `CLAIMS`.
        holds: what a computation has found.
        because: the reason, with the numbers recomputed.

    Raises:
        ValueError: an unknown claim, or no reason.

    >>> print(judge("dataset", True, "GSM8K has 7,473 + 1,319 problems."))
    “Dataset: GSM8K (8K math reasoning samples)” (tutorial)
      → HOLDS: GSM8K has 7,473 + 1,319 problems.
    <BLANKLINE>
    """
    if key not in CLAIMS:
        raise ValueError(f"key must be one of the claims ({', '.join(CLAIMS)}), got {key!r}")
    if not because.strip():
        raise ValueError(f"because must say why the claim {key!r} was judged so, got a blank text")
    return Judgment(CLAIMS[key], VERDICTS[holds if holds is None else bool(holds)], because)
