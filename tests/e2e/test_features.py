"""What flags and hardware change on the page: MIG, collectors, XIDs, the limit on processes, the ledger."""

import pytest

from tests.support.exporter import QUICK, serving
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, StandIn
from vramledger.config import ALWAYS_COLLECTED

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
