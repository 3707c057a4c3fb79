"""Threads on a computer that is shared: how OpenMP waits, how many cores are free, and what a container grants."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from random_policy import byte_tokenizer, random_model

import course
from grpo_edu.fast import cores
from grpo_edu.fast.cores import BackgroundLoad, FreeCores, cpu_quota, prepare_openmp, threads_for
from grpo_edu.fast.memory import memory_limit
from grpo_edu.rollout import generate

GIB = 2**30
OPENMP = ("OMP_", "GOMP_", "KMP_", "MKL_")


# How threads wait


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_decision_of_the_user_stays(name):
    environment = {name: "something"}
    prepare_openmp(environment)
    assert {key: value for key, value in environment.items() if "THREADS" not in key} == {name: "something"}


@pytest.mark.parametrize(("quota", "threads"), [(math.inf, None), (2.5, "2"), (0.5, "1")])
def test_threads_follow_a_quota_that_is_smaller_than_the_cores(monkeypatch, quota, threads):
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cores, "usable_cpus", lambda: list(range(8)))
    environment: dict[str, str] = {}
    prepare_openmp(environment)
    assert environment.pop("GOMP_SPINCOUNT") == str(cores.SPIN_COUNT)
    assert environment.get("OMP_NUM_THREADS") == threads


def spin_wait_warning(imports, **variables):
    """What the doctor would say in a fresh process that imports in this order, with these variables."""
    code = f"import {imports}; from grpo_edu.fast.cores import spin_wait_warning; print(spin_wait_warning())"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(OPENMP)}
    run = [sys.executable, "-c", code]
    return subprocess.run(run, env={**plain, **variables}, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="torch's wheels bring libgomp on Linux alone")
@pytest.mark.parametrize(
    ("imports", "variables", "problem"),
    [
        ("grpo_edu, torch", {}, ""),
        ("torch, grpo_edu", {}, "torch was imported before grpo_edu"),
        pytest.param("torch, grpo_edu", {"OMP_WAIT_POLICY": "PASSIVE"}, "", marks=pytest.mark.long),
        pytest.param(
            "grpo_edu, torch", {"OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=active", marks=pytest.mark.long
        ),
        pytest.param(
            "grpo_edu, torch", {"GOMP_SPINCOUNT": "infinite"}, "GOMP_SPINCOUNT=infinite", marks=pytest.mark.long
        ),
    ],
)
def test_what_would_stall_a_busy_computer_is_named(imports, variables, problem):
    if "libgomp" not in Path("/proc/self/maps").read_text():
        pytest.skip("this torch does not use libgomp")
    found = spin_wait_warning(imports, **variables)
    assert problem in found and bool(problem) == bool(found)


def test_the_starter_gives_jupyterlab_the_same_setting(monkeypatch):
    for name in list(os.environ):
        if name.startswith(OPENMP):
            monkeypatch.delenv(name)
    assert course.environment()["GOMP_SPINCOUNT"] == str(cores.SPIN_COUNT)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert "GOMP_SPINCOUNT" not in course.environment()


# How many cores are free


@pytest.mark.parametrize(
    ("others", "quota", "threads"),
    [(0.0, math.inf, 4), (0.2, math.inf, 4), (1.0, math.inf, 3), (9.0, math.inf, 1), (0.0, 2.0, 2), (0.0, 0.5, 1)],
)
def test_threads_are_the_free_cores(monkeypatch, others, quota, threads):
    monkeypatch.setattr(cores, "usable_cpus", lambda: list(range(4)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert threads_for(others, limit=8) == threads
    assert threads_for(others, limit=1) == 1


def test_other_programs_are_what_is_busy_without_this_one(monkeypatch):
    clock, busy, own = iter([0.0, 0.05, 1.0, 100.0, 101.0]), iter([10.0, 12.5, 60.0, 60.5]), iter([5.0, 6.0, 7.0, 7.5])
    monkeypatch.setattr(cores.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(cores.time, "process_time", lambda: next(own))
    monkeypatch.setattr(cores, "busy_seconds", lambda: next(busy))
    programs = BackgroundLoad()
    assert [programs.cores() for _ in range(5)] == [
        0.0,  # nothing to compare with
        0.0,  # too early to measure again
        1.5,  # 2.5 seconds, of which 1 is our own
        1.5,  # an average over 99 s says little about now
        0.0,
    ]


def test_a_busy_neighbour_is_noticed():
    programs = BackgroundLoad()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            for _ in range(50):
                programs.cores()
                time.sleep(0.2)
                if programs.cores() > 0.3:
                    break
            assert programs.cores() > 0.3
        finally:
            neighbour.kill()


@pytest.fixture
def two_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


def test_a_rollout_takes_the_free_cores_and_gives_the_setting_back(monkeypatch, two_threads):
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer)
    used = []
    model.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))

    def sample():
        generator = torch.Generator().manual_seed(0)
        sizes = {"num_generations": 2, "max_completion_length": 4}
        return generate(model, tokenizer, ["ab", "c"], generator=generator, **sizes).completions

    monkeypatch.setattr(cores, "usable_cpus", lambda: [0, 1])
    monkeypatch.setattr(cores._load, "cores", lambda: 0.0)
    quiet = sample()
    assert set(used) == {2}
    used.clear()
    measured = iter([0.0, 0.0] + [2.0] * 9)  # other programs start during the rollout
    monkeypatch.setattr(cores._load, "cores", lambda: next(measured))
    assert sample() == quiet
    assert used[0] == 2 and used[-1] == 1 and torch.get_num_threads() == 2


def test_the_number_of_threads_comes_back_after_an_error(monkeypatch, two_threads):
    monkeypatch.setattr(cores._load, "cores", lambda: 1000.0)
    with pytest.raises(KeyError), FreeCores():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2


def test_a_fixed_number_of_threads_stays(monkeypatch, two_threads):
    monkeypatch.setattr(cores._load, "cores", lambda: 1000.0)
    monkeypatch.setenv("OMP_DYNAMIC", "FALSE")
    with FreeCores() as free:
        free.look()
        assert torch.get_num_threads() == 2


# What a container grants


@pytest.fixture
def root(tmp_path):
    """A root whose files are given as path → content."""

    def place(files):
        for path, content in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content)
        return tmp_path

    return place


def test_no_control_groups_no_limit(root):
    assert cpu_quota(root({})) == math.inf
    assert memory_limit(root({})) == (math.inf, math.inf)


def test_version_2_takes_the_tightest_of_a_group_and_its_parents(root):
    folder = root(
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\ninactive_file {GIB}\n",
            "sys/fs/cgroup/user/job/memory.max": "max\n",
            "sys/fs/cgroup/user/job/memory.current": f"{GIB}\n",
        }
    )
    assert cpu_quota(folder) == 1.5
    # 3 GiB in use, of which 1 GiB is file cache that the kernel gives back
    assert memory_limit(folder) == (4 * GIB, 2 * GIB)


def test_inside_a_container_the_path_may_be_the_hosts(root):
    folder = root(
        {
            "proc/self/cgroup": "0::/docker/0123abcd\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        }
    )
    assert cpu_quota(folder) == 0.5
    assert memory_limit(folder) == (2 * GIB, 0)


def test_version_1_finds_its_controllers(root):
    folder = root(
        {
            "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{5 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
        }
    )
    assert cpu_quota(folder) == 2.0
    assert memory_limit(folder) == (8 * GIB, 5 * GIB)
