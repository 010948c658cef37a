"""The metric contract: what is declared, and the samples of a snapshot."""

import logging
import os
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support import builders
from tests.support.builders import ASLEEP, MIB, crowd, device, failed, holding, managed, process, snapshot
from tests.support.host.one_holder import OneHolder
from tests.support.sure import sure
from vramledger import metrics
from vramledger.accounting.owners.owner_usage import Charge, DeviceUsage
from vramledger.config import COLLECTORS, OWNERS_MAX
from vramledger.metrics import sampling
from vramledger.metrics.contract import FAMILIES, collectors
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.metrics.families import SAMPLING, Family
from vramledger.metrics.hardware import HARDWARE
from vramledger.metrics.pods import label_names
from vramledger.model.reading import FAILURE_REASONS, DeviceReading, PodLabels
from vramledger.model.snapshot import (
    DeviceSnapshot,
    Grade,
    Pool,
    Reservation,
    ReservationStatus,
    Snapshot,
    State,
    UnchargedBytes,
    UndividedBytes,
)
from vramledger.readers.nvml.hardware import HARDWARE_METRICS, SLOW, SLOW_INTERVAL

HOME = Path(metrics.__file__).parent
LABELLED = PodLabels("ml", "train-0", (("app/name", None), ("team", 'vi"sion')))
Series = dict[tuple[str, ...], float]


def served(shot: Snapshot, most: int = 0) -> dict[str, Series]:
    """Collect all samples of a snapshot: family (without prefix), labels, value."""
    collected = sampling.collect(shot, {})
    for collect in collectors(most).values():
        collected += collect(shot)
    names = [family.name for family, _ in collected]
    assert sorted(set(names)) == sorted(names), "a family was collected twice"
    return {family.name.removeprefix("vramledger_"): dict(found) for family, found in collected if found}


def test_declaration_is_sound() -> None:
    """A family has a legal name, one sentence of help, an existing collector, a source, and its absence."""
    for family in FAMILIES.values():
        assert re.fullmatch(r"vramledger_[a-z0-9]+(_[a-z0-9]+)*", family.name)
        assert re.fullmatch(r"[A-Z1][^\"\\\n]+\.", family.help), family
        assert "  " not in family.help, family
        assert family.collector in (*COLLECTORS, SAMPLING), family
        assert len(set(family.labels)) == len(family.labels), family
        assert re.fullmatch(r"\S.*[^.\s]", family.source), family
        assert re.fullmatch(r"(never|when|before)\b.*[^.\s]|never", family.absent), family


def test_a_family_is_declared_once() -> None:
    """Every declaration is listed, and no two families share a name, in OpenMetrics or here."""
    modules = [import_module(f"{metrics.__name__}.{path.stem}") for path in sorted(HOME.glob("[a-z]*.py"))]
    tables = [table for module in modules for table in vars(module).values()]
    rows = [row for table in tables for row in (table if isinstance(table, tuple) else (table,))]
    declared = {id(row): row for row in rows if isinstance(row, Family)}
    assert sorted(family.name for family in declared.values()) == sorted(FAMILIES)
    assert len({family.base for family in FAMILIES.values()}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("base", "kind", "unit", "suffix"),
    [
        ("vramledger_device_memory_bytes", "gauge", "bytes", ""),
        ("vramledger_device_energy_joules", "counter", "joules", "_total"),
        ("vramledger_device_xid_errors", "counter", "", "_total"),
        ("vramledger_process", "info", "", "_info"),
        ("vramledger_device_pcie_throughput_bytes_per_second", "gauge", "bytes_per_second", ""),
    ],
)
def test_type_and_unit_follow_from_the_name(base: str, kind: str, unit: str, suffix: str) -> None:
    """A name gives its type, its OpenMetrics name and its unit."""
    family = FAMILIES[base + suffix]
    assert (family.kind, family.base, family.unit) == (kind, base, unit)


def test_every_hardware_reading_of_the_driver_has_a_family() -> None:
    """The driver reads exactly the keys that are declared, and the help says which ones at its slow pace."""
    asked = {question.key: question.collector for question in HARDWARE_METRICS}
    assert asked == {key: family.collector for key, family in HARDWARE.items()}
    told = {key for key, family in HARDWARE.items() if f"read every {SLOW_INTERVAL:g} seconds" in family.help}
    assert told == {question.key for question in HARDWARE_METRICS if question.pace == SLOW}


def test_every_family_can_be_served() -> None:
    """A snapshot with everything in it gives a sample of every declared family."""
    names = {f"vramledger_{name}" for name in served(builders.rich_host())}
    health = {"vramledger_collector_success", "vramledger_collector_duration_seconds"}
    own = {  # tests/integration/web/access and tests/e2e/test_storage.py serve them
        name for name in FAMILIES if name.startswith(("vramledger_web_", "vramledger_storage_"))
    }
    released = {f"vramledger_{name}" for name in served(replace(snapshot(), up=False, released_until=1.0))}
    assert names | health | own | released == set(FAMILIES)


def test_the_ledger_adds_up_on_the_page() -> None:
    """The states of vramledger_device_memory_bytes add up to the total of each device, to the byte."""
    page = served(crowd(2, 30))
    for device_key, total in page["device_memory_total_bytes"].items():
        states = {key[2]: held for key, held in page["device_memory_bytes"].items() if key[:2] == device_key}
        assert sum(states.values()) == total == builders.TOTAL
        assert set(states) == {"free", "driver_reserved", "unattributed", *(state.value for state in State)}


def test_the_operating_systems_memory_is_a_part_of_the_ledger() -> None:
    """Coherent memory has one state more and the kernel's figures; the ledger adds up as any other."""
    page = served(snapshot(builders.coherent_device()))
    states = {labels[2]: value for labels, value in page["device_memory_bytes"].items()}
    assert sum(states.values()) == builders.TOTAL
    assert states["operating_system"] == 5 * 1024 * MIB
    parts = {labels[2] for labels in page["device_node_memory_bytes"]}
    assert parts == {"total", "free", "file", "anonymous", "kernel", "shared"}
    known = builders.coherent_device()
    shared = sure(known.reading.node)._replace(shared=MIB)
    page = served(snapshot(replace(known, reading=structs.replace(known.reading, node=shared))))
    assert {labels[2]: value for labels, value in page["device_node_memory_bytes"].items()}["shared"] == MIB
    assert {labels[-3:-1] for labels in page["device_info"]} == {("coherent", "ats")}
    assert not page.get("owner_memory_freed_bytes_total")


def test_what_is_not_known_is_absent() -> None:
    """A value that the source did not give has no sample; a true zero has one."""
    bare = device(0, [holding(101, None)], reserved=None)
    page = served(replace(snapshot(bare), host_pid_namespace=None))
    assert "driver_reserved" not in {labels[2] for labels in page["device_memory_bytes"]}
    absent = (
        "host_pid_namespace process_memory_bytes process_memory_peak_bytes process_sm_utilization_ratio "
        "process_last_active_timestamp_seconds device_hidden_holders device_utilization_ratio "
        "device_temperature_celsius device_xid_errors_total"
    )
    assert not page.keys() & set(absent.split())
    key = bare.key
    assert page["device_memory_bytes"].get((*key, "dead")) == 0
    assert page["device_holders"].get((*key, "active")) == 1
    assert (page["device_memory_overlap_bytes"], page["processes_dropped"]) == ({key: 0}, {key: 0})


def test_charged_and_uncharged_bytes_are_apart() -> None:
    """What NVML charges stays NVML's figure; what else it has is in series of its own, with the grade."""
    some = UnchargedBytes(0, 2048 * MIB, 0, Grade.INFERRED, "")
    shared = UndividedBytes(2048 * MIB, (102, 103), State.ACTIVE, False, None)
    held = [holding(101, uncharged=managed(1024 * MIB)), holding(102, uncharged=some), holding(103)]
    one = device(0, held, undivided=shared)
    page = served(snapshot(one))
    assert page["process_memory_bytes"].get((*one.key, "101")) == 512 * MIB
    both = {(*one.key, "101", "seen"): 1024 * MIB, (*one.key, "102", "inferred"): 0}
    assert page["process_uncharged_memory_bytes"] == both
    assert page["process_uncharged_memory_max_bytes"].get((*one.key, "102")) == 2048 * MIB
    assert page["process_managed_memory_bytes"] == {(*one.key, "101"): 1024 * MIB, (*one.key, "102"): 0}
    assert page["device_memory_uncharged_bytes"] == {one.key: (1024 + 2048 + 14) * MIB}
    assert page["device_memory_undivided_bytes"] == {one.key: 2048 * MIB}
    assert page["device_memory_bytes"].get((*one.key, "active")) == (3 * 512 + 1024 + 2048) * MIB


def test_no_holders_is_zero_and_not_asked_is_absent() -> None:
    """A device without holders counts 0 in each state; one whose process list failed has no counts."""
    empty, silent = device(0), device(1)
    silent = replace(silent, ledger=None, reading=structs.replace(silent.reading, processes=None))
    page = served(snapshot(empty, silent))
    assert page["device_holders"] == {(*empty.key, state.value): 0 for state in State}
    assert page["processes_dropped"] == {empty.key: 0}


def test_a_failed_sample_has_no_gpu_data() -> None:
    """Without a driver there is up 0 with its reason; before the first sample nothing else."""
    page = served(failed("no-driver"))
    assert page["up"] == {(): 0}
    assert page["sample_failures_total"] == {(each,): float(each == "no-driver") for each in FAILURE_REASONS}
    assert not [name for name in page if name.startswith(("device_", "process"))]
    page = served(Snapshot())
    assert page["up"] == {(): 0}
    assert page["sample_failures_total"] == {(each,): 0.0 for each in FAILURE_REASONS}
    assert "sample_timestamp_seconds" not in page


def test_a_device_that_is_down_says_so_and_no_more() -> None:
    """A lost device has device_up 0 and its XID errors; one that was not asked says that it sleeps."""
    well = device(0, [holding(101)])
    known = device(1, [holding(202)], hardware=builders.HARDWARE, xids={79: 1})
    lost = replace(known, up=False, reading=DeviceReading(1, known.reading.uuid, error="lost"))
    page = served(snapshot(well, lost, processes=[process(101)]))
    assert page.pop("device_up") == {well.key: 1, lost.key: 0}
    assert page.pop("device_xid_errors_total") == {(*lost.key, "79"): 1}
    assert "GPU-00000001" not in str(page)
    assert list(page["process_memory_bytes"]) == [(*well.key, "101")]
    assert [labels[0] for labels in page["process_info"]] == ["101"]
    well = device(0, [holding(101)])
    page = served(snapshot(well, ASLEEP, processes=[process(101)]))
    assert page.pop("device_up") == {well.key: 1, ASLEEP.key: 0}
    assert page.pop("device_asleep") == {ASLEEP.key: 1}
    assert ASLEEP.reading.uuid not in str(page)


def test_the_smaller_holdings_are_summed() -> None:
    """Beyond --processes.max there is one sum in pid=other and a count, also of uncharged bytes."""
    one, two = device(0, [holding(pid, pid * MIB) for pid in range(1, 11)]), device(1, [holding(3, 5 * MIB)])
    page = served(snapshot(one, two), most=2)
    assert page["process_memory_bytes"] == {
        (*one.key, "9"): 9 * MIB,
        (*one.key, "10"): 10 * MIB,
        (*one.key, "other"): sum(range(1, 9)) * MIB,
        (*two.key, "3"): 5 * MIB,
    }
    assert page["processes_dropped"] == {one.key: 8, two.key: 0}
    assert page["device_holders"].get((*one.key, "active")) == 10
    assert [labels[0] for labels in page["process_info"]] == ["3", "9", "10"]
    assert list(page["process_start_time_seconds"]) == [("3",), ("9",), ("10",)]
    for name in ("process_memory_peak_bytes", "process_state_since_timestamp_seconds"):
        assert "other" not in {labels[2] for labels in page[name]}
    some = UnchargedBytes(0, 2048 * MIB, 0, Grade.INFERRED, "")
    held = [holding(1, 9 * 2**30), *(holding(pid, uncharged=managed(MIB)) for pid in (2, 3))]
    one = device(0, [*held, holding(4, uncharged=some)])
    page = served(snapshot(one), most=1)
    assert page["process_uncharged_memory_bytes"] == {
        (*one.key, "other", "seen"): 2 * MIB,
        (*one.key, "other", "inferred"): 0,
    }
    assert page["process_managed_memory_bytes"] == {(*one.key, "other"): 2 * MIB}
    assert "process_uncharged_memory_max_bytes" not in page
    one = device(0, [holding(1, None), holding(2, MIB)])
    page = served(snapshot(one), most=1)
    assert (page["process_memory_bytes"], page["processes_dropped"]) == ({(*one.key, "2"): MIB}, {one.key: 1})


def test_a_dead_holder_keeps_its_row_in_a_join() -> None:
    """A holder that /proc no longer shows has an info series with only its pid, and no start time."""
    page = served(snapshot(device(0, [holding(7, state=State.DEAD), holding(8)])))
    dead, alive = ("7", *[""] * 12), ("8", "ada", "train.py", "", "", "user", "ada", *[""] * 6)
    assert page["process_info"] == {dead: 1, alive: 1}
    assert list(page["process_start_time_seconds"]) == [("8",)]


def test_series_come_in_the_order_of_devices_and_pids() -> None:
    """Devices are ordered by index as a number, then UUID; holdings by pid as a number."""
    shot = snapshot(
        device(10, [holding(5)]),
        device(2, [holding(100, MIB), holding(20, 2 * MIB), holding(3, 3 * MIB)], uuid="GPU-b"),
        device(2, uuid="GPU-a"),
    )
    page = served(shot)
    assert [labels[:2] for labels in page["device_up"]][:2] == [("2", "GPU-a"), ("2", "GPU-b")]
    assert [labels[2] for labels in page["process_memory_bytes"]] == ["3", "20", "100", "5"]


def test_a_mig_instance_is_a_device_and_its_gpu_has_no_book() -> None:
    """An instance names its GPU and profile; the divided GPU has hardware, and no ledger or holders."""
    gpu = device(0, hardware={"device_temperature_celsius": 40.0})
    gpu = DeviceSnapshot(structs.replace(gpu.reading, divided=True, memory=None), up=True)
    part = device(0, [holding(1)], uuid="MIG-1")
    place = {"parent": gpu.reading.uuid, "mig_profile": "1g.18gb", "gpu_instance": 7, "compute_instance": 0}
    part = replace(part, reading=structs.replace(part.reading, **place))
    page = served(snapshot(gpu, part))
    info = {labels[1]: labels[7:11] for labels in page["device_info"]}
    assert info == {gpu.reading.uuid: ("", "", "", ""), "MIG-1": (gpu.reading.uuid, "1g.18gb", "7", "0")}
    assert list(page["device_memory_total_bytes"]) == [part.key]
    assert {labels[1] for labels in page["device_holders"]} == {"MIG-1"}
    assert page["device_temperature_celsius"] == {gpu.key: 40.0}


def test_an_unknown_hardware_reading_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A key that is not declared, or has another form, makes no series; the debug log names it."""
    odd = device(
        hardware={"device_smell": 3.0, "device_clock_hertz": 1e9, "device_temperature_celsius": {"x": 1.0}}
    )
    with caplog.at_level(logging.DEBUG, "vramledger"):
        page = served(snapshot(odd))
    assert not {"device_smell", "device_clock_hertz", "device_temperature_celsius"} & set(page)
    assert [vars(record)["fields"]["keys"] for record in caplog.records] == ["device_smell"]


def pools(*told: tuple[str, dict[str, int]]) -> Series:
    """Serve the holder 101 with an agent and these frameworks' figures; return the general families."""
    rich = device(0, [holding(101)])
    found = tuple(Pool(framework, 0, figures, {}) for framework, figures in told)
    agents = {101: replace(builders.agent(rich.reading.uuid), pools={rich.reading.uuid: found})}
    page = served(replace(snapshot(rich), agents=agents))
    return {
        (name, labels[3]): value
        for name in ("in_use", "in_use_peak", "pool", "limit")
        for labels, value in page.get(f"framework_{name}_bytes", {}).items()
    }


def test_torch_has_the_general_figures_beside_its_own() -> None:
    """Each framework has a general series for each figure that it reports, torch too, and no others."""
    figures = {"reserved": 4, "allocated": 2, "allocated_peak": 3, "active": 2}
    torch = {("in_use", "torch"): 2, ("in_use_peak", "torch"): 3, ("pool", "torch"): 4}
    jax = {("in_use", "jax"): 1, ("pool", "jax"): 8, ("limit", "jax"): 9}
    assert pools(("torch", figures)) == torch
    both = pools(("jax", {"in_use": 1, "pool": 8, "limit": 9}), ("cupy", {"in_use": 0}))
    assert both == {**jax, ("in_use", "cupy"): 0}


def test_a_rank_is_shown_where_the_environment_names_it() -> None:
    """A rank has its number, how many there are, and the job's identity; others have no such series."""
    ranks = [process(7, distributed=True), process(8)]
    page = served(snapshot(device(0, [holding(7), holding(8)]), processes=ranks))
    assert page["process_rank_info"] == {("7", "1", "2", "gpu-1:29500"): 1}


def test_labels_of_pods_are_named_as_kube_state_metrics_names_them() -> None:
    """``label_``, an underscore for what is not allowed, snake case; equal names get a number."""
    assert label_names(["team", "app.kubernetes.io/name", "appName", "0-x"]) == {
        "team": "label_team",
        "app.kubernetes.io/name": "label_app_kubernetes_io_name",
        "appName": "label_app_name",
        "0-x": "label_0_x",
    }
    names = label_names(["a.b", "a-b", "c"])
    assert names == {"a-b": "label_a_b_conflict1", "a.b": "label_a_b_conflict2", "c": "label_c"}


@pytest.mark.parametrize(
    "keys", ["a.b a-b a_b_conflict1", "a.b a-b a.b_conflict2 a-b_conflict2", "A a aA a_a"]
)
def test_names_of_labels_never_collide(keys: str) -> None:
    """Each label of the list has its own legal name, in whatever order the list is."""
    names = label_names(keys.split())
    assert len(set(names.values())) == len(keys.split())
    assert all(re.fullmatch("[a-z_][a-z0-9_]*", name) for name in names.values())
    assert label_names(reversed(keys.split())) == names


def test_a_pod_has_one_series_with_its_labels() -> None:
    """A label that the pod does not have is empty; without labels or a driver there is no series."""
    shot = replace(snapshot(device(0)), pods=(LABELLED, LABELLED._replace(pod="b", labels=(("x", "y"),))))
    ((family, samples),) = collectors(0)["pods"](shot)
    assert family.labels == ("namespace", "pod", "label_app_name", "label_team")
    assert samples == [(("ml", "train-0", "", 'vi"sion'), 1.0)]
    assert "pod_labels_info" not in served(snapshot(device(0)))
    assert "pod_labels_info" not in served(replace(shot, up=False))


DEFAULT = frozenset(name for name, (on, _) in COLLECTORS.items() if on)


def series(snapshot: Snapshot) -> set[str]:
    """Return all series of the default page, without their values."""
    page = Exposition(0, os.getppid).render(snapshot, ScrapeRequest(DEFAULT)).decode()
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


class Churn:
    """Devices whose owners are all replaced, again and again; each has been active and idle."""

    def __init__(self) -> None:
        self.full = crowd(8, 8)
        self.accounts = [DeviceUsage(OWNERS_MAX) for _ in self.full.devices]
        self.now = 0.0

    def turn(self, turn: int, after: float) -> Snapshot:
        """Let new owners hold all of the memory, active and then idle."""
        devices = self.full.devices
        for state in (State.ACTIVE, State.IDLE):
            self.now += after
            pairs = zip(self.full.devices, self.accounts, strict=True)
            devices = tuple(self._sample(one, accounts, turn, state) for one, accounts in pairs)
        return replace(self.full, devices=devices)

    def _sample(self, one: DeviceSnapshot, accounts: DeviceUsage, turn: int, state: State) -> DeviceSnapshot:
        idle, first = state is State.IDLE, turn * 1000
        charges = [
            Charge(first + each.pid, first, ("pod", f"ml/{turn}-{each.pid}"), state, each.memory, idle)
            for each in one.holdings
        ]
        reserved = Reservation("pod", f"ml/{turn}-0", "kubelet", held=True)
        return replace(
            one,
            owner_usage=accounts.update(charges, one.ledger, self.now, 1e9),
            reservation_status=ReservationStatus((reserved,), (), ("kubelet",)),
        )


@pytest.mark.parametrize("after", [1.0, 10.0, 200.0])
def test_a_full_host_under_churn_stays_below_1730_series(after: float) -> None:
    """8 GPUs, 64 holders whose owners are all replaced every two samples, at any pace: never 1,730 series."""
    churn = Churn()
    most: Counter[str] = Counter()
    for turn in range(10):
        names = Counter(each.split("{")[0] for each in series(churn.turn(turn, after)))
        most = max(most, names, key=Counter.total)
    assert most.total() < 1730, most.most_common(8)


def test_a_change_of_state_makes_one_series_of_the_holding() -> None:
    """A new state is one series of the holding, and the first time three of its owner; no more after that."""
    host = OneHolder()
    known = series(host.sample())
    known |= series(host.sample())
    host.program.work = 0.4
    known |= series(host.sample())
    made: list[set[str]] = []
    for _ in range(3):
        for work in (False, True):
            for _ in range(12):
                host.program.work = 0.4 if work else 0.0
                now = series(host.sample())
                if now - known:
                    made.append(now - known)
                    known |= now
    (idle,) = made
    families = Counter(each.split("{")[0] for each in idle)
    owners = ("bytes", "byte_seconds_total", "wasted_byte_seconds_total")
    expected = [f"vramledger_owner_memory_{each}" for each in owners]
    assert families == Counter(["vramledger_process_state_since_timestamp_seconds", *expected])
