"""The socket on which an exporter listens, for the tests of the code in the user's process."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import examples
from tests.support.listening import FakeExporter


def pytest_configure() -> None:
    """Do what tests/conftest.py does: the tests of the wheel alone are without it."""
    examples.load()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="vl-") as directory:
        yield Path(directory)


@pytest.fixture
def exporter(place: Path) -> Iterator[FakeExporter]:
    with FakeExporter(place / "agent.sock") as listener:
        yield listener
