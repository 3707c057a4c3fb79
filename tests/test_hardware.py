"""The machine report against what the system itself says, and a doctor that finds each fault and never raises."""

import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import grpo_edu.problems.files
from grpo_edu.fast import cores, memory
from grpo_edu.machine import hardware
from grpo_edu.machine.hardware import cpu_report, doctor_checks

REPOSITORY = Path(__file__).resolve().parents[1]
GIB = 2**30


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.fixture(scope="module")
def report():
    return cpu_report()


def test_the_report_is_json_and_says_what_the_system_says(report):
    assert json.loads(json.dumps(report)) == report
    assert report["python"] == sys.version.split()[0].rstrip("+")
    assert report["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["transformers"] == importlib.metadata.version("transformers")
    assert report["trl"] == importlib.metadata.version("trl")
    assert report["torch_threads"] == torch.get_num_threads()
    assert 0 < report["usable_cores"] <= report["logical_cores"] == psutil.cpu_count()
    assert 0 < report["memory_available_gib"] <= report["memory_total_gib"]
    assert report["memory_total_gib"] <= round(psutil.virtual_memory().total / GIB, 2)
    assert report["cpu_model"].strip() and report["architecture"] and report["os"]


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_torch_and_the_kernel_name_the_same_instruction_sets(monkeypatch, report):
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this torch cannot tell the instruction sets")
    capabilities = dict(torch.cpu.get_capabilities())
    by_torch = [name for name in hardware._TELLING if capabilities.get(name) is True]
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert hardware.instruction_sets() == by_torch == report["instruction_sets"]
    assert ("avx2" in by_torch) or report["torch_capability"] not in ("AVX2", "AVX512")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_usable_cores_follow_the_affinity():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert 0 < hardware.usable_cores() <= 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cpuinfo_reads_the_first_processor(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n\nprocessor\t: 1\nFeatures\t: other\n")
    assert hardware._cpuinfo(path) == {"processor": "0", "Features": "fp asimd bf16"}
    assert hardware._cpuinfo(tmp_path / "none") == {}


def test_a_container_limit_bounds_cores_and_memory(monkeypatch):
    monkeypatch.setattr(cores, "cpu_quota", lambda: 0.5)
    monkeypatch.setattr(memory, "memory_limit", lambda: (GIB, GIB // 4))
    assert cores.usable_cores() == 0.5
    assert memory.memory_bytes() == (GIB, GIB // 4)
    checks = by_name(doctor_checks())
    assert not checks["memory"].ok and checks["memory"].detail == "0.2 of 1.0 GiB available"


def test_a_healthy_place_passes():
    checks = by_name(doctor_checks())
    assert list(checks) == [
        "Python",
        "packages",
        "problems",
        "tiny model",
        "SmolLM2",
        "disk space",
        "memory",
        "device",
        "threads",
        "waiting",
        "kernels",
    ]
    assert checks["Python"].ok and checks["problems"].ok and "cpu" in checks["device"].detail
    assert checks["packages"].ok, checks["packages"].detail
    assert checks["Python"].detail.endswith("supported: >=3.11,<3.14")
    assert all(bool(check.remedy) != check.ok and check.detail for check in checks.values())


def test_every_requirement_is_held_against_its_range(monkeypatch):
    declared = ["torch>=99", "no-such-package-here>=1", "psutil>=1", "nbgrader>=1; extra == 'classroom'"]
    monkeypatch.setattr(hardware, "_declared", lambda: (">=99", declared))
    checks = by_name(doctor_checks())
    assert not checks["Python"].ok and "Install a Python >=99" in checks["Python"].remedy
    assert not checks["packages"].ok
    missing, outside = sorted(checks["packages"].detail.split("; "))
    assert missing == "no-such-package-here is missing"
    assert outside.startswith("torch 2") and outside.endswith("is outside >=99")


def test_the_declaration_is_pyprojects_own():
    python, declared = hardware._declared()
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = "{python}"' in text
    assert any(line.startswith("torch") for line in declared) and all(f'"{line}"' in text for line in declared)


def test_missing_data_is_said_with_its_place(monkeypatch, tmp_path):
    for module in (grpo_edu.problems.files, grpo_edu.problems.templates):
        monkeypatch.setattr(module, "data_dir", lambda: tmp_path)
    checks = by_name(doctor_checks())
    for name in ("problems", "tiny model"):
        assert not checks[name].ok and str(tmp_path) in checks[name].detail and "Restore" in checks[name].remedy


def test_a_damaged_model_is_a_finding(monkeypatch, tmp_path):
    shutil.copytree(REPOSITORY / "data" / "problems", tmp_path / "problems")
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(grpo_edu.problems.templates, "data_dir", lambda: tmp_path)
    monkeypatch.setattr("grpo_edu.models.data_dir", lambda: tmp_path)
    assert by_name(doctor_checks())["tiny model"].ok is False


def test_a_full_disk_and_too_many_threads(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=GIB // 10))
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    checks = by_name(doctor_checks())
    assert not checks["disk space"].ok and "Free at least 1 GiB" in checks["disk space"].remedy
    threads = checks["threads"]
    assert not threads.ok and "8 on 1.5 usable" in threads.detail and "OMP_NUM_THREADS=2" in threads.remedy


def test_a_missing_library_is_a_finding_not_a_crash(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)  # import psutil now raises ImportError
    checks = by_name(doctor_checks())
    assert not checks["memory"].ok and "psutil" in checks["memory"].detail
    assert "course.py setup" in checks["memory"].remedy
