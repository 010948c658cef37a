"""What frameworks hold beyond their need, and what could share a GPU, is that of the simulation."""

import pytest

from tests.support.dashboards.figures import figure, one, rows_of, total_of, value
from tests.support.fleet.engines import Engine

FRAGMENTATION = "Fragmentation: free, but not usable"

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder


def test_room_is_part_of_the_gpu_and_counts_copies(engine: Engine) -> None:
    """What is free and what limits would free are parts of one GPU; where there is room, copies fit."""
    total, free = (
        {(row["instance"], row["gpu"]): row["value"] for row in rows_of(engine, f"vramledger_device_{what}")}
        for what in ("memory_total_bytes", 'memory_bytes{state="free"}')
    )
    beyond = value(engine, "framework", "Room on each GPU", "B")

    assert figure(engine, "framework", "More copies fit") > 0
    assert total_of(beyond) > 0
    for row in beyond:
        gpu = row["instance"], row["gpu"]
        assert row["value"] + free[gpu] <= total[gpu]


def test_jobs_that_could_move_are_named_with_the_gpu(engine: Engine) -> None:
    """Each of two small jobs on a GPU each is named with the other's GPU."""
    panel = "Jobs that could move to another GPU"
    jobs = value(engine, "framework", panel, instance="apart")
    assert {(job["gpu"], job["to"]) for job in jobs} == {("0", "1"), ("1", "0")}
    assert value(engine, "framework", panel, instance="waits") == []


def test_retries_are_counted_in_whole_numbers(engine: Engine) -> None:
    """A count of retries is not extrapolated to a part of one."""
    rows = value(engine, "framework", FRAGMENTATION, "C")

    assert rows
    assert all(row["value"].is_integer() for row in rows)


def test_whether_segments_expand_stands_beside_fragmentation(engine: Engine) -> None:
    """Each program with free pieces says whether the setting that helps is there."""
    rows, told = (value(engine, "framework", FRAGMENTATION, ref) for ref in "AE")

    assert {row["pid"] for row in rows} <= {row["pid"] for row in told}
    assert {row["value"] for row in told} <= {0.0, 1.0}


def test_fragmentation_is_the_share_of_the_pool_in_free_pieces(engine: Engine) -> None:
    """It is what is split and free over what is reserved: few pieces of a large pool are a small share."""
    shares: dict[str, float] = {}
    for node in ("fragmented", "leak"):
        split, pool = (
            one(rows_of(engine, f'vramledger_torch_{metric}_bytes{{instance="{node}"}}'))
            for metric in ("inactive_split", "reserved")
        )
        shares[node] = split / pool
        shown = figure(engine, "framework", FRAGMENTATION, "B", instance=node)
        assert shown == pytest.approx(shares[node])

    assert shares["fragmented"] > 0.1 > shares["leak"]
