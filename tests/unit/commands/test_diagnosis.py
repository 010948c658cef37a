"""What doctor concludes from a reading."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vramledger.commands.diagnosis import Finding, diagnose
from vramledger.model.reading import DeviceReading, MemoryReading, Reading
from vramledger.readers.own_rights import OwnRights

ROOT = OwnRights(0, frozenset({"sys_ptrace", "dac_read_search", "sys_admin"}), hidepid=False)


def found(reading: Reading, subject: str) -> Finding:
    """Return the one finding about a subject."""
    (finding,) = [each for each in diagnose(reading, ROOT) if each.subject == subject]
    return finding


@pytest.mark.parametrize(
    ("namespace", "good", "says"),
    [(True, True, "the host's: "), (False, False, "not the host's: "), (None, False, "not known")],
)
def test_a_namespace_that_is_not_known_is_not_called_foreign(
    namespace: bool | None, good: bool, says: str
) -> None:
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
    """In WSL2 no other PID namespace would help: the holders are programs of Windows."""
    reading = Reading(1.0, 1.0, host_pid_namespace=False)
    found = [each for each in diagnose(reading, ROOT._replace(wsl=True)) if "WSL2" in each.text]
    assert [each.good for each in found] == [False]


def test_an_exporter_in_a_partition_is_said() -> None:
    """NVML shows an exporter with a limit of its own no more than that, which is a lack."""
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
    assert any("--collector.launches" in each for each in bare)


def _with(device: DeviceReading) -> Reading:
    return Reading(1.0, 1.0, host_pid_namespace=True, devices=(device,))
