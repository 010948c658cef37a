"""What every test can ask for, and the list of what a run did not test."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import requirements

# An example may take as long as a busy machine makes it: times are measured in tests/tools/bench alone.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def project() -> Path:
    """Return the root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], Path]:
    """Return :func:`tests.support.requirements.require_tool`, for tests that take fixtures."""
    return requirements.require_tool


def pytest_configure() -> None:
    """Have interrupts heard where a script runs us in its background: every program of a test inherits it.

    One that is to end by ^C would run on for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the loud skips apart, with how many tests each of them cost."""
    costs: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _, loud, what = reason.partition(requirements.NOT_TESTED)
        if loud:
            costs[what] = costs.get(what, 0) + 1
    if costs:
        terminalreporter.section("NOT TESTED on this machine", sep="!", yellow=True, bold=True)
        for what, tests in sorted(costs.items()):
            terminalreporter.line(f"{what}: {tests} {'test' if tests == 1 else 'tests'} skipped", yellow=True)
