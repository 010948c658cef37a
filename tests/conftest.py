"""Fixtures for every test, and the list of what a run did not test."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import requirements
from tests.support.players.stage import Stage

# An example may take as long as a busy machine makes it: times are measured in tests/tools/bench alone.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def project() -> Path:
    """Return the root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], Path]:
    """Return :func:`tests.support.requirements.require_tool`, for tests that use fixtures."""
    return requirements.require_tool


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Give a place for real processes, which end with the test."""
    with Stage() as instance:
        yield instance


def pytest_configure() -> None:
    """Have interrupts heard where a script runs us in its background: every program of a test inherits it.

    One that is to end by ^C would run on for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


LEFT_OUT = pytest.StashKey[Counter[str]]()
"""How many tests of each file ``make test`` leaves to ``make test-all``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that may take longest, so that no worker begins one when all others are done."""
    longest: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), limit.args[0] if limit else 0.0)
    items.sort(key=lambda item: -longest[item.path])


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the tests that ``make test`` leaves out; a worker reports the count at its end."""
    for item in items:
        if item.config.option.markexpr == "not thorough" and item.get_closest_marker("thorough"):
            left_out = item.config.stash.setdefault(LEFT_OUT, Counter())
            left_out[item.nodeid.partition("::")[0]] += 1
            if hasattr(item.config, "workeroutput"):
                item.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401 xdist has no types
    """Store a worker's count; every worker has the same one."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[LEFT_OUT] = Counter(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was left out and what was skipped for lack of a tool, with the number of tests of each."""
    left_out = terminalreporter.config.stash.get(LEFT_OUT, Counter())
    if left_out:
        terminalreporter.section("left to make test-all")
        for file, tests in sorted(left_out.items()):
            terminalreporter.line(f"{file}: {_count(tests)}")
        terminalreporter.line(f"{_count(left_out.total())} more: make test-all")
    costs: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _, loud, what = reason.partition(requirements.NOT_TESTED)
        if loud:
            costs[what] = costs.get(what, 0) + 1
    if costs:
        terminalreporter.section("NOT TESTED on this machine", sep="!", yellow=True, bold=True)
        for what, tests in sorted(costs.items()):
            terminalreporter.line(f"{what}: {_count(tests)} skipped", yellow=True)


def _count(tests: int) -> str:
    return f"{tests} {'test' if tests == 1 else 'tests'}"
