"""The files have no key that Grafana does not know: the types of its schema keep all of it."""

import json
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.support.dashboards.files import load_dashboards
from tests.support.requirements import NOT_TESTED

if find_spec("grafana_foundation_sdk") is None:
    pytest.skip(f"{NOT_TESTED}Grafana's schema is a package for Python 3.11", allow_module_level=True)

with warnings.catch_warnings():
    # The package would write new dashboards in the next schema, which Grafana does not load yet.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARDS = load_dashboards()

NEWER = "wrapHeaderText"
"""A key of tables that Grafana has since 12.1, and the package not yet."""


def differences(before: object, after: object, path: str = "") -> Iterator[str]:
    """Yield the places at which something is missing or different afterwards."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from differences(value, after[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif before != after:
        yield path


@pytest.mark.parametrize("uid", list(DASHBOARDS))
def test_grafanas_types_know_every_key(uid: str) -> None:
    """Nothing is lost when the types of Grafana's schema read a file and write it again."""
    register_default_plugins()
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARDS[uid])))
    lost = differences(DASHBOARDS[uid], again)

    assert [each for each in lost if not each.endswith(NEWER)] == []
