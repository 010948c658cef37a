"""Every test here has the stand-in driver, with two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.standin.library import StandIn
from tests.support.standin.plugin import standin_directory, standin_library

__all__ = ["standin_directory", "standin_library"]


@pytest.fixture
def standin(standin_library: Path, tmp_path: Path) -> Iterator[StandIn]:
    """Return a driver with two idle H200s; every hanging call ends with the test."""
    with StandIn(tmp_path, standin_library, devices=2) as instance:
        yield instance
