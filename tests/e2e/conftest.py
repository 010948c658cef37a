"""Every test here has the stand-in driver, with two GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.exporter import QUICK, Exporter, no_driver, serving
from tests.support.standin.library import StandIn
from tests.support.standin.plugin import standin_directory, standin_library

__all__ = ["standin_directory", "standin_library"]


@pytest.fixture
def standin(standin_library: Path, tmp_path: Path) -> Iterator[StandIn]:
    """Return a driver with two idle H200s; every hanging call ends with the test."""
    with StandIn(tmp_path, standin_library, devices=2) as instance:
        yield instance


@pytest.fixture
def nothing(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a host without a driver."""
    return no_driver(tmp_path / "lib")


@pytest.fixture(scope="module")
def shared(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """Run one exporter, with data, for the tests of a file that leave it as it is."""
    with (
        StandIn(tmp_path_factory.mktemp("shared"), standin_library, devices=2) as standin,
        serving(*QUICK, driver=standin.env()) as exporter,
    ):
        exporter.until(lambda page: page.up, "data")
        yield exporter
