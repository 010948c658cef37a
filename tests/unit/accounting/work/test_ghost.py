"""A ghost device: busy for minutes at idle power, without anybody who could keep it busy."""

from typing import Any

import pytest

from tests.support.host.one_holder import OneHolder
from tests.support.sure import sure
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot

IDLE = {"device_power_watts": 128.0, "device_power_limit_watts": 700.0}
BUSY = {"gpu": 1.0, "memory": 0.0}


def ghostly() -> OneHolder:
    """Return a host whose only GPU is busy at idle power, without a process."""
    host = OneHolder()
    host.driver_says(processes=(), utilization=BUSY, hardware=IDLE)
    return host


def watch(host: OneHolder, seconds: int, **changes: Any) -> DeviceSnapshot:  # noqa: ANN401 any field of a reading
    """Sample once a second and return the last state of the device."""
    changes = {"hidden": (), **changes}
    return [host.sample(**changes) for _ in range(seconds)][-1].devices[0]


def test_a_device_that_is_busy_without_anybody_is_a_ghost_after_three_minutes() -> None:
    """Before that it may be a holder that has just ended; then the time is that of the first such sample."""
    host = ghostly()
    assert watch(host, 180).ghost is False
    device = watch(host, 1)
    assert device.ghost is True
    assert watch(host, 50).ghost_since == sure(device.ghost_since)


@pytest.mark.parametrize(
    "healthy",
    [{"hardware": IDLE | {"device_power_watts": 300.0}}, {"utilization": {"gpu": 0.1, "memory": 0.0}}],
    ids=["power", "utilisation"],
)
def test_a_device_that_does_real_work_or_none_is_no_ghost(healthy: dict[str, Any]) -> None:
    """Power of work, or little utilisation, contradicts nothing."""
    host = ghostly()
    host.driver_says(**healthy)
    assert watch(host, 400).ghost is False


def test_a_device_with_a_listed_or_hidden_holder_is_no_ghost() -> None:
    """One thread that spins keeps a GPU busy at idle power; somebody is there."""
    host = OneHolder()
    host.driver_says(utilization=BUSY, hardware=IDLE)
    assert watch(host, 400).ghost is False
    host = ghostly()
    hidden = HiddenHolder(9, 900, "cuda", "python", "ada", (0,))
    assert watch(host, 400, hidden=(hidden,)).ghost is False


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        ({"hardware": {}}, {}),
        ({"utilization": None}, {}),
        ({"processes": None}, {}),
        ({}, {"hidden": None}),
        ({}, {"host_pid_namespace": None}),
    ],
    ids=["power", "utilisation", "processes", "hidden", "namespace"],
)
def test_a_source_is_missing_for_a_ghost(says: dict[str, Any], changes: dict[str, Any]) -> None:
    """A ghost is a contradiction between five sources; with four there is none to see."""
    host = ghostly()
    host.driver_says(**says)
    assert watch(host, 400, **changes).ghost is None


def test_a_single_quiet_sample_begins_the_three_minutes_anew() -> None:
    """The device must have been busy in every sample."""
    host = ghostly()
    watch(host, 170)
    host.driver_says(utilization={"gpu": 0.0, "memory": 0.0})
    watch(host, 1)
    host.driver_says(utilization=BUSY)
    assert watch(host, 170).ghost is False
