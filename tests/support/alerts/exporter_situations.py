"""Situations of exporters, devices, drivers, reservations and Prometheus."""

import math
from collections.abc import Mapping
from dataclasses import replace

from tests.support.alerts.nodes import Holder, Node, Values, changing_at, uuid
from tests.support.alerts.parts import (
    DEAD,
    FREE,
    IDLE,
    LEAK,
    RESERVED,
    STAMP,
    STANDS_STILL,
    TRAINER,
    UNUSED,
    Relabel,
    away,
    failing,
    from_minute,
    gone,
    grows,
    loses,
    on_gpu,
    relapsing,
    sawtooth,
    series,
    source,
    torch,
    until,
    with_labels,
)
from tests.support.alerts.situation import Situation
from tests.support.host.model import GIB

UP, SECOND_UP = on_gpu("device_up"), on_gpu("device_up", gpu=1)
NEW_UP, MIG_A, MIG_B = (on_gpu("device_up", uuid=name) for name in ("GPU-new", "MIG-a", "MIG-b"))
LOST: dict[str, Values] = {UP: changing_at(30, 1, 0)}
XID, ECC = on_gpu("device_xid_errors_total", xid=94), on_gpu("device_ecc_errors_total", type="uncorrected")
RELEASED: dict[str, Values] = {series("released_until_timestamp_seconds"): changing_at(5, None, 1e9)}
TASK = Holder(7, 30, owner_type="container", owner="0a1b2c3d")


def nomad(unreserved: float) -> dict[str, Values]:
    """Return a reservation of Nomad's, and what is held on the device besides."""
    return {
        on_gpu("device_reservation_info", owner_type="nomad", owner="train/main/1f"): 1,
        on_gpu("device_reservations", use="held"): 1,
        on_gpu("device_unreserved_memory_bytes"): unreserved * GIB,
    }


def remade(minute: float, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels of MIG instances that are made again at minute 60, with other names."""
    return {**given, "gpu": "0", "uuid": f"MIG-{minute >= 60}-{given['gpu']}"} if "gpu" in given else given


def renamed(**uuids: str) -> Relabel:
    """Return labels in which devices have other uuids, by the index."""
    return lambda _, given: {**given, "uuid": uuids[f"gpu{given['gpu']}"]} if "uuid" in given else given


def flickers(wanted: str, told: str, name: str, short: float = 1) -> Situation:
    """Return an exporter of which something fails for a while, and then at the end of each ten minutes."""
    return Situation(wanted, Node(extra={name: relapsing(20, 45, 10, short)}), told, 100)


EXPORTERS = [
    Situation("no holder, no fault: nothing", Node(), minutes=40),
    Situation("a replay that has ended: nothing",
        Node(extra={STAMP: 5, series("source_info", source="replay"): 1}), minutes=20),
    Situation("the exporter's storage is full for a moment: nothing",
        Node(extra={series("storage_up"): lambda m: 0 if 2 <= m < 9 else 1}), minutes=30),
    Situation("rules of others fail: nothing", Node(extra={failing("node-exporter"): lambda m: m}),
        minutes=30),
    Situation("an agent that is only degraded: nothing",
        Node([TRAINER], extra={series("agent_up", pid=9, reason="degraded"): 0}), minutes=30),
    Situation("released, and the driver is gone: nothing", Node(driver_up=changing_at(5, 1, 0),
        extra=RELEASED), minutes=30),
    Situation("released, and its samples stand still: nothing", Node(extra=RELEASED | STANDS_STILL),
        minutes=30),
    Situation("released from the beginning: nothing", Node(driver_up=0, extra={next(iter(RELEASED)): 1e9}),
        minutes=30),
    # --- an exporter that does not answer
    Situation("away for 3 hours, as its rack is: only that it is down", Node(missing=away(20, 200)),
        "VramLedgerExporterDown-w 24..27 to 200..210", 220),
    Situation("an exporter that crashes again and again, and then has no driver: only that it is down",
        Node(driver_up=changing_at(20, 1, 0), missing=lambda m: m >= 20 and round(m * 4) % 4 >= 1),
        "VramLedgerExporterDown-w", 60),
    Situation("a new node's exporter comes 4 minutes late: nothing", Node(missing=away(0, 4)), minutes=45),
    Situation("answered once without a driver, and went: only that it is down",
        Node(driver_up=changing_at(20, 1, 0), missing=lambda m: m >= 20.2), "VramLedgerExporterDown-w", 40),
    Situation("answers half of the time: told once, without a pause",
        Node(missing=lambda m: 20 <= m < 110 and m % 4 < 2), "VramLedgerExporterDown-w 30..45 to 110..160",
        170),
    Situation("away for eight of ten minutes: told once, without a pause",
        Node(missing=lambda m: 20 <= m < 110 and m % 10 < 8), "VramLedgerExporterDown-w 25..26 to 108..160",
        170),
    Situation("away for five of ten minutes: told once, without a pause",
        Node(missing=lambda m: 20 <= m < 110 and m % 10 < 5), "VramLedgerExporterDown-w 25..52 to 105..160",
        170),
    Situation("down, then away for two of five minutes: the second is told apart from the first, which ends",
        Node(missing=lambda m: 20 <= m < 32 or (32 <= m < 130 and m % 5 < 2)), "VramLedgerExporterDown-w x2",
        140),
    Situation("federated without `up`: an idle program and a leak are told all the same",
        Node([replace(IDLE, pid=8), LEAK], extra={"up{NODE}": None}),
        "GpuMemoryHoarded-w 4..10, GpuMemoryLeakSuspected-w 20..60"),
    flickers("a collector fails, then three minutes of every ten: told until the first is over",
        "VramLedgerCollectorFailing-w 30..33 to 45..62", series("collector_success", collector="x"), 3),
    flickers("a storage fails, then a minute of every ten: told until the first is over",
        "VramLedgerStorageFailing-w 30..31 to 45..62", series("storage_up")),
    flickers("a socket is away, then a minute of every ten: told until the first is over",
        "VramLedgerAgentSocketDown-w 30..31 to 45..62", series("agent_socket_up")),
    Situation("rules fail, then once in twelve minutes: told until the first is over",
        Node(extra={failing("vramledger-growth"): lambda m: max(0, min(m, 50) - 20) + max(0, m - 50) // 12}),
        "VramLedgerRulesFailing-p 30..32 to 50..72", 100),
    # --- a driver that is only on its way, and one that is lost
    Situation("a reboot with a build of the driver: nothing",
        Node(driver_up=lambda m: float(not 20 <= m < 27), missing=away(20, 23)), minutes=60),
    Situation("a driver updated in two steps: nothing",
        Node(driver_up=lambda m: float(not (20 <= m < 24 or 24.5 <= m < 27))), minutes=60),
    Situation("a build of the driver without a reboot: nothing",
        Node(driver_up=lambda m: float(not 20 <= m < 24.3)), minutes=60),
    Situation("a quick reboot with a build of the driver: nothing",
        Node(driver_up=lambda m: float(not 20 <= m < 24.6), missing=away(20, 20.6)), minutes=60),
    Situation("a driver that is back when its page is due: nothing",
        Node(driver_up=lambda m: float(not 20 <= m < 35), missing=away(18, 20)), minutes=60),
    Situation("a driver lost while scrapes are lost: paged", Node(driver_up=changing_at(20, 1, 0),
        missing=loses), "GpuDriverLost-p", 60),
    Situation("a driver lost in a reboot: paged", Node(driver_up=changing_at(20, 1, 0), missing=away(20, 23)),
        "GpuDriverLost-p", 60),
    Situation("a driver comes and goes: paged once, without a pause",
        Node(driver_up=lambda m: float(m < 20 or 27 <= m < 29 or 36 <= m < 38 or m > 60)),
        "GpuDriverLost-p 25..26 to 60..75", 90),
    Situation("a driver answers a third of the time: paged once, without a pause",
        Node(driver_up=lambda m: float(not 20 <= m < 100 or m % 3 >= 2)), "GpuDriverLost-p 25..40 to 98..125",
        140),
    Situation("a driver is lost, then for a minute of every nine: the page ends",
        Node(driver_up=relapsing(20, 28, 9)), "GpuDriverLost-p 25..26 to 28..45", 90),
    # --- GPUs that are lost, replaced, asleep
    Situation("a GPU is replaced, then lost: paged", Node(gpus=2, missing=away(10, 12),
        extra={UP: changing_at(12, 1, None), NEW_UP: lambda m: None if m < 12 else float(m < 20)}),
        "GpuDeviceLost-p", 22),
    Situation("a GPU must be reset and answers nothing else: its reset is paged, not its loss",
        Node(extra={UP: changing_at(5, 1, 0), on_gpu("device_reset_required"): changing_at(5, 0, 1)}),
        "GpuResetRequired-p", 20),
    Situation("a GPU sleeps: nothing",
        Node(extra={UP: changing_at(5, 1, 0), on_gpu("device_asleep"): changing_at(5, None, 1)}), minutes=30),
    *[
        Situation(f"a GPU that had to be reset for {minutes} minutes: {fires or 'nothing'}",
            Node([TRAINER], extra={
                on_gpu("device_recovery_action", action="gpu_reset"): gone(minutes, 1000),
                on_gpu("device_recovery_action", action="none"): gone(0, minutes)}),
            fires, 30)
        for minutes, fires in ((0.5, ""), (4, "GpuResetRequired-p 1..3 to 3..16"))
    ],
    Situation("a GPU does not come back after hours off: paged", Node(gpus=2, missing=away(20, 80),
        extra={SECOND_UP: changing_at(20, 1, None)}), "GpuDeviceLost-p, VramLedgerExporterDown-w", 200),
    Situation("a GPU comes back a little later than its node: nothing", Node(gpus=2, missing=away(20, 24),
        extra={SECOND_UP: gone(20, 24.5)}), minutes=200),
    Situation("a node with a GPU that is gone is taken out of service: the page ends",
        Node(gpus=2, extra={UP: changing_at(10, 1, None), "up{NODE}": changing_at(14, 1, None)},
        missing=lambda minute: minute >= 14), "GpuDeviceLost-p 13..15 to 36..40", 45),
    Situation("a GPU answers four of six minutes: paged once, without a pause",
        Node(extra={UP: lambda m: float(m % 6 < 4 or m > 90)}), "GpuDeviceLost-p 5..9 to 90..110"),
    Situation("a GPU is lost, then for a sample of every ten minutes: the page ends",
        Node(extra={UP: relapsing(20, 28.25, 10, 0.25)}), "GpuDeviceLost-p 20..22 to 28..50", 90),
    Situation("a GPU is replaced, same index and another uuid, over an hour without power: no GPU is lost",
        Node([TRAINER], gpus=2, missing=away(30, 90),
        relabel=from_minute(90, renamed(gpu0=uuid(0), gpu1="GPU-new"))),
        "VramLedgerExporterDown-w 34..37 to 90..97"),
    Situation("a GPU is replaced while it was lost: the page ends", Node(gpus=2, missing=away(60, 63),
        extra={SECOND_UP: lambda m: 1 if m < 20 else 0 if m < 60 else None,
        on_gpu("device_up", gpu=1, uuid="GPU-new"): changing_at(63, None, 1)}),
        "GpuDeviceLost-p 21..24 to 60..80"),
    Situation("two of eight GPUs do not come back from a reboot: each is paged once",
        Node(gpus=8, missing=away(30, 34),
        extra={on_gpu("device_up", gpu=n): changing_at(30, 1, None) for n in (3, 4)}),
        "GpuDeviceLost-p 35..39 x2"),
    Situation("all series of a node with a lost GPU end for one scrape: the page stays",
        Node([TRAINER], missing=lambda m: m == 60, extra=LOST), "GpuDeviceLost-p 31..34"),
    Situation("a scrape each 120 s, and a GPU that is lost: paged within 10 minutes",
        Node([TRAINER], every=120, extra=LOST), "GpuDeviceLost-p 31..40"),
    Situation("two servers have the series of a node with a lost GPU: paged once",
        Node([TRAINER], relabel=source(replica="a"), extra=LOST), "GpuDeviceLost-p 31..34",
        beside=Node([TRAINER], relabel=source(replica="b"), extra=LOST)),
    # --- MIG
    Situation("MIG instances are made anew, with other uuids, while nothing runs: no GPU is lost",
        Node(gpus=2, relabel=remade)),
    Situation("a GPU is divided by MIG: without a ledger it is not lost, and its instances raise nothing",
        Node(extra={FREE: until(60, 70 * GIB), on_gpu("device_memory_total_bytes"): until(60, 100 * GIB),
        MIG_A: changing_at(60, None, 1), on_gpu("device_memory_total_bytes", uuid="MIG-a"): changing_at(60,
        None, 40 * GIB), on_gpu("device_memory_bytes", uuid="MIG-a", state="free"): changing_at(60, None,
        40 * GIB)})),
    Situation("the whole GPU of MIG instances is lost: it is paged once, not once an instance",
        Node(extra=LOST | {MIG_A: changing_at(30, 1, None), MIG_B: changing_at(30, 1, None)}),
        "GpuDeviceLost-p 31..34"),
    # --- counters of errors
    Situation("an XID comes 6 minutes after the exporter began to count anew: it is told",
        Node([TRAINER], extra={XID: lambda m: 3 if m < 60 else None if m < 66 else 1}),
        "GpuXidError-w 66..68 to 80..112"),
    Situation("an XID comes again an hour after a restart of the exporter, which forgot: it is told",
        Node([TRAINER], missing=away(40, 41), extra={XID: lambda m: 1 if m < 40 or m >= 100 else None}),
        "GpuXidError-w 100..102"),
    Situation("a count of XIDs is back unchanged after an update of 12 minutes: nothing but the update",
        Node([TRAINER], missing=away(40, 52), extra={XID: 2}), "VramLedgerExporterDown-w 44..47 to 52..60"),
    Situation("a count of XIDs is 3, 0 after a restart, and stays 0: nothing",
        Node([TRAINER], extra={XID: changing_at(60, 3, 0)})),
    Situation("errors that ECC corrected: nothing",
        Node(extra={on_gpu("device_ecc_errors_total", type="corrected"): changing_at(20, 7, 8)}), minutes=30),
    Situation("an ECC error while the exporter is away for an hour: told when it is back",
        Node(missing=away(20, 84), extra={ECC: changing_at(30, 7, 8)}),
        "GpuEccUncorrectable-w 84..86 to 92..92, VramLedgerExporterDown-w", 92),
    Situation("another GPU with old ECC errors takes the place of one with none: nothing",
        Node(extra={ECC: 0}, missing=away(55, 59), relabel=from_minute(59, renamed(gpu0="GPU-new")))),
    # --- devices that are full, or say nothing of it
    Situation("full of page cache, which the kernel drops: nothing", Node([replace(TRAINER, gib=95.1)],
        extra={on_gpu("device_node_memory_bytes", type="file"): 10 * GIB}), minutes=60),
    Situation("a vGPU whose memory and holders cannot be asked: nothing",
        Node(extra={on_gpu("device_memory_total_bytes"): None, FREE: None})),
    Situation("free memory is not a number for 20 minutes: nothing",
        Node([TRAINER], extra={FREE: lambda m: math.nan if 40 <= m < 60 else 70 * GIB})),
    Situation("memory belongs to nobody, and a scrape of each seven minutes is lost: told in time",
        Node(unattributed=10, missing=lambda m: m >= 3 and (m - 3) % 7 < 0.25),
        "GpuMemoryUnattributed-w 14..22"),
    # --- reservations
    Situation("reserved, and what is held besides is not known: nothing", Node([TRAINER], extra=RESERVED),
        minutes=30),
    Situation("Nomad's task in its container: nothing", Node([TASK], extra=nomad(0)), minutes=30),
    Situation("Nomad's task beside an intruder: told", Node([TASK, Holder(9, 2, owner="eve", user="eve")],
        extra=nomad(2)), "GpuMemoryOutsideReservation-w", 30),
    Situation("a reservation is unused over two updates: told without a pause", Node(extra=RESERVED | UNUSED,
        missing=lambda m: 60 <= m < 66 or 110 <= m < 116),
        "GpuReservedUnused-w 120..124, VramLedgerExporterDown-w x1", 160),
    Situation("a reservation is unused for 100 minutes, then used: nothing",
        Node(extra=RESERVED | {on_gpu("device_reservations", use=use): changing_at(100, begins,
        1 - begins) for use, begins in {"held": 0, "unheld": 1}.items()})),
    # --- clocks and scrapes of healthy nodes
    Situation("a sample is 40 seconds older than its scrape, as where sampling is slow: nothing",
        Node([TRAINER], extra={STAMP: lambda m: 60 * m - 40})),
    Situation("a scrape each 120 s of a healthy node: no page", Node([TRAINER, torch(sawtooth)], every=120)),
    Situation("federated series have prometheus, env and region: dead memory is paged once, as everywhere",
        Node([DEAD], relabel=with_labels(prometheus="p1", env="prod", region="eu")), "GpuMemoryDead-p 5..8"),
    Situation("a program's first hour is one of its node's clock, an hour behind: only the clock",
        Node([Holder(7, grows(0.5, 5, 0, 30), start=-60)], extra={STAMP: lambda m: 60 * (m - 60)}),
        "VramLedgerClockSkew-i", 55),
]  # fmt: skip
