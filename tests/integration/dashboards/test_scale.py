"""The fleet on which the cost of the dashboards is measured."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.dashboards.database import Points, Samples
from tests.support.dashboards.nodes import HOURS, NOW
from tests.support.dashboards.scale import Part, copy_nodes, interval
from tests.support.host.model import EPOCH


def _put_together(parts: Iterable[Part]) -> Points:
    found: Points = {}
    for part in parts:
        for labels, values in part.samples.points.items():
            found.setdefault(labels, []).extend((at - part.back, value) for at, value in values)
    assert all(values == sorted(values) for values in found.values())
    return found


def test_copies_have_what_the_rules_recorded() -> None:
    """Scrapes and rules have other moments; copies have both, once in each span, and all of the last hour."""
    samples = Samples()
    scraped, recorded = (
        {"__name__": name, "instance": "a", "uuid": "b"}
        for name in ("vramledger_sample_duration_seconds", "vramledger_node:memory_bytes:sum")
    )
    for number in range(int((NOW - EPOCH) / 30) + 1):
        at = EPOCH + 30.0 * number
        samples.add("a", at, {tuple(sorted(scraped.items())): 1.0})
        if number % 4 == 0:
            samples.add("rules", at, {tuple(sorted(recorded.items())): 2.0})

    copies = _put_together(copy_nodes(samples, 2, 2 * HOURS, 60.0))

    counts = {(dict(labels)["__name__"], dict(labels)["instance"]): len(v) for labels, v in copies.items()}
    spans = 2 * HOURS - 1
    assert counts == {
        ("vramledger_sample_duration_seconds", "a-0"): spans * 60 + 120,
        ("vramledger_sample_duration_seconds", "a-1"): spans * 60 + 120,
        ("vramledger_node:memory_bytes:sum", "a-0"): spans * 30 + 30,
        ("vramledger_node:memory_bytes:sum", "a-1"): spans * 30 + 30,
    }
    assert max(at for values in copies.values() for at, _ in values) <= NOW


def test_copies_have_processes_and_owners_of_their_own() -> None:
    """Each copy has its own owners, and so many of each process; what nobody asks for is left out."""
    samples = Samples()
    held = {"__name__": "vramledger_process_memory_bytes", "instance": "a", "uuid": "b", "pid": "7"}
    owned = {"__name__": "vramledger_owner_memory_bytes", "instance": "a", "uuid": "b", "owner": "ada"}
    never = {"__name__": "nobody_asks_for_this", "instance": "a"}
    samples.add("a", NOW, {tuple(sorted(each.items())): 1.0 for each in (held, owned, never)})

    copies = [dict(labels) for labels in _put_together(copy_nodes(samples, 2, HOURS, 60.0, processes=3))]

    pids = {(each["instance"], each["pid"]) for each in copies if "pid" in each}
    assert pids == {(node, pid) for node in ("a-0", "a-1") for pid in ("7", "71", "72")}
    assert {each["owner"] for each in copies if "owner" in each} == {"ada-0", "ada-1"}
    assert not [each for each in copies if each["__name__"] == "nobody_asks_for_this"]


def test_copies_of_a_node_can_be_one_node() -> None:
    """Four copies, two on a node: two nodes, each with twice the devices, processes and owners."""
    samples = Samples()
    device = {"instance": "a", "gpu": "0", "uuid": "b"}
    held = {"__name__": "vramledger_process_memory_bytes", **device, "pid": "7"}
    node = {"__name__": "vramledger_up", "instance": "a"}
    samples.add("a", NOW, {tuple(sorted(each.items())): 1.0 for each in (held, node)})

    copies = [dict(labels) for labels in _put_together(copy_nodes(samples, 4, HOURS, 60.0, together=2))]

    devices = {(each["instance"], each["gpu"], each["uuid"], each["pid"]) for each in copies if "pid" in each}
    assert devices == {
        ("a-0", "0", "b-0", "7"),
        ("a-1", "0", "b-1", "7"),
        ("a-0", "01", "b-2", "71"),
        ("a-1", "01", "b-3", "71"),
    }
    assert sorted(each["instance"] for each in copies if "pid" not in each) == ["a-0", "a-1"]


def test_only_the_first_copies_have_a_past_that_no_fleet_draws() -> None:
    """What only dashboards of one node draw has a past on the first copy, and its last hour on all."""
    samples = Samples()
    clock = {"__name__": "vramledger_device_clock_hertz", "instance": "a", "uuid": "b"}
    for number in range(int((NOW - EPOCH) / 30) + 1):
        samples.add("a", EPOCH + 30.0 * number, {tuple(sorted(clock.items())): 1.0})

    copies = _put_together(copy_nodes(samples, 2, HOURS, 60.0))

    first = {dict(labels)["instance"]: values[0][0] for labels, values in copies.items()}
    assert first["a-0"] == EPOCH
    assert NOW - 3600 <= first["a-1"] < NOW - 3500


def test_an_interval_is_rounded_as_grafana_does() -> None:
    """A day in 720 points has one each 2 minutes, in 300 each 5; a short time has one for each scrape."""
    asked = {
        (24, 720): 120,
        (24, 300): 300,
        (24, 1440): 60,
        (168, 720): 900,
        (168, 360): 1800,
        (0.5, 720): 15,
    }

    assert {each: interval(each[0] * 3600, each[1]) for each in asked} == asked
