"""A driver that is missing, disappears, returns or loses a GPU: only the data that depends on it is gone."""

import json
from pathlib import Path

from tests.support.exporter import QUICK, Exporter, entries, no_driver, serving
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, MIB, Code, StandIn

RESERVED = 644_939_776
TOTAL = 143_771 * MIB


def errors(exporter: Exporter) -> list[tuple[str, str]]:
    """Return the reason and advice of every error that an ended exporter has logged."""
    logged = entries(exporter.ended.log)
    return [(entry["reason"], entry["err"]) for entry in logged if entry["level"] == "error"]


def test_no_library_then_one(standin: StandIn, tmp_path: Path) -> None:
    """A host without a driver is healthy and serves ``up 0``; a driver that is installed later is found."""
    place = tmp_path / "lib"
    with serving(*QUICK, driver={**standin.env(), **no_driver(place)}) as exporter:
        page = exporter.until(lambda page: page.failures("no-library") >= 1, "a counted failure")
        assert not page.up
        assert page.values("collector_success") == {(("collector", "exporter"),): 1}
        assert exporter.get("/-/healthy") == (200, "vramledger is healthy.\n")
        assert exporter.get("/-/ready") == (200, "vramledger is ready.\n")
        assert json.loads(exporter.get("/api/v1/ledger")[1])["failure"]["reason"] == "no-library"

        (place / "libnvidia-ml.so.1").unlink()
        (place / "libnvidia-ml.so.1").symlink_to(standin.library)
        page = exporter.until(lambda page: page.up, "the data of the new driver")
        assert page.failures("no-library") >= 1
    ((reason, advice),) = errors(exporter)
    assert reason == "no-library"
    assert "install the NVIDIA driver" in advice


def test_a_driver_reload_leaves_no_old_data(standin: StandIn, stage: Stage) -> None:
    """After a reload of the driver there is first no data and then the new driver's; never the old data."""
    pid = stage.start().pid
    standin.device(0).set_processes([(pid, 3 * GIB)])
    with serving(*QUICK, driver=standin.env()) as exporter:
        before = exporter.until(lambda page: page.up, "the data")
        assert before.ledger(0)["active"] == 3 * GIB
        old = exporter.sampler

        standin.device(0).set_processes([(pid, 1 * GIB)])
        standin.driver_error = Code.DRIVER_NOT_LOADED  # unloaded
        standin.reload_driver()
        down = exporter.until(lambda page: not page.up, "the loss to be noticed")
        assert down.failures("driver-lost") == 1
        exporter.until(lambda page: page.failures("no-driver"), "the restarted sampler to find no driver")
        standin.driver_error = Code.SUCCESS  # and loaded again

        after = exporter.until(lambda page: page.up, "the data of the new driver")
        assert after.ledger(0)["active"] == 1 * GIB
        assert after.value("process_memory_peak_bytes", pid=pid) == 3 * GIB, "the peak was real"
        assert exporter.sampler != old
    assert [reason for reason, _ in errors(exporter)] == ["driver-lost", "no-driver"]


def test_a_lost_gpu_costs_itself(standin: StandIn, stage: Stage) -> None:
    """A GPU that falls off the bus is down; the ledger of the other GPU stays exact and current."""
    here, there = stage.start().pid, stage.start().pid
    standin.device(0).set_processes([(here, 3 * GIB)])
    standin.device(1).set_processes([(there, 5 * GIB)])
    with serving(*QUICK, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.device_up(0) == page.device_up(1) == 1, "both GPUs")

        standin.device(1).lost = True
        page = exporter.until(lambda page: page.device_up(1) == 0, "the loss")
        assert page.up
        assert page.device_up(0) == 1
        assert page.state(there) is None
        assert page.value("process_info", pid=there) is None

        standin.device(0).set_processes([(here, 4 * GIB)])
        standin.device(0).set_memory(unattributed=MIB)
        page = exporter.next_sample()
        assert page.ledger(0) == {
            "active": 4 * GIB,
            "driver_reserved": RESERVED,
            "unattributed": MIB,
            "free": TOTAL - RESERVED - 4 * GIB - MIB,
        }
        assert page.value("collector_success", collector="ledger") == 0

        standin.device(1).lost = False
        page = exporter.until(lambda page: page.device_up(1) == 1, "its return")
        assert page.ledger(1)["active"] == 5 * GIB
        assert sum(page.failures(reason) for reason in page.labels("sample_failures_total", "reason")) == 0


def test_a_gpu_plugged_out_and_others_in(standin: StandIn) -> None:
    """A GPU that the driver no longer lists is down and stays known; a GPU that is added is found."""
    with serving(*QUICK, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.device_up(1) == 1, "both GPUs")
        old = exporter.sampler
        standin.device_count = 1
        page = exporter.until(lambda page: page.device_up(1) == 0, "the unplugging to be noticed")
        assert page.device_up(0) == 1
        standin.device_count = 3
        page = exporter.until(lambda page: page.device_up(2) == 1, "the third GPU")
        assert (page.device_up(0), page.device_up(1)) == (1, 1)
        assert exporter.sampler != old
        assert sum(page.failures(reason) for reason in page.labels("sample_failures_total", "reason")) == 0
