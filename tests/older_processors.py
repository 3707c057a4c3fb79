"""Run the numerical tests and some notebooks again as on older processors: ``python tests/older_processors.py``.

torch, oneDNN, NumPy and OpenBLAS choose their code by the instructions of the processor, so a result that is right here
may be wrong on a processor with fewer of them: a product of int8 numbers overflows where VNNI is missing, and a sum has
other last digits. Variables forbid them the newer instructions. Where the processor lacks them anyway, AVX2 is left
out.
``--all`` adds further tests, those of stored results among them, and the long ones; other options go to pytest, as with
``run_notebooks.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

from grpo_edu.machine.hardware import instruction_sets

ROOT = Path(__file__).resolve().parents[1]
QUANTIZED = ("quantization", "packed_weights")
NUMERICAL = (
    *QUANTIZED,
    *("quantized_numbers", "quantized_rollouts", "advantages", "logprobs", "chunked_logps", "losses", "optimizers"),
    "rollout",
)
STORED = ("studies", "diagnosis_checks", "book_explorers", "significance", "evaluation")
AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
SSE41 = {
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
}
# variables, tests, notebooks
PASSES = ((AVX2, NUMERICAL, ("09",)), (SSE41, QUANTIZED, ()))
ALL = (
    (AVX2, (*NUMERICAL, "metrics", "fisher", "ewc", "trl_parity"), ("01", "09", "11")),
    (SSE41, (*QUANTIZED, *STORED), ()),
)


def main(options):
    """Run every pass, also after one has failed; 0 only if all are well."""
    everything = "--all" in options
    options = [option for option in options if option != "--all"]
    marks = ["-m", "long or not long"] if everything else []
    failed = False
    newer = {"avx512_f", "avx_vnni"} & {*instruction_sets()}
    for variables, tests, notebooks in ALL if everything else PASSES:
        if variables is AVX2 and not newer:
            print("without the AVX2 pass: this processor has nothing newer, so the tests themselves are that pass")
            continue
        print("as with", " ".join(f"{name}={value}" for name, value in variables.items()), flush=True)
        names = [next((ROOT / "notebooks").glob(f"{number}_*.ipynb")).stem for number in notebooks]
        commands = [["-m", "pytest", "-q", *options, *marks, *(f"tests/test_{name}.py" for name in tests)]]
        commands += [["tests/run_notebooks.py", "-q", *options, *names]] if names else []
        for command in commands:
            failed |= subprocess.call([sys.executable, *command], cwd=ROOT, env=os.environ | variables) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
