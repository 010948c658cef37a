"""What flags and hardware change on the page: MIG, collectors, XIDs, the limit on processes, the ledger."""

from __future__ import annotations

import pytest

from tests.support.exporter import QUICK, run, sampling, serving
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, StandIn
from vramledger.config import ALWAYS_COLLECTED


def test_mig_instances_are_devices(standin: StandIn, stage: Stage) -> None:
    """Each MIG instance has its own ledger; the divided GPU has none, so no byte counts twice."""
    small, large = standin.device(0).divide("1g.18gb", "3g.71gb")
    first, second = stage.start().pid, stage.start().pid
    small.set_processes([(first, GIB)])
    large.set_processes([(second, 5 * GIB)])
    standin.device(0).set_processes([(first, GIB), (second, 5 * GIB)])  # also those of its instances
    with serving(*QUICK, driver=standin.env()) as exporter:
        page = exporter.until(lambda page: page.up, "the data")
        gpu, other = standin.device(0).uuid, standin.device(1).uuid
        assert page.labels("device_up", "uuid") == {gpu, other, small.uuid, large.uuid}
        assert page.labels("device_memory_total_bytes", "uuid") == {other, small.uuid, large.uuid}
        assert page.values("process_memory_bytes", uuid=gpu) == {}
        assert sum(page.values("process_memory_bytes").values()) == 6 * GIB
        assert page.value("device_memory_bytes", uuid=small.uuid, state="active") == GIB
        assert page.value("device_memory_bytes", uuid=large.uuid, state="active") == 5 * GIB
        assert page.value("device_memory_total_bytes", uuid=large.uuid) == 71 * GIB
        about = {"parent_uuid": gpu, "mig_profile": "3g.71gb", "gpu": 0}
        assert page.value("device_info", uuid=large.uuid, **about) == 1
        assert page.values("device_temperature_celsius", uuid=gpu) != {}, "the hardware is the GPU's"

        standin.device(0).lost = True
        page = exporter.until(lambda page: page.value("device_up", uuid=large.uuid) == 0, "the loss")
        assert [page.value("device_up", uuid=uuid) for uuid in (gpu, small.uuid, other)] == [0, 0, 1]
    shown = run("show", driver=standin.env()).stdout
    assert "no data: lost" in shown


COLLECTORS = {
    "ledger": ("device_memory_bytes", None),
    "process": ("process_memory_bytes", None),
    "owner": ("owner_memory_bytes", None),
    "hardware": ("device_power_watts", "nvmlDeviceGetPowerUsage"),
    "energy": ("device_energy_joules_total", "nvmlDeviceGetTotalEnergyConsumption"),
    "xid": ("device_xid_errors_total", "nvmlEventSetWait_v2"),
    "pcie": ("device_pcie_throughput_bytes_per_second", "nvmlDeviceGetPcieThroughput"),
}
"""A collector: one of its families, and a query that only it makes."""


@pytest.mark.repeats(kept=2)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(
    "names", [["ledger", "hardware", "xid"], ["process", "owner", "energy", "pcie"]], ids=" ".join
)
def test_a_collector_that_is_off_asks_nothing(
    standin: StandIn, stage: Stage, names: list[str], *, on: bool
) -> None:
    """A collector has its families and its queries only when it is on; everything else is as usual."""
    standin.device(0).set_processes([(stage.start().pid, GIB)])
    for number in range(standin.device_count):  # GPM's counters would replace the query for PCIe
        standin.device(number).set(gpm_supported=0)
    others = COLLECTORS.keys() - set(names)
    flags = [f"--{'' if on else 'no-'}collector.{name}" for name in names]
    flags += [f"--{'no-' if on else ''}collector.{name}" for name in others]
    running = set(names) if on else others
    with serving(*QUICK, *flags, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.device_up(0) == 1, "the data")
        if "xid" in running:
            standin.wait_for_call("nvmlEventSetWait_v2")
            standin.xid(79)
            exporter.until(lambda page: page.values("device_xid_errors_total"), "the XID")
        page = exporter.next_sample()
        success = page.values("collector_success")
        besides = {"agent", "exporter", "hidden", "reservations"}
        always = ALWAYS_COLLECTED.keys() - (set() if "process" in running else {"managed"})
        always |= {"threads", "ties"}
        assert {dict(key)["collector"] for key in success} == running | besides | always
        assert page.failing <= {"hidden"}, (
            "how many of this machine's processes we may look into is its matter"
        )
        assert {name for name, (family, _) in COLLECTORS.items() if page.values(family)} == running
        asked = {name for name, (_, question) in COLLECTORS.items() if question and standin.calls(question)}
        assert asked == running - {"ledger", "process", "owner"}


def test_xids_are_counted_by_gpu_and_number(standin: StandIn) -> None:
    """Every XID event is counted, a restart of the sampler loses none, and a lost GPU keeps its events."""
    with sampling(driver=standin.env()) as exporter:
        standin.wait_for_call("nvmlEventSetWait_v2")
        for number, device in ((79, 1), (31, 0), (31, 0)):
            standin.xid(number, device)
        count = "device_xid_errors_total"
        page = exporter.until(lambda page: sum(page.values(count).values()) == 3, "all three events")
        assert page.value("device_xid_errors_total", gpu=0, xid=31) == 2
        assert page.value("device_xid_errors_total", gpu=1, xid=79) == 1
        assert page.value("device_xid_errors_total", gpu=1, xid=31) is None

        standin.reload_driver()
        exporter.until(lambda page: not page.up, "the driver's loss")
        page = exporter.until(lambda page: page.up, "its return")
        assert page.value("device_xid_errors_total", gpu=0, xid=31) == 2
