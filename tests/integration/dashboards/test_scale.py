"""The fleet on which the cost of the dashboards is measured."""

from __future__ import annotations

from tests.support.dashboards.database import Samples
from tests.support.dashboards.nodes import HOURS, NOW
from tests.support.dashboards.scale import copy_nodes
from tests.support.host.model import EPOCH


def test_copies_have_what_the_rules_recorded() -> None:
    """Scrapes and rules have other moments; both are in each copy, once in each span, for all the hours."""
    samples = Samples()
    scraped, recorded = (
        {"__name__": name, "instance": "a", "uuid": "b"}
        for name in ("vramledger_device_up", "vramledger_device:memory_used:ratio")
    )
    for number in range(int(HOURS * 120)):
        at = EPOCH + 30.0 * number
        samples.add("a", at, {tuple(sorted(scraped.items())): 1.0})
        if number % 4 == 0:
            samples.add("rules", at, {tuple(sorted(recorded.items())): 2.0})

    copies = copy_nodes(samples, 2, 2 * HOURS, 60.0).points

    counts = {(dict(labels)["__name__"], dict(labels)["instance"]): len(v) for labels, v in copies.items()}
    assert counts == {
        ("vramledger_device_up", "a-0"): 2 * HOURS * 60,
        ("vramledger_device_up", "a-1"): 2 * HOURS * 60,
        ("vramledger_device:memory_used:ratio", "a-0"): 2 * HOURS * 30,
        ("vramledger_device:memory_used:ratio", "a-1"): 2 * HOURS * 30,
    }
    assert max(at for values in copies.values() for at, _ in values) <= NOW


def test_copies_have_processes_and_owners_of_their_own() -> None:
    """Each copy has its own owners, and so many of each process; what nobody asks for is left out."""
    samples = Samples()
    held = {"__name__": "vramledger_process_memory_bytes", "instance": "a", "uuid": "b", "pid": "7"}
    owned = {"__name__": "vramledger_owner_memory_bytes", "instance": "a", "uuid": "b", "owner": "ada"}
    never = {"__name__": "nobody_asks_for_this", "instance": "a"}
    samples.add("a", EPOCH, {tuple(sorted(each.items())): 1.0 for each in (held, owned, never)})

    copies = [dict(labels) for labels in copy_nodes(samples, 2, HOURS, 60.0, processes=3).points]

    pids = {(each["instance"], each["pid"]) for each in copies if "pid" in each}
    assert pids == {(node, pid) for node in ("a-0", "a-1") for pid in ("7", "71", "72")}
    assert {each["owner"] for each in copies if "owner" in each} == {"ada-0", "ada-1"}
    assert not [each for each in copies if each["__name__"] == "nobody_asks_for_this"]
