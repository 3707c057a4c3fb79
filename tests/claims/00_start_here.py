"""What notebook 00 says and what must hold for its numbers on every computer."""

import json
from pathlib import Path

assert len(history) == 20
assert 0.3 < before.accuracy < 0.55
assert result.difference > 0.2 and result.low > 0.1 and result.p_value < 1e-6
assert won > 5 * lost

assert abs(advantages.sum().item()) < 1e-4
assert (advantages - from_package).abs().max() < 1e-5

# greedy: nearly everything was right before any training
assert greedy_before.accuracy > 0.97 and greedy_after.accuracy > 0.97

# the three habits, before and after
rights = {
    (name, kind): [
        correct
        for completion, correct in zip(evaluation.completions, evaluation.correct, strict=True)
        if habit(completion) == kind
    ]
    for name, evaluation in {"before": before, "after": after}.items()
    for kind in ("works out, marks", "works out, no mark", "answers directly")
}
assert sum(map(len, rights.values())) == 600
for moment in ("before", "after"):
    marked, unmarked, direct = (kinds for (name, _), kinds in rights.items() if name == moment)
    assert sum(marked) / len(marked) > 0.95 and sum(unmarked) == 0 and sum(direct) / len(direct) < 0.2
assert len(rights["after", "works out, marks"]) > 1.4 * len(rights["before", "works out, marks"])
assert len(rights["after", "answers directly"]) < 0.6 * len(rights["before", "answers directly"])

# the stored study: the four shares that the text prints
runs = json.loads(Path("../benchmarks/results/default_run.json").read_text("utf-8"))["runs"]
assert len(runs) == 5
for share, name in {
    0.429: "accuracy_before",
    0.885: "accuracy_after",
    0.997: "greedy_before",
    0.999: "greedy_after",
}.items():
    assert abs(sum(run[name]["k"] for run in runs) / 1500 - share) < 0.0005
