"""The sums that dashboards and reports show: nothing twice, nothing old, nothing left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.support.alerts.nodes import Holder, Node, Values, uuid
from tests.support.alerts.promtool import expect
from tests.support.dashboards.figures import query_of
from tests.support.dashboards.files import substitute_variables
from tests.support.host.model import GIB


def program(pid: int, held: float, need: float, sm: float = 0.01) -> Holder:
    """Return a program of JAX that holds and needs so many GiB."""
    return Holder(
        pid,
        held,
        sm=sm,
        framework="jax",
        policy="preallocate",
        agent={
            "framework_in_use_bytes": need - 0.5,
            "framework_in_use_peak_bytes": need - 0.5,
            "framework_pool_bytes": held - 0.5,
        },
    )


def test_free_memory_counts_once(tmp_path: Path) -> None:
    """Ten programs of 1 GiB on a card of 74 GiB leave room for 64 more, and not ten times for as many."""
    node = Node([program(pid, 1, 1) for pid in range(2, 12)], total=74)
    figures = {"vramledger_device:more_jobs_fit:floor": 64, "max(vramledger_process:more_jobs_fit:floor)": 64}

    assert expect(tmp_path, node.series(20), 20, figures) == ""


def test_jobs_need_processors_too(tmp_path: Path) -> None:
    """Where the only program takes a quarter of the SMs, no more jobs fit than there are SMs for."""
    node = Node([program(2, 10, 1, sm=0.25)], total=100)

    assert expect(tmp_path, node.series(20), 20, {"vramledger_device:more_jobs_fit:floor": 3}) == ""


def test_rows_of_a_shared_device_are_nobodys_share(tmp_path: Path) -> None:
    """The driver gives the device's figure to whoever was found, so beside others memory alone decides."""
    node = Node([program(2, 10, 1, sm=0.5), program(3, 10, 1, sm=0.5)], total=100)

    assert expect(tmp_path, node.series(20), 20, {"vramledger_device:more_jobs_fit:floor": 98}) == ""


def test_a_job_can_move_beside_a_program_whose_need_is_not_known(tmp_path: Path) -> None:
    """What is free on a GPU is room, whether nobody is there, or somebody without an agent."""
    for beside in ([], [Holder(3, 20, gpu=1, framework="", policy="")]):
        node = Node([program(2, 40, 30), *beside], gpus=2, total=80)
        figures = {
            'vramledger_device:room_bytes:needed{gpu="0"}': 50 * GIB,
            'vramledger_device:room_bytes:needed{gpu="1"}': (60 if beside else 80) * GIB,
            'vramledger_process:movable_bytes:need{pid="2",to="1"}': 30 * GIB,
        }

        assert expect(tmp_path, node.series(20), 20, figures) == ""


def test_a_job_on_the_roomiest_gpu_can_move_to_the_next(tmp_path: Path) -> None:
    """For who is on the GPU with most room the next one counts, and its SMs."""
    small = program(2, 10, 5, sm=0.2)
    for busy, moves in ((0.1, 1), (0.9, 0)):
        other = replace(program(3, 60, 55, sm=busy), gpu=1)
        node = Node([small, other], gpus=2, total=80)
        movable = 'vramledger_process:movable_bytes:need{pid="2",to="1"}'

        assert expect(tmp_path, node.series(20), 20, {f"count({movable}) or vector(0)": moves}) == ""


def test_a_pool_of_which_only_the_use_is_known_is_perhaps_not_needed(tmp_path: Path) -> None:
    """TensorFlow tells no pool, so its need is not known: what it has never used is perhaps not needed."""
    use = {"framework_in_use_bytes": 2.0, "framework_in_use_peak_bytes": 3.0}
    whole = Holder(2, 70, framework="tensorflow", policy="preallocate", agent=use)
    no_peak = Holder(3, 40, gpu=1, framework="cupy", policy="caching", agent={"framework_in_use_bytes": 2.0})
    node = Node([whole, no_peak, replace(program(4, 30, 20), gpu=1)], gpus=2, total=80)
    figures = {
        "sum(vramledger_process:memory_bytes:perhaps_unneeded)": 67 * GIB,
        'vramledger_process:memory_bytes:perhaps_unneeded{pid="2"}': 67 * GIB,
    }

    assert expect(tmp_path, node.series(20), 20, figures) == ""


def test_growth_is_the_same_wherever_it_is_shown(tmp_path: Path) -> None:
    """Fleet names the rate that Process shows of the same program."""
    slower = Holder(7, lambda minute: 10 + 0.5 * min(minute, 80) + 0.3 * max(minute - 80, 0), start=-90)
    series = Node([slower]).series(90)
    here = substitute_variables(query_of("process", "Grows", "A"), __range="30m")
    figures = {f"vramledger_process:demand_growth_bytes:rate / on () ({here})": 1}

    assert expect(tmp_path, series, 88, figures) == ""


def test_who_has_ended_grows_no_more(tmp_path: Path) -> None:
    """A program that grew has a figure in *Grows* while it is there, and not while its rise is recorded."""
    leak = Holder(7, lambda minute: 10 + 0.5 * minute if minute < 40 else None, start=0)
    series = Node([leak]).series(45)
    growing = substitute_variables(query_of("process", "Grows", "A"), __range="30m")
    rises = "count(vramledger_process:demand_rise_bytes:delta15m)"

    assert expect(tmp_path, series, 38, {f"({growing}) > bool 0": 1, rises: 1}) == ""
    assert expect(tmp_path, series, 42, {f"({growing}) < bool 0": 1, rises: 1}) == ""


def test_a_timeline_is_never_without_a_row(tmp_path: Path) -> None:
    """Where no exporter has a web file, the timeline of its use says so."""
    extra: dict[str, Values] = {'vramledger_collector_success{NODE,collector="exporter"}': 1}
    held = Node([Holder(7, 10)], extra=extra).series(10)
    file = substitute_variables(query_of("exporter", "Web configuration in use", "B"))

    assert expect(tmp_path, held, 8, {file: 2}) == ""


def test_a_process_that_has_ended_shows_why_it_failed(tmp_path: Path) -> None:
    """What the agent said of the newest failed allocation stays on its page for the time range."""
    name = 'vramledger_framework_last_oom_requested_bytes{NODE,pid="7",framework="torch"}'
    there = {name: lambda minute: 7.0 * GIB if 10 <= minute < 20 else None}
    ended = Node([Holder(7, lambda minute: 10 if minute < 20 else None)], extra=there).series(30)
    query = query_of("process", "Newest failed allocation", "B")

    asked = substitute_variables(query, __range="30m")
    assert expect(tmp_path, ended, 28, {asked: 7 * GIB}) == ""


def test_a_need_that_is_not_known_is_no_room(tmp_path: Path) -> None:
    """Without an agent nobody can say how many jobs fit."""
    absent = {"count(vramledger_device:more_jobs_fit:floor) or vector(0)": 0}

    assert expect(tmp_path, Node([Holder(7, 10)]).series(20), 20, absent) == ""


def test_series_that_were_dropped_are_drawn(tmp_path: Path) -> None:
    """What was dropped for a minute is drawn for the device; where nothing was dropped, a line says so."""
    where = f'{{NODE,gpu="0",uuid="{uuid(0)}"}}'
    drops = Node(
        [Holder(7, 10)],
        extra={f"vramledger_processes_dropped{where}": lambda minute: 3.0 if 5 <= minute < 6 else 0.0},
    )
    queries = [query_of("exporter", "Series dropped, by device", ref) for ref in "ABC"]
    dropped, owners, none = (substitute_variables(expr, __range="20m") for expr in queries)

    assert expect(tmp_path, drops.series(20), 8, {dropped: 3, f"({owners}) or vector(9)": 9}) == ""
    assert expect(tmp_path, drops.series(20), 8, {f"({none}) or vector(9)": 9}) == ""
    assert expect(tmp_path, drops.series(20), 19, {f"({dropped}) or vector(9)": 9, none: 0}) == ""


def test_what_a_stalled_exporter_shows_is_in_no_sum(tmp_path: Path) -> None:
    """Bytes that were active 20 minutes ago are not active now."""
    stands = Node(
        [Holder(7, 10)], extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: 60 * min(m, 5)}
    )
    works = replace(stands, instance="gpu-2:10839", extra={})
    figures = {
        "vramledger_owner:memory_held_bytes:sum": 10.0 * GIB,
        "sum(vramledger_node:memory_used_bytes:sum)": 10.0 * GIB,
    }

    assert expect(tmp_path, [*stands.series(30), *works.series(30)], 30, figures) == ""


def test_what_nobody_may_see_is_used_all_the_same(tmp_path: Path) -> None:
    """Memory of unknown holders is in the sum of what is used on the node."""
    node = Node([Holder(7, 10)], unknown=20)

    assert expect(tmp_path, node.series(10), 10, {"vramledger_node:memory_used_bytes:sum": 30.0 * GIB}) == ""


def test_a_restart_counts_no_byte_twice(tmp_path: Path) -> None:
    """A holder that was idle before the exporter restarted, and counts as active after it, holds one time."""
    holder = Holder(7, 10, state=lambda minute: "idle" if minute < 20 else "active", since=-60)
    node = Node([holder], missing=lambda minute: 19.7 <= minute < 20)
    figures = {"vramledger_owner:memory_held_bytes:sum": 10.0 * GIB}

    assert expect(tmp_path, node.series(22), 22, figures) == ""


def test_uncharged_memory_is_held_everywhere_and_once(tmp_path: Path) -> None:
    """What NVML charges to nobody counts in every sum of its holder and owner; what two may have, in none."""
    trainer = replace(program(2, 10, 4), managed=8, left=2)
    perhaps = [Holder(pid, 1, most=20, owner="bob", user="bob") for pid in (3, 4)]
    node = Node([trainer, *perhaps], total=100)
    figures = {
        'vramledger_process:memory_bytes:owned{pid="2"}': 20 * GIB,
        'sum(vramledger_process:memory_bytes:owned{pid=~"3|4"})': 2 * GIB,
        'vramledger_owner:memory_held_bytes:sum{owner="ann"}': 20 * GIB,
        'vramledger_owner:memory_held_bytes:sum{owner="bob"}': 2 * GIB,
        'vramledger_process:demand_bytes:min3m{pid="3"}': 1 * GIB,
        # Of its 20 GiB it needs 4 - 0.5 of its framework and 10.5 outside the pool of 9.5.
        "vramledger_node:memory_beyond_need_bytes:sum": 6 * GIB,
        "vramledger_node:memory_used_bytes:sum - vramledger_node:memory_needed_bytes:sum": 6 * GIB,
        "vramledger_node:memory_used_bytes:sum": 22 * GIB,
        'vramledger_process:hoarding_factor:ratio{pid="2"}': 20 / 14,
        # Managed memory gives way, so an allocation can get it; it is not free.
        "vramledger_device:memory_free_bytes:last": 78 * GIB,
        "vramledger_device:memory_allocatable_bytes:last": 86 * GIB,
    }

    assert expect(tmp_path, node.series(20), 20, figures) == ""


def test_demand_without_an_agent_counts_uncharged_memory(tmp_path: Path) -> None:
    """The least of 3 minutes has uncharged bytes only if they were there all the time."""
    steady = Holder(2, 1, managed=8)
    later = Holder(3, 1, managed=lambda minute: None if 18 <= minute < 18.5 else 8)
    figures = {
        'vramledger_process:demand_bytes:min3m{pid="2"}': 9 * GIB,
        'vramledger_process:demand_bytes:min3m{pid="3"}': 1 * GIB,
    }

    assert expect(tmp_path, Node([steady, later]).series(20), 20, figures) == ""


def test_a_label_of_the_target_splits_no_demand(tmp_path: Path) -> None:
    """What is charged and what is not are one demand, whatever other labels a target has."""
    node = Node([Holder(2, 1, managed=8)], relabel=lambda _, labels: {**labels, "rack": "3"})
    figures = {
        'vramledger_process:demand_bytes:min3m{pid="2"}': 9 * GIB,
        "count(vramledger_process:demand_bytes:min3m)": 1,
        'vramledger_process:memory_bytes:owned{pid="2"}': 9 * GIB,
    }

    assert expect(tmp_path, node.series(20), 20, figures) == ""


def test_a_lost_scrape_brings_no_old_bytes_back(tmp_path: Path) -> None:
    """A holder that shrank when its GPU's index changed shows what it had last while nobody answers."""
    node = Node(
        [Holder(7, lambda minute: 40 if minute < 10 else 4)],
        missing=lambda minute: 10.75 <= minute < 11.5,
        relabel=lambda minute, labels: {**labels, "gpu": "1"} if "gpu" in labels and minute >= 10 else labels,
    )

    assert expect(tmp_path, node.series(12), 11, {"vramledger_process:memory_bytes:owned": 4 * GIB}) == ""


def test_a_device_that_does_not_answer_keeps_its_holdings_for_a_while(tmp_path: Path) -> None:
    """They stay for 3 minutes, with their owners; what ends where the device answers is gone at once."""
    device = f'vramledger_device_up{{NODE,gpu="0",uuid="{uuid(0)}"}}'
    there = Holder(7, lambda minute: 10 if minute < 10 else None, owner="bob")
    ended = Node([there])
    lost = replace(ended, extra={device: lambda minute: float(minute < 10)}, instance="gpu-2:10839")
    series = [*ended.series(20), *lost.series(20)]
    holding = 'sum by (instance, owner) (vramledger_process:memory_bytes:owned{owner="bob"})'

    for minute, instances in ((9.5, 2), (12, 1), (14, 0)):
        known = f"count({holding}) or vector(0)"
        assert expect(tmp_path, series, minute, {known: instances}) == ""
    assert (
        expect(
            tmp_path, series, 12, {f'{holding} unless on (instance) up{{instance="gpu-1:10839"}}': 10 * GIB}
        )
        == ""
    )


def test_a_dead_holder_keeps_its_owner_over_a_restart(tmp_path: Path) -> None:
    """The exporter that comes back cannot say whose process it was, which no longer exists."""

    def forgotten(minute: float, labels: Mapping[str, str]) -> Mapping[str, str]:
        return {**labels, "owner": ""} if minute >= 10 and "command" in labels else labels

    node = Node(
        [
            Holder(
                7,
                10,
                state=lambda minute: "active" if minute < 10 else "dead",
                since=lambda minute: 0 if minute < 10 else 10,
            )
        ],
        missing=lambda minute: 9 <= minute < 10,
        relabel=forgotten,
    )
    figures = {'vramledger_process:memory_bytes:owned{owner="ann", state="dead"}': 10 * GIB}

    for minute in (10.5, 20):
        assert expect(tmp_path, node.series(20), minute, figures) == ""
