"""The figures of the memory of fleets, nodes and devices are those of the simulation."""

import struct

import pytest

from tests.support.dashboards import truth
from tests.support.dashboards.database import STALE, Samples, ask
from tests.support.dashboards.figures import AT_NOW, over_minutes, query_of, total_of, value
from tests.support.dashboards.files import substitute_variables
from tests.support.dashboards.nodes import NODES, NOW, RECORDED, SCRAPE
from tests.support.fleet.engines import Engine

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder


def test_figures_of_a_node_are_those_of_its_newest_scrape(samples: Samples, engine: Engine) -> None:
    """Memory used and In active use now are of its total, at the moment of the end of its ledger."""
    for node in ("leak", "large-moment", "recorded-faults"):
        ledger = truth.values(samples, "vramledger_device_memory_bytes", NOW, instance=node)
        states = truth.by_label(ledger, "state")
        (used,) = value(engine, "node", "Memory used", instance=node)
        (active,) = value(engine, "node", "Memory used", "B", instance=node)

        assert used["value"] == pytest.approx(1 - states["free"] / sum(states.values()))
        assert active["value"] == pytest.approx(states["active"] / sum(states.values()))


def test_no_panel_counts_an_instance_as_a_gpu(engine: Engine) -> None:
    """A GPU with three MIG instances is one GPU wherever GPUs are counted, and has three ledgers."""
    fleet, node = "fleet", "node"
    for dashboard, panel, ref in ((fleet, "GPUs", "A"), (fleet, "GPUs", "B"), (node, "GPUs reachable", "A")):
        assert total_of(value(engine, dashboard, panel, ref, instance="mig")) == 1, (panel, ref)
    for ref, model, count in (("B", "NVIDIA H200", 1), ("F", "NVIDIA H200 MIG 1g.18gb", 3)):
        rows = value(engine, fleet, "Capacity by GPU model", ref, instance="mig")
        assert {row["name"]: row["value"] for row in rows if row["value"]} == {model: count}
        assert len(rows) == 2

    ledger = value(engine, node, "GPU $gpu", instance="mig", gpu="0")
    (total,) = value(engine, node, "GPU $gpu", "B", instance="mig", gpu="0")
    assert total_of(ledger) == total["value"]


def test_the_hoarder_is_found_in_three_clicks(engine: Engine) -> None:
    """Fleet to owner to device: the first row names the owner, the next ones the process and the GPU."""
    rows = value(engine, "fleet", "Waste by owner", instance="hoarder|nobody|ranks|leak")
    worst = max(rows, key=lambda row: row["value"])
    assert (worst["owner_type"], worst["owner"]) == ("slurm", "17")

    (process,) = value(engine, "owner", "Processes", owner=str(worst["owner"]))
    assert (process["state"], process["instance"], process["gpu"]) == ("idle", "hoarder", "0")
    (since,) = value(engine, "owner", "Processes", "B", owner=str(worst["owner"]))
    assert since["value"] > 3600

    holders = value(engine, "device", "Holders", uuid=str(process["uuid"]))
    assert {str(each["owner"]) for each in holders} == {"17", "18"}


def test_what_is_wasted_of_a_recorded_incident(engine: Engine) -> None:
    """Fleet names what real H200s certainly waste; who is idle by inference only is not among it."""
    rows = value(engine, "fleet", "Largest wasted holdings", instance="recorded-lively")
    worst = max(rows, key=lambda row: row["value"])
    (wasted,) = value(engine, "node", "Wasted", instance="recorded-lively")

    assert (worst["command"], worst["state"]) == ("holder.py", "stopped")
    assert total_of(rows) == wasted["value"]


def test_the_parts_add_up_to_the_total(engine: Engine) -> None:
    """On every device the ledger's parts add up to the line that is drawn as their total."""
    devices = ask(engine, "vramledger_device_memory_total_bytes", **AT_NOW)
    for device in devices:
        uuid = device["metric"]["uuid"]
        parts = value(engine, "device", "Ledger", "A", uuid=uuid)
        (total,) = value(engine, "device", "Ledger", "B", uuid=uuid)
        assert sum(part["value"] for part in parts) == total["value"]
    assert len(devices) > len(NODES)


def test_the_peak_is_of_the_same_memory_as_now(engine: Engine) -> None:
    """Where nothing changes, the peak is the share that is in use now: both have the driver's reserve."""
    (device,) = ask(engine, 'vramledger_device_memory_total_bytes{instance="notebook"}', **AT_NOW)
    chosen = {"instance": "notebook", "uuid": device["metric"]["uuid"]}
    (now,) = value(engine, "device", "Memory used", "A", **chosen)
    (peak,) = value(engine, "device", "Memory used", "B", **chosen)
    assert peak["value"] == pytest.approx(now["value"], abs=1e-6)


def test_the_peak_is_the_highest_of_the_time_range(samples: Samples, engine: Engine) -> None:
    """A GPU that is less full than it was has the peak of its fullest moment within the range."""
    name, fell = "vramledger_device_memory_used_peak_bytes", []
    for labels, points in samples.points.items():
        own = dict(labels)
        if own["__name__"] == name:
            within = [each for at, each in points if NOW - 5400 < at <= NOW and each != STALE]
            bytes_used = [struct.unpack("<d", each)[0] for each in within]
            if bytes_used and max(bytes_used) > 1.01 * bytes_used[-1] and points[-1][0] > NOW - SCRAPE:
                fell.append((max(bytes_used), {"instance": own["instance"], "uuid": own["uuid"]}))
    assert fell
    for highest, device in fell:
        (total,) = truth.values(samples, "vramledger_device_memory_total_bytes", NOW, **device).values()
        reserve = truth.values(
            samples, "vramledger_device_memory_bytes", NOW, state="driver_reserved", **device
        )
        expr = query_of("device", "Memory used", "B")
        (shown,) = ask(engine, over_minutes(expr, 90, **device), **AT_NOW)
        assert float(shown["value"][1]) == pytest.approx((highest + sum(reserve.values())) / total), device


def test_capacity_is_that_of_the_simulation(samples: Samples, engine: Engine) -> None:
    """Memory, devices, the 95th percentile of what was used, and room for a job are those of the ledgers."""
    node = {"instance": "hoarder|leak|ranks|large-moment"}
    ends = NOW - NOW % 300  # a subquery looks at whole multiples of its step
    for minutes in (60, 120):
        sums = []
        for number in range(minutes // 5):
            ledger = truth.values(
                samples, "vramledger_device_memory_bytes", ends - 300 * number - SCRAPE, **node
            )
            states = truth.by_label(ledger, "state")
            sums.append(sum(states.values()) - states["free"] - states["driver_reserved"])
        ledger = truth.values(samples, "vramledger_device_memory_bytes", NOW, **node)
        free = [value for labels, value in ledger.items() if dict(labels)["state"] == "free"]
        used = sorted(sums)
        place = 0.95 * (len(used) - 1)
        low = used[int(place)]
        true = {
            "A": sum(ledger.values()),
            "B": len(free),
            "C": low + (used[min(int(place) + 1, len(used) - 1)] - low) * (place - int(place)),
            "E": sum(value >= 40 * 2**30 for value in free),
        }
        for ref, figure in true.items():
            expr = query_of("fleet", "Capacity by GPU model", ref)
            shown = ask(engine, over_minutes(expr, minutes, size="40", **node), **AT_NOW)
            total = sum(float(each["value"][1]) for each in shown)
            # The rules may have looked a minute earlier.
            assert total == pytest.approx(figure, rel=0.01), (minutes, ref)


def test_the_gpus_with_most_room_are_named(samples: Samples, engine: Engine) -> None:
    """The ten GPUs with the most free memory are those of the ledgers, with their holders; empty ones too."""
    ledger = truth.values(samples, "vramledger_device_memory_bytes", NOW)
    free = {
        (own["instance"], own["uuid"]): bytes_free
        for own, bytes_free in ((dict(labels), each) for labels, each in ledger.items())
        if own["state"] == "free"
    }
    shown, used, holders = (
        {(str(row["instance"]), str(row["uuid"])): row["value"] for row in rows}
        for rows in (value(engine, "fleet", "GPUs with most free memory", ref) for ref in "ABC")
    )

    assert len(shown) == 10
    assert min(shown.values()) >= 0.99 * sorted(free.values())[-10]
    for device, most in shown.items():
        assert most == pytest.approx(free[device], rel=0.01)
        assert used[device] <= 1
    assert 0.0 in {holders[device] for device in shown}


def test_the_parts_of_a_total_add_up(engine: Engine) -> None:
    """GPUs up and down are all whole GPUs, on every panel; each node is counted once, by its status."""
    every, *gpus, empty = [value(engine, "fleet", "GPUs", ref)[0] for ref in "ABCD"]
    by_model = value(engine, "fleet", "Capacity by GPU model", "B")
    instances = value(engine, "fleet", "Capacity by GPU model", "F")
    known = 'count(count by (instance, gpu) (vramledger_device_up{uuid!~"MIG-.*"}))'
    (whole,) = ask(engine, known, **AT_NOW)
    assert total_of(gpus) == every["value"] == total_of(by_model) == float(whole["value"][1])
    assert total_of(instances) == 3
    assert empty["value"] <= every["value"]
    for dashboard in ("fleet", "exporter", "owner", "framework"):
        nodes = [value(engine, dashboard, "Exporters", ref)[0] for ref in "ABCD"]
        assert total_of(nodes) == len(NODES) + len(RECORDED)
        rows = value(engine, "exporter", "Nodes that are not fully watched")
        assert total_of(nodes[1:]) == len(rows)


def test_the_share_of_a_limit_is_what_its_cgroup_has_taken(engine: Engine) -> None:
    """An owner whose use is known has a share; one whose use is not known has a limit alone."""
    limits = value(engine, "node", "Limits", "A", instance="jax")
    shares = value(engine, "owner", "Limits", "C", instance="jax")

    assert len(limits) == 2
    taken = total_of(value(engine, "node", "Limits", "B", instance="jax"))
    held = {row["owner"]: row["value"] for row in value(engine, "node", "Holders", instance="jax")}
    assert [row["value"] for row in shares] == [taken / (80 * 2**30)]
    (named,) = (row["owner"] for row in shares)
    assert taken == held[named]
    assert value(engine, "owner", "Limits", instance="jax", owner="nobody-else") == []
    assert value(engine, "owner", "Limits", "C", instance="jax", owner=str(named))


def test_managed_memory_is_in_its_holders_figures(engine: Engine) -> None:
    """Uncharged bytes are part of what a process and its owner hold, and are shown apart beside it."""
    held = total_of(value(engine, "node", "Holders", instance="managed"))
    pids = {str(row["pid"]) for row in value(engine, "node", "Holders", instance="managed")}
    apart = sum(
        total_of(value(engine, "process", "The process", "E", instance="managed", pid=pid)) for pid in pids
    )
    charged = ask(engine, 'sum(vramledger_process_memory_bytes{instance="managed"})', instant=True, span=0)

    assert apart > 0
    assert held == float(charged[0]["value"][1]) + apart


def test_tables_of_holders_have_the_newest_scrape(engine: Engine) -> None:
    """What a program that leaks holds is the same on Owner as on Node, though its record is minutes older."""
    for node in ("leak", "managed"):
        (owner, there) = (
            total_of(value(engine, dashboard, panel, instance=node))
            for dashboard, panel in (("owner", "Processes"), ("node", "Holders"))
        )
        both = '__name__=~"vramledger_process_(uncharged_)?memory_bytes"'
        (newest,) = ask(engine, f'sum({{{both}, instance="{node}", pid!="other"}})', **AT_NOW)
        assert owner == there == float(newest["value"][1])


def test_there_is_room_where_the_ledger_says_so(samples: Samples, engine: Engine) -> None:
    """GPUs counts those with as much free memory as the chosen job needs; Capacity has them by model."""
    nodes = {"instance": "leak|hoarder|jax|ranks|small-jobs"}
    (room,) = value(engine, "fleet", "GPUs", "F", **nodes)
    free = truth.by_label(
        truth.values(samples, "vramledger_device_memory_bytes", NOW, state="free", **nodes), "uuid"
    )
    assert room["value"] == sum(size >= 40 * 2**30 for size in free.values()) > 0


def test_fleet_and_owner_hold_the_same(engine: Engine) -> None:
    """What all owners hold is what the fleet holds, at the same moment, also where holdings change."""
    for node in ("leak", "small-jobs", "mig", "hoarder", "large-moment", "recorded-lively", "jax"):
        (fleet,) = value(engine, "fleet", "Memory", "B", instance=node)
        (owners,) = value(engine, "owner", "Memory", instance=node)
        assert owners["value"] == fleet["value"], node
    for team, owner in (("ada", ".*"), (".*", "17")):
        (chosen,) = value(engine, "owner", "Memory", team=team, owner=owner)
        assert chosen["value"] > 0


def test_unowned_and_unknown_memory_is_listed(engine: Engine) -> None:
    """Unattributed and unknown are rows of a table, which are a minute newer, as is who is orphaned."""
    expr = query_of("fleet", "Unowned and unknown memory").replace("topk(50, ", "(")
    rows = ask(engine, substitute_variables(expr), **AT_NOW)
    sums = truth.by_label({tuple(row["metric"].items()): float(row["value"][1]) for row in rows}, "state")
    assert {"orphaned", "zombie", "dead"} <= sums.keys()
    for ref, state in (("C", "unattributed"), ("D", "unknown")):
        (figure,) = value(engine, "fleet", "Wasted memory", ref)
        assert sums[state] == pytest.approx(figure["value"], rel=0.01)
