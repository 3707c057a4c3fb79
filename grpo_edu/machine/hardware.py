"""Describe this computer, and check whether the course will work on it.

`cpu_report` describes the CPU, the memory and the numeric libraries. `doctor_checks` checks everything that the course
needs, and says for each problem what to do. Both use what the operating system reports, and never the network.
"""

import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_edu.fast.cores import SPIN_COUNT, spin_wait_warning, usable_cores
from grpo_edu.fast.memory import GIB, memory_bytes

MIN_MEMORY = 2 * GIB  # a run of the tiny model next to JupyterLab
MIN_DISK = 1 * GIB  # for runs and notebooks; a saved tiny model takes a few MB
_INSTALL = "Run `python3 course.py setup`, or `pip install -r requirements.txt`."
# The instruction sets that decide how fast a matrix product runs.
_TELLING = (
    *("avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("neon", "bf16", "i8mm", "sve"),
)  # as torch.cpu.get_capabilities() names them
_NAMES_IN_CPUINFO = {"avx512_f": "avx512f", "neon": "asimd"}  # where these differ


@dataclass(frozen=True)
class Check:
    """The result of one check: what was found, and what to do about a problem."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def cpu_report() -> dict[str, Any]:
    """Describe the CPU, its memory and the numeric libraries, ready for JSON. Imports torch (about two seconds).

    Returns:
        cpu_model, architecture, os; physical_cores, logical_cores, usable_cores (within the CPU affinity and a
        container's quota; may be 1.5); torch_threads; instruction_sets (list), torch_capability ("AVX2", …), fast_bf16
        (bfloat16 products in hardware); memory_total_gib, memory_available_gib; python, torch, transformers, trl
        (versions, None where not installed); mkl, openmp, onednn (bool).

    >>> report = cpu_report()
    >>> 0 < report["usable_cores"] <= report["logical_cores"]
    True
    """
    import psutil
    import torch

    total, available = memory_bytes()
    sets = instruction_sets()
    return {
        "cpu_model": cpu_model(),
        "architecture": platform.machine(),
        "os": platform.platform(terse=True),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "instruction_sets": sets,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "fast_bf16": not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(sets),
        "memory_total_gib": round(total / GIB, 2),
        "memory_available_gib": round(available / GIB, 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "trl")},
        "mkl": torch.backends.mkl.is_available(),
        "openmp": torch.backends.openmp.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
    }


def machine() -> dict[str, Any]:
    """Return what a benchmark or a leaderboard ran on, for its record: a part of `cpu_report`."""
    names = ("cpu_model", "architecture", "usable_cores", "torch_threads", "torch_capability", "memory_total_gib")
    report = cpu_report()
    return {name: report[name] for name in (*names, "python", "torch", "transformers", "trl")}


def cpu_model() -> str:
    """Return the name of the processor, or its architecture if the system does not tell the name."""
    name = _cpuinfo().get("model name") or os.environ.get("PROCESSOR_IDENTIFIER", "")  # Linux, Windows
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return name.strip() or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """Return the instruction sets that matter for matrix products, as torch or /proc/cpuinfo name them."""
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch cannot tell
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return [name for name in _TELLING if capabilities.get(name) is True or _NAMES_IN_CPUINFO.get(name, name) in flags]


def doctor_checks() -> list[Check]:
    """Check everything that the course needs; a problem becomes a `Check` that says what to do, never an exception."""
    looks = (
        ("Python", _check_python),
        ("packages", _check_packages),
        ("problems", _check_problems),
        ("tiny model", _check_model),
        ("SmolLM2", _check_smollm2),
        ("disk space", _check_disk),
        ("memory", _check_memory),
        ("device", _check_device),
        ("threads", _check_threads),
        ("waiting", _check_waiting),
        ("kernels", _check_kernels),
    )
    checks = []
    for name, look in looks:
        try:
            ok, detail, remedy = look()
            checks.append(Check(name, ok, detail, "" if ok else remedy))
        except ImportError as error:
            checks.append(Check(name, False, str(error), _INSTALL))
    return checks


def _check_python() -> tuple[bool, str, str]:
    from packaging.specifiers import SpecifierSet

    wanted, _ = _declared()
    version = ".".join(map(str, sys.version_info[:3]))
    remedy = f"Install a Python {wanted} and run `python3 course.py setup` with it."
    return SpecifierSet(wanted).contains(version), f"{version}, supported: {wanted or 'any'}", remedy


def _check_packages() -> tuple[bool, str, str]:
    from packaging.requirements import Requirement

    _, declared = _declared()
    faults, found = [], 0
    for line in declared:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found += 1
        version = _version(requirement.name)
        if version is None:
            faults.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{requirement.name} {version} is outside {requirement.specifier}")
    return not faults, "; ".join(faults) or f"all {found} are installed within their ranges", _INSTALL


def _check_problems() -> tuple[bool, str, str]:
    from grpo_edu.problems.files import load_problems
    from grpo_edu.problems.templates import DOMAINS, LEVELS

    try:
        counts = {level: len(load_problems(level, "heldout")) for level in LEVELS + DOMAINS}
    except (OSError, ValueError) as error:
        return False, str(error), "Restore the folder data/problems, or install again."
    return True, "held out: " + ", ".join(f"{n} {name}" for name, n in counts.items()), ""


def _check_model() -> tuple[bool, str, str]:
    from grpo_edu.problems.templates import data_dir

    folder = data_dir() / "models" / "tiny"  # models.tiny_dir() would import torch
    remedy = "Restore the folder data/models/tiny, or install again."
    if not (folder / "config.json").is_file():
        return False, f"no model at {folder}", remedy
    try:
        from grpo_edu.models import load_policy

        model, _ = load_policy("tiny")
    except (OSError, ValueError, RuntimeError) as error:
        return False, f"{type(error).__name__}: {error}", remedy
    return True, f"loads, {model.num_parameters():,} parameters", ""


def _check_smollm2() -> tuple[bool, str, str]:
    """Check for SmolLM2; only what uses this model needs it, so it is not a fault if it is not installed."""
    from grpo_edu.gguf_files import SMOLLM2_INSTALL, smollm2_dir, smollm2_file

    folder = smollm2_dir()
    if folder.is_dir():
        return True, f"converted, in {folder}", ""
    if smollm2_file() is None:
        return True, f"not installed; only notebook 14 and `--model smollm2` need it: {SMOLLM2_INSTALL}", ""
    return True, f"installed; the first use converts it into {folder.parent}", ""


def _check_disk() -> tuple[bool, str, str]:
    free = shutil.disk_usage(Path.cwd()).free
    remedy = f"Free at least {MIN_DISK / GIB:.0f} GiB, or work in a folder on another disk."
    return free >= MIN_DISK, f"{free / GIB:.1f} GiB free at {Path.cwd()}", remedy


def _check_memory() -> tuple[bool, str, str]:
    total, available = memory_bytes()
    remedy = f"Close other programs or notebook kernels until {MIN_MEMORY / GIB:.0f} GiB are available."
    return available >= MIN_MEMORY, f"{available / GIB:.1f} of {total / GIB:.1f} GiB available", remedy


def _check_device() -> tuple[bool, str, str]:
    from grpo_edu.model_files import choose_device

    device = choose_device().type
    if device == "cpu":
        return True, "cpu, for models of every size", ""
    return True, f"{device} for models of 50 million parameters and more, cpu for smaller ones", ""


def _check_threads() -> tuple[bool, str, str]:
    import torch

    threads, cores = torch.get_num_threads(), usable_cores()
    remedy = f"More threads than cores slow each other down. Set OMP_NUM_THREADS={math.ceil(cores)}."
    return threads <= max(1, math.ceil(cores)), f"torch uses {threads} on {cores:g} usable cores", remedy


def _check_waiting() -> tuple[bool, str, str]:
    import torch

    if torch.get_num_threads() == 1:
        return True, "torch computes with one thread, which never waits for another", ""
    problem = spin_wait_warning()
    if not problem:
        return True, "a thread that waits soon leaves its core to other programs, so a busy computer stalls no run", ""
    remedy = (
        "While other programs compute, torch may run 20 times slower. Import grpo_edu before torch, or "
        f"set GOMP_SPINCOUNT={SPIN_COUNT} before Python or Jupyter starts."
    )
    return False, problem, remedy


def _check_kernels() -> tuple[bool, str, str]:
    from grpo_edu.fast.packed_weights import packed_dtypes
    from grpo_edu.quantization.layers import KERNEL_SCHEMES, kernel_way

    ways = "; ".join(f"{scheme}: {kernel_way(scheme)}" for scheme in KERNEL_SCHEMES)
    packed = ", ".join(str(dtype).removeprefix("torch.") for dtype in packed_dtypes()) or "none"
    return True, f"{ways}; packed weights: {packed} (see docs/measured.md)", ""


def _declared() -> tuple[str, list[str]]:
    """Return this package's Python versions and requirements, from a checkout's pyproject.toml, else its metadata."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if table.get("name") == "grpo-edu":
            return table.get("requires-python", ""), table.get("dependencies", [])
    try:
        metadata = importlib.metadata.metadata("grpo-edu")
    except importlib.metadata.PackageNotFoundError:  # a copy of the folder without metadata
        return "", []
    return metadata["Requires-Python"] if "Requires-Python" in metadata else "", metadata.get_all("Requires-Dist", [])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the first processor's entry of /proc/cpuinfo; empty if there is none."""
    if not path.is_file():
        return {}
    first = path.read_text(errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
