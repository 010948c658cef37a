"""The sums that dashboards and reports show: nothing twice, nothing old, nothing left out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.alerts.nodes import Holder, Node, changing_at
from tests.support.alerts.parts import (
    MIB,
    STANDS_STILL,
    forgotten,
    from_minute,
    gone,
    grows,
    jax,
    on_gpu,
    series,
    torch,
    until,
    with_labels,
)
from tests.support.alerts.promtool import expect, firing
from tests.support.dashboards.figures import query_of
from tests.support.dashboards.files import substitute_variables
from tests.support.host.model import GIB


class Sums(NamedTuple):
    """What there is on nodes, each of another name, and the values of queries at some minutes."""

    promise: str
    nodes: Sequence[Node]
    at: Mapping[float, Mapping[str, float]]


def needing(held: float, need: float, *, pid: int = 7, sm: float = 0.01) -> Holder:
    return jax(held, need - 0.5, pid=pid, sm=sm)


def panel(dashboard: str, title: str, letter: str = "B", span: str = "30m") -> str:
    """Return the query of a panel over a time range."""
    return substitute_variables(query_of(dashboard, title, letter), __range=span)


def published(held: float, need: float, total: float) -> Node:
    """Return a published backend that holds and needs so many MiB of a card, as JAX's agent would tell it.

    The cases are TensorFlow's, whose agent tells no pool: without one, what is outside of it is not known.
    """
    return Node([jax(held * MIB, (need - 500) * MIB, outside=500 * MIB, sm=0.04)], total=total * MIB)


FIT, ROOM = "vramledger_device:more_jobs_fit:floor", "vramledger_device:room_bytes:needed"
PERHAPS = "vramledger_process:memory_bytes:perhaps_unneeded"
OWNED, DEMAND = "vramledger_process:memory_bytes:owned", "vramledger_process:demand_bytes:min3m"
HELD, USED = "vramledger_owner:memory_held_bytes:sum", "vramledger_node:memory_used_bytes:sum"
FACTOR, PEAK = "vramledger_process:hoarding_factor:ratio", "vramledger_process:peak_need_bytes:sum / 2^30"
RISES = "count(vramledger_process:demand_rise_bytes:delta15m)"
GROWING = panel("process", "Grows", "A")
DROPPED, DROPPED_OWNERS, NONE_DROPPED = (
    panel("exporter", "Series dropped, by device", letter, "20m") for letter in "ABC"
)
HOLDING = f'sum by (instance, owner) ({OWNED}{{owner="bob"}})'
ENDED = Node([Holder(7, until(10, 10), owner="bob")])
SHRUNK = Node(
    [Holder(7, changing_at(10, 40, 4))], missing=lambda m: 10.75 <= m < 11.5,
    relabel=lambda minute, labels: {**labels, "gpu": "1"} if "gpu" in labels and minute >= 10 else labels,
)  # fmt: skip
LATER_DEAD = Holder(7, 10, lambda m: "active" if m < 10 else "dead", since=changing_at(10, 0, 10))
OTHERS = [Holder(pid, 1, most=20, owner="bob", user="bob") for pid in (3, 4)]

SUMS = [
    Sums("Ten programs of 1 GiB on a card of 74 GiB leave room for 64 more, and not ten times for as many",
        [Node([needing(1, 1, pid=pid) for pid in range(2, 12)], total=74)],
        {20: {FIT: 64, "max(vramledger_process:more_jobs_fit:floor)": 64}}),
    Sums("Where the only program takes a quarter of the SMs, no more jobs fit than there are SMs for",
        [Node([needing(10, 1, sm=0.25)])], {20: {FIT: 3}}),
    Sums("The driver gives the device's figure to whoever was found, so beside others memory alone decides",
        [Node([needing(10, 1, pid=pid, sm=0.5) for pid in (2, 3)])], {20: {FIT: 98}}),
    *[
        Sums(f"A job can move beside {who}, whose need is not known: what is free is room",
             [Node([needing(40, 30, pid=2), *beside], gpus=2, total=80)],
             {20: {f'{ROOM}{{gpu="0"}}': 50 * GIB, f'{ROOM}{{gpu="1"}}': room * GIB,
                   'vramledger_process:movable_bytes:need{pid="2",to="1"}': 30 * GIB}})
        for who, beside, room in (
            ("nobody", [], 80), ("one without agent", [Holder(3, 20, gpu=1, framework="", policy="")], 60)
        )
    ],
    *[
        Sums(f"A job on the roomiest GPU can move to the next, which is busy for {busy}: {moves}",
             [Node([needing(10, 5, pid=2, sm=0.2), replace(needing(60, 55, pid=3, sm=busy), gpu=1)],
                   gpus=2, total=80)],
             {20: {'count(vramledger_process:movable_bytes:need{pid="2",to="1"}) or vector(0)': moves}})
        for busy, moves in ((0.1, 1), (0.9, 0))
    ],
    Sums("Of TensorFlow, which tells no pool, what it has never used is perhaps not needed; of CuPy all is",
        [Node([Holder(2, 70, framework="tensorflow", policy="preallocate",
                      agent={"framework_in_use_bytes": 2.0, "framework_in_use_peak_bytes": 3.0}),
               Holder(3, 40, gpu=1, framework="cupy", agent={"framework_in_use_bytes": 2.0}),
               replace(needing(30, 20, pid=4), gpu=1)], gpus=2, total=80)],
        {20: {f"sum({PERHAPS})": 67 * GIB, f'{PERHAPS}{{pid="2"}}': 67 * GIB}}),
    Sums("The growth that is shown is the rise of 15 minutes, also where it has slowed",
        [Node([Holder(7, lambda m: 10 + 0.5 * min(m, 80) + 0.3 * max(m - 80, 0), start=-90)])],
        {88: {f"({GROWING}) * 60 > bool 0.3 * 2^30": 1, f"({GROWING}) * 60 < bool 0.5 * 2^30": 1}}),
    Sums("A program that grew has a figure in *Grows* while it is there, and not while its rise is recorded",
        [Node([replace(Holder(7, until(40, grows(0.5))), start=0)])],
        {38: {f"({GROWING}) > bool 0": 1, RISES: 1}, 42: {f"({GROWING}) < bool 0": 1, RISES: 1}}),
    Sums("Where no exporter has a web file, the timeline of its use says so",
        [Node([Holder(7, 10)], extra={series("collector_success", collector="exporter"): 1})],
        {8: {panel("exporter", "Web configuration in use"): 2}}),
    Sums("What the agent said of the newest failed allocation stays on its page for the time range",
        [Node([Holder(7, until(20, 10))], extra={series("framework_last_oom_requested_bytes", pid=7,
        framework="torch"): lambda m: 7.0 * GIB if 10 <= m < 20 else None})],
        {28: {panel("process", "Newest failed allocation"): 7 * GIB}}),
    Sums("Without an agent nobody can say how many jobs fit", [Node([Holder(7, 10)])],
        {20: {f"count({FIT}) or vector(0)": 0}}),
    Sums("What was dropped for a minute is drawn for the device; where nothing was dropped, a line says so",
        [Node([Holder(7, 10)], extra={on_gpu("processes_dropped"): lambda m: 3.0 if 5 <= m < 6 else 0.0})],
        {8: {DROPPED: 3, f"({DROPPED_OWNERS}) or vector(9)": 9, f"({NONE_DROPPED}) or vector(9)": 9},
        19: {f"({DROPPED}) or vector(9)": 9, NONE_DROPPED: 0}}),
    Sums("Bytes that were active on an exporter that has stood still for 20 minutes are in no sum",
        [Node([Holder(7, 10)], extra=STANDS_STILL), Node([Holder(7, 10)])],
        {30: {HELD: 10 * GIB, f"sum({USED})": 10 * GIB}}),
    Sums("Memory of unknown holders is in the sum of what is used on the node",
        [Node([Holder(7, 10)], unknown=20)], {10: {USED: 30 * GIB}}),
    Sums("A holder that was idle before a restart of the exporter, and is active after it, holds one time",
        [Node([Holder(7, 10, lambda m: "idle" if m < 20 else "active", since=-60)],
              missing=lambda m: 19.7 <= m < 20)],
        {22: {HELD: 10 * GIB}}),
    Sums("What NVML charges to nobody counts in every sum of its holder and owner; of two holders, in none",
         [Node([replace(needing(10, 4, pid=2), managed=8, left=2), *OTHERS])], {20: {
             f'{OWNED}{{pid="2"}}': 20 * GIB, f'sum({OWNED}{{pid=~"3|4"}})': 2 * GIB,
             f'{HELD}{{owner="ann"}}': 20 * GIB, f'{HELD}{{owner="bob"}}': 2 * GIB,
             f'{DEMAND}{{pid="3"}}': 1 * GIB,
             # Of its 20 GiB it needs 4 - 0.5 of its framework and 10.5 outside the pool of 9.5.
             "vramledger_node:memory_beyond_need_bytes:sum": 6 * GIB,
             f"{USED} - vramledger_node:memory_needed_bytes:sum": 6 * GIB,
             USED: 22 * GIB, f'{FACTOR}{{pid="2"}}': 20 / 14,
             # Managed memory gives way, so an allocation can get it; it is not free.
             "vramledger_device:memory_free_bytes:last": 78 * GIB,
             "vramledger_device:memory_allocatable_bytes:last": 86 * GIB}}),
    Sums("The least of 3 minutes has uncharged bytes only if they were there all the time",
        [Node([Holder(2, 1, managed=8), Holder(3, 1, managed=gone(18, 18.5, 8))])],
        {20: {f'{DEMAND}{{pid="2"}}': 9 * GIB, f'{DEMAND}{{pid="3"}}': 1 * GIB}}),
    Sums("What is charged and what is not are one demand, whatever other labels a target has",
        [Node([Holder(2, 1, managed=8)], relabel=with_labels(rack="3"))],
        {20: {f'{DEMAND}{{pid="2"}}': 9 * GIB, f"count({DEMAND})": 1, f'{OWNED}{{pid="2"}}': 9 * GIB}}),
    Sums("A holder that shrank when its GPU's index changed shows what it had last while nobody answers",
        [SHRUNK], {11: {OWNED: 4 * GIB}}),
    Sums("A device that does not answer keeps its holdings for 3 minutes; what ends elsewhere is gone",
        [ENDED, replace(ENDED, extra={on_gpu("device_up"): lambda m: float(m < 10)})],
        {9.5: {f"count({HOLDING})": 2}, 14: {f"count({HOLDING}) or vector(0)": 0},
        12: {f'{HOLDING} unless on (instance) up{{instance="n0"}}': 10 * GIB, f"count({HOLDING})": 1}}),
    Sums("A dead holder keeps its owner over a restart, after which nobody can say whose process it was",
        [Node([LATER_DEAD], missing=lambda m: 9 <= m < 10, relabel=from_minute(10, forgotten))],
        {minute: {f'{OWNED}{{owner="ann", state="dead"}}': 10 * GIB} for minute in (10.5, 20)}),
    Sums("An MNIST job takes 94 % of a 24,265 MiB card and needs a nineteenth: 20 fit by memory, 25 by SMs",
        [published(22885, 1205, 24265)], {20: {"round(100 * vramledger_device:memory_used:ratio)": 94,
        f"round({FACTOR})": 19, "1 + vramledger_process:more_jobs_fit:floor": 20,
        "floor(1 / vramledger_process:sm_utilization_ratio:avg15m)": 25}}),
    *[
        Sums(f"A backend on a 48,000 MiB card holds {held} and needs only {need}: so many fit",
             [published(held, need, 48000)],
             {10: {f"round({FACTOR}, 0.1)": factor, "1 + vramledger_process:more_jobs_fit:floor": jobs}})
        for held, need, factor, jobs in (
            (47853, 7000, 6.8, 6), (47853, 2400, 19.9, 20), (47853, 1600, 29.9, 30), (7000, 7000, 1, 6)
        )
    ],
    Sums("A node is watched from its first scrape on: one sample does not tell that sampling has stopped",
        [Node(missing=lambda m: m < 9)], {9: {"vramledger_node:exporter_status:code": 3}}),
    Sums("A program's need is the sum over its frameworks; CuPy reports no peak, so its whole pool counts",
        [Node([Holder(7, 9.5, agent={"torch_allocated_peak_bytes": 6, "torch_reserved_bytes": 9})],
        extra={on_gpu("framework_pool_bytes", pid=7, framework="cupy"): 2 * GIB})], {10: {PEAK: 8.5}}),
]  # fmt: skip


@pytest.mark.parametrize("sums", SUMS, ids=lambda sums: sums.promise)
def test_sums(sums: Sums, tmp_path: Path) -> None:
    """What is promised of a sum is so at each minute."""
    nodes = [replace(node, instance=f"n{number}") for number, node in enumerate(sums.nodes)]
    given = [each for node in nodes for each in node.series(max(sums.at))]
    for minute, figures in sums.at.items():
        assert expect(tmp_path, given, minute, figures) == ""


def test_resnet_that_keeps_the_first_iterations_gradients(tmp_path: Path) -> None:
    """A training whose second iteration also holds the first one's gradients peaks once: no leak."""
    allocated = changing_at(1, 6, 12)
    holder = torch(allocated)
    with_peak = replace(holder, agent={**holder.agent, "torch_allocated_peak_bytes": allocated})
    given = Node([with_peak], total=48).series(60)

    assert expect(tmp_path, given, 60, {PEAK: 12.5}) == ""
    assert firing(tmp_path, given, 60, about={"GpuMemoryLeakSuspected", "GpuMemoryGrowing"}) == []


@pytest.mark.parametrize("span", ["3h", "12h", "1d", "6d"])
def test_a_pid_that_is_used_again_has_no_growth_of_the_one_before(span: str, tmp_path: Path) -> None:
    """The growth of hours is recorded each hour; a process that began since then has none."""
    of = 'cluster="", job="vramledger", instance="n"'
    given = {
        f'vramledger_process:demand_growth_bytes:delta{span}{{{of}, uuid="U", pid="7", source="x"}}': "10",
        f'vramledger_device:memory_total_bytes:last{{{of}, uuid="U"}}': "100x100",
        f'vramledger_process:start_time_seconds:young{{{of}, pid="7"}}': "_x16 200x100",
    }
    listed = [{"series": name, "values": values} for name, values in given.items()]
    asked = f'count(vramledger_process:demand_growth:ratio{{span="{span}"}}) or vector(0)'

    assert expect(tmp_path, listed, 2, {asked: 1}) == ""
    assert expect(tmp_path, listed, 6, {asked: 0}) == ""
