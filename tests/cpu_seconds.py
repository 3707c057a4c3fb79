"""A plugin of pytest that prints the CPU seconds of collection, of the test files and of the most expensive tests.

``python -m pytest -p tests.cpu_seconds``; `course.py test` does so. CPU seconds, those of ended child processes
included, say the same on a busy computer, whereas the time on the clock does not. What a module's fixture starts counts
for the test that asks for it first, and what it ends for the last test of its file. Processes that run until the tests
end, such as a forkserver, have a line of their own.
"""

import os
from collections import Counter
from contextlib import suppress

import psutil
import pytest

SHOWN = 25


def cpu_seconds():
    """CPU seconds of this process and of the child processes that it has waited for (0 for these on Windows)."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    result = yield
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["collection"] = cpu_seconds()
    else:
        session.config.stash[COLLECTION] = [cpu_seconds()]
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for key, name in ((COLLECTION, "collection"), (RUNNING, "running")):
        node.config.stash.setdefault(key, []).append(getattr(node, "workeroutput", {}).get(name, 0.0))


def pytest_sessionfinish(session):
    """Count the processes that were started here and are still running, with those that these have started."""
    running = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            running += sum(child.cpu_times()[:4])
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["running"] = running
    elif session.config.getoption("dist", "no") == "no":
        session.config.stash[RUNNING] = [running]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    now = cpu_seconds()
    report.cpu_seconds, item.stash[STARTED] = now - item.stash.get(STARTED, now), now
    return report


def pytest_terminal_summary(terminalreporter, config):
    """Print what each part has cost, the most expensive first."""
    tests, files = Counter(), Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds = getattr(report, "cpu_seconds", 0.0)
            tests[getattr(report, "nodeid", "")] += seconds
            files[getattr(report, "nodeid", "").partition("::")[0]] += seconds
    collection = config.stash.get(COLLECTION, [])
    terminalreporter.section("CPU seconds")
    terminalreporter.line(f"{sum(collection):8.1f} collection, in {len(collection)} processes")
    terminalreporter.line(f"{sum(files.values()):8.1f} tests")
    terminalreporter.line(f"{sum(config.stash.get(RUNNING, [])):8.1f} processes still running after the tests")
    for name, seconds in [*files.most_common(SHOWN), *tests.most_common(SHOWN)]:
        terminalreporter.line(f"{seconds:8.1f} {name}")


COLLECTION, RUNNING, STARTED = pytest.StashKey[list](), pytest.StashKey[list](), pytest.StashKey[float]()
