"""What doctor concludes from a reading."""

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support import builders
from tests.support.alerts.promtool import alert_names
from vramledger.agent_server.discovery import ExporterStatus
from vramledger.commands.doctor import ExporterContact, Finding, diagnose
from vramledger.model.reading import DeviceReading, MemoryReading, ProcessFacts, Reading, Scheduler
from vramledger.model.snapshot import Snapshot
from vramledger.readers.hosts.own_process import OwnRights

ROOT = OwnRights(0, frozenset({"sys_ptrace", "dac_read_search", "sys_admin"}), hidepid=False)
RUNS = dict.fromkeys(("threads", "hidden", "xid"), (True, 0.0))
FULL = DeviceReading(0, "GPU-1", processes=(), activity={}, utilization={"gpu": 0.1})
OLD = replace(FULL, index=1, uuid="GPU-2", activity=None)


def found(reading: Reading, subject: str) -> Finding:
    (finding,) = [each for each in diagnose(reading, ROOT) if each.subject == subject]
    return finding


@pytest.mark.parametrize(
    ("namespace", "good", "says"),
    [(True, True, "the host's: "), (False, False, "not the host's: "), (None, False, "not known")],
)
def test_an_unknown_namespace_is_not_called_foreign(namespace: bool | None, good: bool, says: str) -> None:
    """The PID namespace is the host's, is another, or is not known: three different findings."""
    finding = found(Reading(1.0, 1.0, host_pid_namespace=namespace), "PID namespace")
    assert finding.good is good
    assert finding.text.startswith(says)
    assert bool(finding.remedy) is not good


@pytest.mark.parametrize(
    ("message", "said", "remedy"),
    [
        ("it is not (a; b) loaded; load it", "it is not (a; b) loaded", "load it"),
        ("the sampler said nothing", "the sampler said nothing", "see the log at --log.level=debug"),
    ],
    ids=["with", "without"],
)
def test_a_failure_has_the_remedy_of_its_message(message: str, said: str, remedy: str) -> None:
    """The advice in a failure's message is the remedy, and no second one contradicts it."""
    finding = found(Reading(1.0, 1.0, failure=("no-driver", message)), "driver")
    assert (finding.text, finding.remedy) == (said, remedy)


def test_wsl_is_said() -> None:
    """In WSL2 the holders are programs of Windows; an exporter with a limit sees no more than that."""
    reading = Reading(1.0, 1.0, host_pid_namespace=False)
    found = [each for each in diagnose(reading, ROOT._replace(wsl=True)) if "WSL2" in each.text]
    assert [each.good for each in found] == [False]
    device = DeviceReading(0, "GPU-1", memory=MemoryReading(8 * 2**30, 0, 0, 0), partition=8 * 2**30)
    reading = Reading(1.0, 1.0, host_pid_namespace=True, devices=(device,))
    found = [each for each in diagnose(reading, ROOT) if "8.00 GiB" in each.text]
    assert [each.good for each in found] == [False]


def test_an_instance_with_counters_lacks_nothing() -> None:
    """A MIG instance has no utilisation on any GPU; its GPM counters say as much."""
    instance = DeviceReading(
        0, "MIG-1", name="x", parent="GPU-1", memory=MemoryReading(8, 4, 2, 2), processes=(), activity={}
    )
    counted = [each.text for each in diagnose(_with(instance), ROOT)]
    bare = [each.text for each in diagnose(_with(replace(instance, activity=None)), ROOT)]
    assert "x; tells everything" in counted
    assert "x; not reported: GPM's counters" in bare


@pytest.mark.parametrize("error", [None, "failed"])
def test_a_device_that_must_be_reset_is_a_lack(error: str | None) -> None:
    """What the driver says against a device is said in its words, with what to do."""
    device = DeviceReading(
        0, "GPU-1", name="x", error=error, words="GPU requires reset", reset_required=True, processes=()
    )
    finding = found(_with(device), "GPU 0 GPU-1")
    assert not finding.good
    assert "GPU requires reset" in finding.text
    assert "nvidia-smi --gpu-reset" in finding.remedy


def test_what_is_said_of_a_device() -> None:
    """A restart that it needs is a lack, sleep is none, and without data the driver's words are said."""
    device = DeviceReading(0, "GPU-1", name="x", hardware={"device_recovery_action": {"node_reboot": 1.0}})
    finding = found(_with(device), "GPU 0 GPU-1")
    assert (finding.good, finding.remedy) == (False, "restart the node")
    finding = found(_with(DeviceReading(0, "GPU-1", error="asleep")), "GPU 0 GPU-1")
    assert finding.good
    assert finding.text.startswith("asleep: it was not asked")
    finding = found(_with(DeviceReading(0, "GPU-1", error="failed", words="Unknown Error")), "GPU 0 GPU-1")
    assert finding.text == "gives no data: failed (Unknown Error)"


def test_an_environment_that_no_right_brings_back_is_no_lack() -> None:
    """With all rights, what a program has overwritten with its title is said, and no right is asked for."""
    reading = Reading(1.0, 1.0, facts=(ProcessFacts(7, 70, denied=("environ",)),))
    finding = found(reading, "holders")
    assert (finding.good, finding.remedy) == (True, "")
    poor = diagnose(reading, OwnRights(9, frozenset(), hidepid=False))
    assert [each.good for each in poor if "holder(s)" in each.text] == [False]


def _with(*devices: DeviceReading, **changes: Any) -> Reading:  # noqa: ANN401 any field of a reading
    return Reading(1.0, 1.0, devices=devices, **{"host_pid_namespace": True, "collectors": RUNS, **changes})


def limits(reading: Reading, snapshot: Snapshot | None = None, agents: int = 1) -> dict[str, Finding]:
    """Return what is never told, by the first alert that does not fire."""
    status = ExporterStatus(Path("/run/agent.sock"), None, agents)
    contact = ExporterContact(Path("/run/control.sock"), None, snapshot, status, ())
    found = [each for each in diagnose(reading, ROOT, contact) if each.limit]
    assert all(each.good for each in found), "a limit is no fault"
    return {each.text.rpartition(": ")[2].partition(",")[0]: each for each in found}


def test_what_is_never_told_is_said() -> None:
    """Each thing that this host lacks is said with the alerts that cannot fire, and what helps."""
    few = limits(_with(FULL, schedulers=(Scheduler("slurm", ("*",), ()),)))
    assert list(few) == ["GpuMemoryHoarded"]
    assert "a clock wakes" in few["GpuMemoryHoarded"].text
    assert "on GPU 1 (Hopper" in limits(_with(FULL, OLD))["GpuBusyWithoutWork"].text
    assert "no counters of GPM (Hopper" in limits(_with(OLD))["GpuBusyWithoutWork"].text
    assert "GpuReservedUnused" in limits(_with(FULL))
    assert "GpuHeldHardlyUsed" in limits(_with(replace(FULL, utilization=None)))
    blind = limits(_with(FULL, host_pid_namespace=False))
    assert "GpuMemoryDead" in blind
    assert "GpuMemoryHoarded" not in blind
    nothing = limits(_with(FULL, collectors={}))
    assert {"GpuHiddenHolder", "GpuXidError"} <= set(nothing)
    assert "only inferred" in nothing["GpuMemoryHoarded"].text


def test_the_exporter_speaks_for_itself() -> None:
    """What counts is what the running exporter has, not what the shell of this command could have."""
    shown = structs.replace(builders.snapshot(builders.device(0, [])), collectors=RUNS)
    assert "GpuXidError" not in limits(_with(FULL, collectors={}), shown)
    assert "GpuMemoryDead" in limits(_with(FULL), structs.replace(shown, host_pid_namespace=False))


def test_every_alert_that_is_named_exists() -> None:
    """A rule that is renamed is renamed here too."""
    reading = _with(replace(OLD, utilization=None), collectors={})
    said = [*limits(reading, agents=0).values(), *limits(replace(reading, host_pid_namespace=False)).values()]
    named = {name for each in said for name in re.findall(r"\b(?:Gpu|VramLedger)[A-Z]\w+", each.text)}
    assert len(named) > 15
    assert named <= set(alert_names())
