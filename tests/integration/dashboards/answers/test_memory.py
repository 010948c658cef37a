"""The figures of the memory of fleets, nodes and devices are those of the simulation."""

import struct

import pytest

from tests.support.dashboards import truth
from tests.support.dashboards.database import STALE, Samples
from tests.support.dashboards.figures import figure, one, over_minutes, query_of, rows_of, total_of, value
from tests.support.dashboards.files import substitute_variables
from tests.support.dashboards.nodes import NODES, NOW, RECORDED, SCRAPE
from tests.support.fleet.engines import Engine

BYTES = "vramledger_device_memory_bytes"

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder


def test_figures_of_a_node_are_those_of_its_newest_scrape(samples: Samples, engine: Engine) -> None:
    """Memory used and In active use now are of its total, at the moment of the end of its ledger."""
    for node in ("leak", "large-moment", "recorded-faults"):
        states = truth.by_label(truth.values(samples, BYTES, NOW, instance=node), "state")
        used, active = (figure(engine, "node", "Memory used", ref, instance=node) for ref in "AB")

        assert used == pytest.approx(1 - states["free"] / sum(states.values()))
        assert active == pytest.approx(states["active"] / sum(states.values()))


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
    assert total_of(ledger) == figure(engine, node, "GPU $gpu", "B", instance="mig", gpu="0")


def test_the_hoarder_is_found_in_three_clicks(engine: Engine) -> None:
    """Fleet to owner to device: the first row names the owner, the next ones the process and the GPU."""
    rows = value(engine, "fleet", "Waste by owner", instance="hoarder|nobody|ranks|leak")
    worst = max(rows, key=lambda row: row["value"])
    assert (worst["owner_type"], worst["owner"]) == ("slurm", "17")

    (process,) = value(engine, "owner", "Processes", owner=str(worst["owner"]))
    assert (process["state"], process["instance"], process["gpu"]) == ("idle", "hoarder", "0")
    assert figure(engine, "owner", "Processes", "B", owner=str(worst["owner"])) > 3600

    holders = value(engine, "device", "Holders", uuid=str(process["uuid"]))
    assert {str(each["owner"]) for each in holders} == {"17", "18"}


def test_what_is_wasted_of_a_recorded_incident(engine: Engine) -> None:
    """Fleet names what real H200s certainly waste; who is idle by inference only is not among it."""
    rows = value(engine, "fleet", "Largest wasted holdings", instance="recorded-lively")
    worst = max(rows, key=lambda row: row["value"])

    assert (worst["command"], worst["state"]) == ("holder.py", "stopped")
    assert total_of(rows) == figure(engine, "node", "Wasted", instance="recorded-lively")


def test_the_parts_add_up_to_the_total(engine: Engine) -> None:
    """On every device the ledger's parts add up to the line that is drawn as their total."""
    devices = rows_of(engine, "vramledger_device_memory_total_bytes")
    for device in devices:
        parts = value(engine, "device", "Ledger", "A", uuid=device["uuid"])
        assert total_of(parts) == figure(engine, "device", "Ledger", "B", uuid=device["uuid"])
    assert len(devices) > len(NODES)


def test_the_peak_is_of_the_same_memory_as_now(engine: Engine) -> None:
    """Where nothing changes, the peak is the share that is in use now: both have the driver's reserve."""
    (device,) = rows_of(engine, 'vramledger_device_memory_total_bytes{instance="notebook"}')
    chosen = {"instance": "notebook", "uuid": device["uuid"]}
    now, peak = (figure(engine, "device", "Memory used", ref, **chosen) for ref in "AB")
    assert peak == pytest.approx(now, abs=1e-6)


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
        reserve = truth.values(samples, BYTES, NOW, state="driver_reserved", **device)
        shown = one(rows_of(engine, over_minutes(query_of("device", "Memory used", "B"), 90, **device)))
        assert shown == pytest.approx((highest + sum(reserve.values())) / total), device


def test_capacity_is_that_of_the_simulation(samples: Samples, engine: Engine) -> None:
    """Memory, devices, the 95th percentile of what was used, and room for a job are those of the ledgers."""
    node = {"instance": "hoarder|leak|ranks|large-moment"}
    ends = NOW - NOW % 300  # a subquery looks at whole multiples of its step
    for minutes in (60, 120):
        sums = []
        for number in range(minutes // 5):
            ledger = truth.values(samples, BYTES, ends - 300 * number - SCRAPE, **node)
            states = truth.by_label(ledger, "state")
            sums.append(sum(states.values()) - states["free"] - states["driver_reserved"])
        ledger = truth.values(samples, BYTES, NOW, **node)
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
        for ref, known in true.items():
            expr = over_minutes(query_of("fleet", "Capacity by GPU model", ref), minutes, size="40", **node)
            # The rules may have looked a minute earlier.
            assert total_of(rows_of(engine, expr)) == pytest.approx(known, rel=0.01), (minutes, ref)


def test_the_gpus_with_most_room_are_named(samples: Samples, engine: Engine) -> None:
    """The ten GPUs with the most free memory are those of the ledgers, with their holders; empty ones too."""
    ledger = truth.values(samples, BYTES, NOW, state="free")
    free = {(dict(each)["instance"], dict(each)["uuid"]): size for each, size in ledger.items()}
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
    by_model, instances = (total_of(value(engine, "fleet", "Capacity by GPU model", ref)) for ref in "BF")
    whole = one(rows_of(engine, 'count(count by (instance, gpu) (vramledger_device_up{uuid!~"MIG-.*"}))'))
    assert total_of(gpus) == every["value"] == by_model == whole
    assert instances == 3
    assert empty["value"] <= every["value"]
    for dashboard in ("fleet", "exporter", "owner", "framework"):
        nodes = [value(engine, dashboard, "Exporters", ref)[0] for ref in "ABCD"]
        assert total_of(nodes) == len(NODES) + len(RECORDED)
        rows = value(engine, "exporter", "Nodes that are not fully watched")
        assert total_of(nodes[1:]) == len(rows)


def test_the_share_of_a_limit_is_what_its_cgroup_has_taken(engine: Engine) -> None:
    """An owner whose use is known has a share; one whose use is not known has a limit alone."""
    (share,) = value(engine, "owner", "Limits", "C", instance="jax")
    taken = total_of(value(engine, "node", "Limits", "B", instance="jax"))
    held = {row["owner"]: row["value"] for row in value(engine, "node", "Holders", instance="jax")}

    assert len(value(engine, "node", "Limits", instance="jax")) == 2
    assert share["value"] == taken / (80 * 2**30)
    assert taken == held[share["owner"]]
    assert value(engine, "owner", "Limits", instance="jax", owner="nobody-else") == []
    assert value(engine, "owner", "Limits", "C", instance="jax", owner=share["owner"])


def test_managed_memory_is_in_its_holders_figures(engine: Engine) -> None:
    """Uncharged bytes are part of what a process and its owner hold, and are shown apart beside it."""
    node = {"instance": "managed"}
    rows = value(engine, "node", "Holders", **node)
    apart = sum(
        total_of(value(engine, "process", "The process", "E", pid=pid, **node))
        for pid in {row["pid"] for row in rows}
    )
    charged = one(rows_of(engine, 'sum(vramledger_process_memory_bytes{instance="managed"})'))

    assert apart > 0
    assert total_of(rows) == charged + apart


def test_tables_of_holders_have_the_newest_scrape(engine: Engine) -> None:
    """What a program that leaks holds is the same on Owner as on Node, though its record is minutes older."""
    for node in ("leak", "managed"):
        owner = total_of(value(engine, "owner", "Processes", instance=node))
        there = total_of(value(engine, "node", "Holders", instance=node))
        both = '__name__=~"vramledger_process_(uncharged_)?memory_bytes"'
        newest = one(rows_of(engine, f'sum({{{both}, instance="{node}", pid!="other"}})'))
        assert owner == there == newest


def test_there_is_room_where_the_ledger_says_so(samples: Samples, engine: Engine) -> None:
    """GPUs counts those with as much free memory as the chosen job needs; Capacity has them by model."""
    nodes = {"instance": "leak|hoarder|jax|ranks|small-jobs"}
    free = truth.by_label(truth.values(samples, BYTES, NOW, state="free", **nodes), "uuid")
    enough = sum(size >= 40 * 2**30 for size in free.values())
    assert figure(engine, "fleet", "GPUs", "F", **nodes) == enough > 0


def test_fleet_and_owner_hold_the_same(engine: Engine) -> None:
    """What all owners hold is what the fleet holds, at the same moment, also where holdings change."""
    for node in ("leak", "small-jobs", "mig", "hoarder", "large-moment", "recorded-lively", "jax"):
        fleet = figure(engine, "fleet", "Memory", "B", instance=node)
        assert figure(engine, "owner", "Memory", instance=node) == fleet, node
    for team, owner in (("ada", ".*"), (".*", "17")):
        assert figure(engine, "owner", "Memory", team=team, owner=owner) > 0


def test_unowned_and_unknown_memory_is_listed(engine: Engine) -> None:
    """Unattributed and unknown are rows of a table, which are a minute newer, as is who is orphaned."""
    expr = query_of("fleet", "Unowned and unknown memory").replace("topk(50, ", "(")
    rows = rows_of(engine, substitute_variables(expr))
    assert {"orphaned", "zombie", "dead"} <= {row["state"] for row in rows}
    for ref, state in (("C", "unattributed"), ("D", "unknown")):
        listed = total_of([row for row in rows if row["state"] == state])
        assert listed == pytest.approx(figure(engine, "fleet", "Wasted memory", ref), rel=0.01)
