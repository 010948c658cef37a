"""Fixtures for tests that need a driver: a conftest imports them by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.standin.library import StandIn, build


@pytest.fixture(scope="session")
def standin_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this session's builds of the stand-in."""
    return tmp_path_factory.mktemp("standin")


@pytest.fixture(scope="session")
def standin_library(standin_directory: Path) -> Path:
    """The stand-in library with every function, built once a session."""
    return build(standin_directory)


@pytest.fixture
def standin(standin_library: Path, tmp_path: Path) -> Iterator[StandIn]:
    """A driver with one idle H200 that the test controls; hangs end with the test."""
    with StandIn(tmp_path, standin_library) as instance:
        yield instance


@pytest.fixture
def standin_here(standin: StandIn) -> Iterator[StandIn]:
    """The same driver, used by pynvml in the test's own process."""
    with standin.in_this_process():
        yield standin
