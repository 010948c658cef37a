"""Every test here has the stand-in driver, with two GPUs, and holders that are real processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.standin.library import StandIn
from tests.support.standin.plugin import standin_directory, standin_library

__all__ = ["standin_directory", "standin_library"]

Holders = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def standin(standin_library: Path, tmp_path: Path) -> Iterator[StandIn]:
    """Return a driver with two idle H200s; every hanging call ends with the test."""
    with StandIn(tmp_path, standin_library, devices=2) as instance:
        yield instance


@pytest.fixture
def holder() -> Iterator[Holders]:
    """Return a function that starts a process to be listed as a holder, as another user or in a wrapper."""
    with ExitStack() as stack:

        def start(user: int | None = None, wrapper: Sequence[str] = ()) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen([*wrapper, "sleep", "300"], user=user))
            stack.callback(process.kill)
            return process

        yield start
