"""Which cases of a fixture are to be tested: one evaluation of many costs as much as its cases."""

from __future__ import annotations

from collections.abc import Mapping

import pytest


def selected_cases(request: pytest.FixtureRequest) -> list[Mapping[str, object]]:
    """Return the parameters of each selected test that uses a fixture of its file with this parameter."""
    name, own = str(request.fixturename), getattr(request, "param", None)
    tests = (
        each
        for each in request.session.items
        if isinstance(each, pytest.Function) and each.path == request.path and name in each.fixturenames
    )
    return [each.callspec.params for each in tests if each.callspec.params.get(name) == own]
