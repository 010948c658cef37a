"""Snapshots made by hand, for tests of everything that shows one."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from vramledger.accounting.ledger import balance, system_bytes
from vramledger.accounting.owners.owner_usage import Charge, DeviceUsage
from vramledger.model import agent_report
from vramledger.model.holder_facts import KvCache
from vramledger.model.reading import (
    FAILURE_REASONS,
    DeviceReading,
    HardwareValue,
    HiddenHolder,
    MemoryReading,
    NodeMemory,
    Owner,
    ParentFacts,
    PodLabels,
    ProcessEntry,
    ProcessFacts,
    Rank,
)
from vramledger.model.snapshot import (
    AgentSnapshot,
    DeviceSnapshot,
    Grade,
    Holding,
    OwnerLimit,
    OwnerOoms,
    Pool,
    ProcessSnapshot,
    Reservation,
    ReservationStatus,
    Snapshot,
    State,
    UnchargedBytes,
    UndividedBytes,
)
from vramledger_agent.protocol.frameworks import POOL_FIGURES, REPORTING_FRAMEWORKS
from vramledger_agent.protocol.messages import CATEGORIES

GIB = 2**30
MIB = 2**20
NOW = 1_790_000_000.25
TOTAL = 143_771 * MIB
OOMS = (OwnerOoms("pod", "ml/train-0", "torch", 1, NOW - 60),)
RESERVED = 644_939_776

# Every key and label of the driver module, with the figures of an H200 at work.
HARDWARE: Mapping[str, HardwareValue] = {
    "device_temperature_celsius": 41.0,
    "device_power_watts": 312.458,
    "device_power_limit_watts": 700.0,
    "device_clock_hertz": {"graphics": 1.98e9, "sm": 1.98e9, "memory": 3.201e9, "video": 1.545e9},
    "device_throttle_active": {"gpu_idle": 0.0, "sw_power_cap": 1.0, "hw_slowdown": 0.0},
    "device_performance_state": 0.0,
    "device_fan_speed_ratio": 0.3,
    "device_ecc_errors_total": {"corrected": 3.0, "uncorrected": 0.0},
    "device_remapped_rows": {"corrected": 0.0, "uncorrected": 0.0},
    "device_row_remap_pending": 0.0,
    "device_row_remap_failed": 0.0,
    "device_recovery_action": {"none": 1.0},
    "device_encoder_utilization_ratio": 0.0,
    "device_decoder_utilization_ratio": 0.0,
    "device_pcie_link_generation": {"current": 5.0, "max": 5.0},
    "device_pcie_link_width": {"current": 16.0, "max": 16.0},
    "device_bar1_memory_bytes": {"used": 1.0 * MIB, "total": 262_144.0 * MIB},
    "device_energy_joules_total": 123_456_789.012,
    "device_memory_temperature_celsius": 47.0,
    "device_pcie_throughput_bytes_per_second": {"transmit": 1024.0, "receive": 2048.0},
}


ACTIVITY: Mapping[str, float] = {
    "seconds": 1.0, "graphics": 0.97, "sm": 0.91, "occupancy": 0.25, "integer": 0.02, "tensor": 0.88,
    "dram": 0.24,
    "fp64": 0.0, "fp32": 0.01, "fp16": 0.0, "pcie_transmit": 1024.0, "pcie_receive": 2048.0, "video": 0.0,
    "nvlink_transmit": 7.7e9, "nvlink_receive": 7.6e9,
}  # fmt: skip
"""What GPM's counters say of a training."""


def managed(least: int, most: int | None = None) -> UnchargedBytes:
    most = least if most is None else most
    return UnchargedBytes(least, most, least, Grade.SEEN, "NVML charges 512 MiB; the rest is managed memory")


def holding(  # noqa: PLR0913 - a builder has as many knobs as the thing it builds
    pid: int,
    memory: int | None = 512 * MIB,
    state: State = State.ACTIVE,
    *,
    uncharged: UnchargedBytes | None = None,
    sm: float | None = None,
    last_active: float | None = None,
    why: str = "it works",
) -> Holding:
    """Make a holding that began a minute before NOW, in a state that is proven."""
    return Holding(
        pid=pid, start=None if state in (State.DEAD, State.UNKNOWN) else pid * 100, memory=memory,
        peak=memory, kinds="C", state=state, since=NOW - 60, why=why, sm=sm, last_active=last_active,
        working=False if state is State.IDLE else None,
        grade=Grade.INFERRED if state is State.UNKNOWN else Grade.PROVEN, uncharged=uncharged,
    )  # fmt: skip


def device(  # noqa: PLR0913 - a builder has as many knobs as the thing it builds
    index: int = 0,
    holdings: Iterable[Holding] = (),
    *,
    uuid: str | None = None,
    name: str = "NVIDIA H200",
    reserved: int | None = RESERVED,
    unattributed: int = 14 * MIB,
    undivided: UndividedBytes | None = None,
    hardware: Mapping[str, HardwareValue] | None = None,
    utilization: Mapping[str, float] | None = None,
    activity: Mapping[str, float] | None = None,
    hidden: tuple[HiddenHolder, ...] | None = None,
    xids: Mapping[int, int] | None = None,
) -> DeviceSnapshot:
    """Make a device that answered, with a ledger that balances over its holdings."""
    held = tuple(sorted(holdings, key=lambda each: -(each.memory or 0)))
    known = [(each.state, each.memory) for each in held if each.memory is not None]
    uncharged = [(each.state, each.uncharged.least) for each in held if each.uncharged is not None]
    if undivided is not None:
        uncharged.append((undivided.state, undivided.bytes))
    used = sum(memory for _, memory in [*known, *uncharged]) + unattributed
    memory = MemoryReading(TOTAL, TOTAL - (reserved or 0) - used, used, reserved)
    reading = DeviceReading(
        index=index, uuid=uuid or f"GPU-{index:08x}-5be5-4c2d-9d1e-0c5e4b1f7a00", name=name,
        pci_bus_id=f"0000:{index + 11:02x}:00.0", minor=index, memory=memory,
        processes=tuple(ProcessEntry(each.pid, each.memory, each.kinds) for each in held),
        utilization=utilization, activity=activity, hardware=hardware or {},
        reset_required=bool((hardware or {}).get("device_row_remap_failed")) if hardware else None,
    )  # fmt: skip
    ledger = balance(memory, known, uncharged=uncharged)
    charges = [
        Charge(each.pid, each.start, ("user", "ada"), each.state, each.held, each.wasted is True)
        for each in held
    ]
    owners = DeviceUsage(0).update(charges, ledger, 0.0, 5.0)
    return DeviceSnapshot(
        reading, True, ledger, used, held, hidden, xids or {}, owner_usage=owners, undivided=undivided
    )


def coherent_device() -> DeviceSnapshot:
    """Make a GH200 on which the operating system holds 5 GiB of its own."""
    held = holding(107, 10 * GIB)
    node = NodeMemory(1, TOTAL - RESERVED, TOTAL - RESERVED - 15 * GIB, 3 * GIB, GIB, GIB, GIB)
    memory = MemoryReading(TOTAL, TOTAL - RESERVED - 15 * GIB, 15 * GIB, RESERVED)
    ordinary = device(7, [held], name="NVIDIA GH200 480GB", unattributed=5 * GIB)
    reading = structs.replace(
        ordinary.reading, memory=memory, memory_kind="coherent", node=node, addressing_mode="ats"
    )
    ledger = balance(memory, [(held.state, 10 * GIB)], system=system_bytes(reading))
    charge = Charge(held.pid, held.start, ("user", "ada"), held.state, held.held, held.wasted is True)
    owners = DeviceUsage(0).update([charge], ledger, 0.0, 5.0, kept_by_system=True)
    limit = OwnerLimit("user", "ada", "/user.slice", 20 * GIB, 19 * GIB, GIB, 9 * GIB)
    return structs.replace(ordinary, reading=reading, ledger=ledger, owner_usage=owners, limits=(limit,))


def reread(device: DeviceSnapshot, **changes: Any) -> DeviceSnapshot:  # noqa: ANN401 any field of a reading
    """Return a device of which something else was read."""
    return structs.replace(device, reading=structs.replace(device.reading, **changes))


def process(
    pid: int, *, user: str = "ada", command: str = "train.py", distributed: bool = False, **facts: object
) -> ProcessSnapshot:
    """Make what /proc says about a holder, with further facts."""
    parent = ParentFacts(pid - 1, 1, "bash", "bash", init=False)
    rank = Rank(pid % 2, 2, "gpu-1:29500") if distributed else None
    usual = ProcessFacts(pid, pid * 100, 1000, user, command[:15], command, parent=parent, rank=rank)
    return ProcessSnapshot(pid, NOW - 3600 + pid / 100, structs.replace(usual, **facts))


SETTINGS = {
    "expandable_segments": "false", "max_split_size_mb": "unlimited", "garbage_collection_threshold": "off",
}  # fmt: skip
SOCKET = agent_report.AgentSocket(
    listening=True, connections=1, rejected=dict.fromkeys(agent_report.REASONS, 0)
)


def agent(uuid: str) -> AgentSnapshot:
    """Make an agent that reports everything about each framework on a device; its pools are small."""
    pools = []
    for framework in REPORTING_FRAMEWORKS.values():
        names = framework.figures if framework.general else POOL_FIGURES
        figures = {name: (number + 8) * MIB for number, name in enumerate(names)}
        categories = dict.fromkeys(CATEGORIES, MIB) if framework.has_categories else {}
        pools.append(Pool(framework.name, 0, figures, categories))
    report = agent_report.AgentReport(
        sequence=1,
        interval=1.0,
        agent="0.1.0",
        python="3.11.7",
        collector=agent_report.GarbageReport(enabled=True, collections=3),
        frameworks=(
            agent_report.FrameworkReport(
                "torch", "2.13.0", allocator="native", policy="caching", settings=SETTINGS, pinned=16 * MIB,
                pinned_in_use=MIB,
            ),
        ),
        last_oom=agent_report.OutOfMemory(NOW - 5, "torch", 0, MIB, "leaking", "/home/ada/oom.txt"),
    )  # fmt: skip
    return AgentSnapshot(
        up=True, received=NOW - 1, report=report, pools={uuid: tuple(pools)}, errors={"torch": 0}, dropped=0,
        collections=3,
    )  # fmt: skip


def snapshot(
    *devices: DeviceSnapshot, processes: Iterable[ProcessSnapshot] | None = None, serial: int = 1
) -> Snapshot:
    """Make a good sample; unless the test says otherwise, every holder with a start time is in /proc."""
    if processes is None:
        pids = {each.pid for one in devices for each in one.holdings if each.start is not None}
        processes = [process(pid) for pid in sorted(pids)]
    return Snapshot(
        serial=serial, up=True, time=NOW, duration=0.0125, host_pid_namespace=True,
        driver_version="580.159.04", cuda_version="13.0", devices=devices,
        processes={each.pid: each for each in processes}, failures=dict.fromkeys(FAILURE_REASONS, 0),
        collectors={"ledger": (True, 0.001), "process": (True, 0.002)},
    )  # fmt: skip


KV_CACHE = KvCache(101, 10100, 0.03125, 256 * MIB, 412_000)
"""What a vLLM server says."""


def failed(reason: str = "no-library", message: str = "libnvidia-ml.so.1 is not here") -> Snapshot:
    """Make the snapshot of a host without a driver."""
    return Snapshot(
        serial=1, failure=(reason, message), time=NOW, duration=0.0001,
        failures={each: int(each == reason) for each in FAILURE_REASONS},
    )  # fmt: skip


def crowd(gpus: int, holders: int, *, turn: int = 0, serial: int = 1) -> Snapshot:
    """Make ``holders`` processes on each of ``gpus`` devices; ``turn`` changes the figures of a quarter."""
    devices = []
    for index in range(gpus):
        states = list(State)
        held = [
            holding(
                1000 + index * holders + number,
                (300 + number + (turn if number % 4 == 0 else 0)) * MIB,
                states[number % len(states)],
                sm=(number + turn) % 100 / 100 if number % 4 == 0 else None,
                last_active=NOW - number + (turn if number % 4 == 0 else 0),
            )
            for number in range(holders)
        ]
        utilization = {"gpu": (37 + turn) % 100 / 100, "memory": 0.12}
        devices.append(
            device(index, held, hardware=HARDWARE, utilization=utilization, activity=ACTIVITY, hidden=())
        )
    return snapshot(*devices, serial=serial)


@dataclass
class Shown:
    """The services of the web side, set by hand (see ``vramledger.web.services.AppServices``)."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    ready: bool = True
    sampler_pid: int | None = None

    async def wait_for_newer(self, serial: int) -> Snapshot:
        """Wait until a test has set a newer one."""
        while self.snapshot.serial <= serial:  # noqa: ASYNC110 - a test sets an attribute, not an event
            await asyncio.sleep(0.005)
        return self.snapshot


def rich_host() -> Snapshot:
    """Make a host with one working device, one with every problem, and all facts about both."""
    orphan = structs.replace(
        holding(101, 900 * MIB, State.ORPHANED, sm=0.5, last_active=NOW),
        working=False, busy_without_work_since=NOW, uncharged=managed(MIB, 2 * MIB),
    )  # fmt: skip
    working = device(
        0,
        [orphan, holding(102)],
        undivided=UndividedBytes(MIB, (101, 102), State.ACTIVE, False, None),
        hardware={
            **HARDWARE,
            "device_performance_state": 2.0,
            "device_pcie_link_generation": {"current": 3.0, "max": 5.0},
        },
        utilization={"gpu": 0.75, "memory": 0.25},
        activity={**ACTIVITY, "occupancy": 0.05, "dram": 0.9, "nvlink_receive": 0.0},
    )
    hoarded = device(
        1,
        [holding(201, TOTAL - 8192 * MIB, State.IDLE), holding(202)],
        hardware={
            **HARDWARE,
            **dict.fromkeys(("device_row_remap_pending", "device_row_remap_failed"), 1.0),
            **{f"device_{coder}_utilization_ratio": 1.0 for coder in ("encoder", "decoder")},
            "device_power_limit_watts": 400.0,
            "device_remapped_rows": {"corrected": 1.0, "uncorrected": 0.0},
            "device_recovery_action": {"gpu_reset": 1.0},
            "device_pcie_link_width": {"current": 8.0, "max": 16.0},
        },
        utilization={"gpu": 0.0, "memory": 0.0},
        activity={**ACTIVITY, "sm": 0.0},
        hidden=(HiddenHolder(9, 900, "cuda", "python", "ada", (1,)),),
        xids={79: 1},
    )
    pod = Owner("pod", "ml/train-0", "ml", "train-0")
    ranks = [process(pid, distributed=True) for pid in (102, 201)]
    processes = [process(101, distributed=True, owner=pod), *ranks, process(202, user="grace")]
    return structs.replace(
        snapshot(working, in_trouble(hoarded), coherent_device(), ASLEEP, processes=processes),
        agents={101: structs.replace(agent(working.reading.uuid), unmapped=1)},
        agent_socket=SOCKET,
        hidden_unreadable=3,
        ooms=OOMS,
        pods=(PodLabels("ml", "train-0", (("team", "vision"),)),),
        kv_caches={101: KV_CACHE._replace(pid=101)},
    )


ASLEEP = DeviceSnapshot(DeviceReading(5, "GPU-00000005", error="asleep"), up=False)


def in_trouble(hoarded: DeviceSnapshot) -> DeviceSnapshot:
    """Return a device with overlap, too many owners, an unused reservation, and an unreserved holder."""
    assert hoarded.ledger is not None
    assert hoarded.owner_usage is not None
    waiting = Reservation("pod", "ml/train-0", "kubelet", held=False)
    using = Reservation("user", "ada", "kubelet", held=True, user="ada", account="physics")
    return structs.replace(
        hoarded,
        ghost=True,
        ledger=structs.replace(hoarded.ledger, overlap=MIB),
        owner_usage=hoarded.owner_usage._replace(dropped=2),
        reservation_status=ReservationStatus((waiting, using), (202,), ("kubelet",)),
    )
