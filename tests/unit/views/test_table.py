"""The table of the terminal, for what owners do not show: a ghost device, uncharged memory."""

from dataclasses import replace

import pytest

from tests.support.builders import MIB, device, holding, managed, snapshot
from vramledger.model.snapshot import LeftBytes, State, UndividedBytes
from vramledger.views.table import render_table


@pytest.mark.parametrize("ghost", [True, False, None])
def test_a_ghost_device_says_so(ghost: bool | None) -> None:
    """A GPU that is busy without anybody has a line that says what helps; any other GPU has none."""
    one = replace(device(0, utilization={"gpu": 1.0, "memory": 0.0}), ghost=ghost)
    assert ("GHOST: 100% busy for minutes" in render_table(snapshot(one))) is (ghost is True)


def test_uncharged_memory_is_shown_beside_what_nvml_charges() -> None:
    """A holder shows all that it has, or how much more it can have; below the ledger is who shares what."""
    left = LeftBytes(694, "alice", 0.0, 4096 * MIB, 4096 * MIB, (8, 9), "created by pid 694 of alice")
    shared = UndividedBytes(4096 * MIB, (8, 9), State.ACTIVE, False, None)
    several = managed(0, 4096 * MIB)
    one = device(
        0, [holding(7, uncharged=managed(2048 * MIB)), holding(8, uncharged=several)], undivided=shared
    )
    table = render_table(snapshot(replace(one, left=(left,))))
    assert "2.50 GiB (2.00 GiB uncharged)" in table
    assert "0.50 GiB (up to 4.00 GiB more)" in table
    assert "undivided: 4.00 GiB that NVML charges to nobody are in one or several of pid 8, 9" in table
    assert "left behind: 4.00 GiB created by pid 694 of alice; held by one or several of pid 8, 9" in table
