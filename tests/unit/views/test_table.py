"""The table of the terminal, for what owners do not show: a ghost device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.builders import device, snapshot
from vramledger.views.table import render_table


@pytest.mark.parametrize("ghost", [True, False, None])
def test_a_ghost_device_says_so(ghost: bool | None) -> None:
    """A GPU that is busy without anybody has a line that says what helps; any other GPU has none."""
    one = replace(device(0, utilization={"gpu": 1.0, "memory": 0.0}), ghost=ghost)

    assert ("GHOST: 100% busy for minutes" in render_table(snapshot(one))) is (ghost is True)
