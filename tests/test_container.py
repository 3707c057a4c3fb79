"""Control-group limits, read from files as the Linux kernel writes them."""

import math

import pytest

from grpo_edu.container import cpu_quota, memory_limit

GIB = 2**30


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
    folder = root({
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon {GIB}\ninactive_file {GIB}\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": f"{GIB}\n",
    })  # fmt: skip
    assert cpu_quota(folder) == 1.5
    # 3 GiB in use, of which 1 GiB is file cache that the kernel gives back
    assert memory_limit(folder) == (4 * GIB, 2 * GIB)


def test_inside_a_container_the_path_may_be_the_hosts(root):
    folder = root({
        "proc/self/cgroup": "0::/docker/0123abcd\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
    })  # fmt: skip
    assert cpu_quota(folder) == 0.5
    assert memory_limit(folder) == (2 * GIB, 0)


def test_version_1_finds_its_controllers(root):
    folder = root({
        "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {2 * GIB}\n",
    })  # fmt: skip
    assert cpu_quota(folder) == 2.0
    assert memory_limit(folder) == (8 * GIB, 5 * GIB)
