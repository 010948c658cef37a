"""Fixtures for every test, and the list of what a run did not test."""

import asyncio
import gc
import inspect
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import examples, requirements
from tests.support.exporter import NO_EXPORTER
from tests.support.order import LONG, unit_of
from tests.support.players.stage import Stage
from vramledger.config import CONTROL_VARIABLE


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


def pytest_configure(config: pytest.Config) -> None:
    """Set up hypothesis and jsonschema, ask no exporter of this host, and hear interrupts from a script, too.

    Every program of a test inherits the last two: one that is to end by ^C would run on for ever.
    """
    os.environ[CONTROL_VARIABLE] = NO_EXPORTER
    if config.option.markexpr == BRIEF:
        os.environ[examples.FEWER] = "1"
    else:
        os.environ.pop(examples.FEWER, None)
    examples.load()
    # jsonschema compiles this grammar for a second at its import, for a format that no schema here has.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    gc.disable()  # until the end of the collection, which keeps what it makes
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


BRIEF = "not thorough"
"""What ``make test`` selects."""

LEFT_OUT = pytest.StashKey[Counter[str]]()
"""How many tests of each file ``make test`` leaves to ``make test-all``."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the repeats, and put the files into the order in which they begin."""
    _mark_repeats(items)
    place = {unit: number for number, unit in enumerate(LONG)}
    items.sort(key=lambda item: place.get(unit_of(item.nodeid), len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401 xdist has no types
    """Give each worker whole files, and the files of a folder that shares servers to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    # It may not be installed, and has no types.
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped] # noqa: PLC0415

    class Together(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def remove_node(self, node: Any) -> str | None:  # noqa: ANN401
            """Give what a worker that crashed has left to the others, without the test in which it did.

            xdist also gives them the files that were done, for which no report ever comes: all wait for ever.
            """
            units = {
                name: unit for name, unit in self.assigned_work.pop(node).items() if not all(unit.values())
            }
            if not units:
                return None
            crashed: str = next(test for test, done in next(iter(units.values())).items() if not done)
            next(iter(units.values()))[crashed] = True
            self.workqueue.update({name: unit for name, unit in units.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return Together(config, log)


def _mark_repeats(items: list[pytest.Item]) -> None:
    """Make the cases that ``repeats`` does not keep thorough; a test that has one case keeps it."""
    cases: Counter[str] = Counter()
    for item in items:
        if repeats := item.get_closest_marker("repeats"):
            cases[name := item.nodeid.partition("[")[0]] += 1
            if cases[name] > repeats.kwargs.get("kept", 1):
                item.add_marker(pytest.mark.thorough)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine to its end, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 100))
    return True


def pytest_runtest_teardown() -> None:
    """Fail where a test lets SIGPIPE end this process: its worker would vanish later, without a trace."""
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN


def pytest_collection_finish() -> None:
    """Keep what is there now out of every search for garbage: after the collection that is 7,000 tests.

    Not from Python 3.14 on: there hypothesis asks the collector who refers to its source of chance, and what
    is frozen is not in the answer.
    """
    if sys.version_info < (3, 14):
        gc.collect()
        gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # with 700 a fiftieth of all time went into searches
    gc.enable()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the tests that ``make test`` leaves out; a worker reports the count at its end."""
    for item in items:
        if item.config.option.markexpr == BRIEF and item.get_closest_marker("thorough"):
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
        terminalreporter.line("every test with hypothesis: four fifths of its examples")
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
