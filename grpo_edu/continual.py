"""Learning one task after another, from one place: what the modules behind it export.

`curricula` (stages and protections) → `curriculum` (running them) with `fisher` and `ewc` (holding on) →
`forgetting` (what was lost). `curriculum_runs` keeps a run on disk.
"""

from grpo_edu.curricula import Curriculum, Protection, Stage, load_curriculum
from grpo_edu.curriculum import Progress, make_anchor, run_curriculum, train_stage
from grpo_edu.ewc import Anchor, anchor_penalty, copy_params, ewc_penalty, merge_anchors, uniform_fisher
from grpo_edu.fisher import (
    FISHER_KINDS,
    fisher_diagonal,
    lightning_fisher,
    rank_correlation,
    rollout_examples,
    solution_examples,
)
from grpo_edu.forgetting import (
    AccuracyMatrix,
    Estimate,
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    mean_estimate,
)

__all__ = [
    "FISHER_KINDS",
    "AccuracyMatrix",
    "Anchor",
    "Curriculum",
    "Estimate",
    "Progress",
    "Protection",
    "Stage",
    "anchor_penalty",
    "average_accuracy",
    "backward_transfer",
    "copy_params",
    "ewc_penalty",
    "fisher_diagonal",
    "forgetting",
    "forward_transfer",
    "lightning_fisher",
    "load_curriculum",
    "make_anchor",
    "mean_estimate",
    "merge_anchors",
    "rank_correlation",
    "rollout_examples",
    "run_curriculum",
    "solution_examples",
    "train_stage",
    "uniform_fisher",
]
