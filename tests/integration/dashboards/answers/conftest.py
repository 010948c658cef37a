"""One Prometheus with the simulated nodes, for all files of this folder: they stay on one worker."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.dashboards import database
from tests.support.dashboards.answers import Answer, answers
from tests.support.dashboards.database import Samples
from tests.support.dashboards.files import FILES
from tests.support.dashboards.nodes import scrapes
from tests.support.fleet.engines import Engine


@pytest.fixture(scope="package")
def samples(require_tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Return hours of scrapes of all nodes, and what the rules recorded from them."""
    require_tool("promtool")
    read = "vramledger_process:demand_growth:ratio".join(path.read_text(encoding="utf-8") for path in FILES)
    return database.collect(scrapes(), tmp_path_factory.mktemp("collected"), read)


@pytest.fixture(scope="package")
def engine(
    samples: Samples, require_tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    home = tmp_path_factory.mktemp("prometheus")
    with database.prometheus(require_tool("prometheus"), home, samples) as running_engine:
        yield running_engine


@pytest.fixture(scope="package")
def answered(engine: Engine) -> list[Answer]:
    return list(answers(engine))
