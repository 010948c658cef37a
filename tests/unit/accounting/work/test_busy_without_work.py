"""A device that is busy for minutes and does nothing, with a holder or without anybody."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.host.model import GIB, Process
from tests.support.host.one_holder import NOW, PID, SHELL, OneHolder
from tests.support.host.programs import Fixed
from tests.support.sure import sure
from vramledger.accounting.remembered import Remembered, follow_clock
from vramledger.accounting.sample import Sample
from vramledger.accounting.work.busy_without_work import WAITS_AFTER, Span, busy_without_work, who_keeps_busy
from vramledger.model.reading import DeviceReading, HiddenHolder, ProcessUtilization, Reading
from vramledger.model.snapshot import DeviceSnapshot, State

NOTHING = {
    "graphics": 1.0, "sm": 0.18, "integer": 0.0016, "tensor": 0.0, "fp64": 0.0, "fp32": 0.0, "fp16": 0.0,
    "dram": 0.000004, "pcie_transmit": 600_000.0, "pcie_receive": 500_000.0, "nvlink_transmit": 0.0,
    "nvlink_receive": 0.0,
}  # fmt: skip
"""A rank of a training that waits for another one which hangs."""

WAITING = DeviceReading(0, "GPU-0", utilization={"gpu": 1.0, "memory": 0.0}, activity=NOTHING)
IDLE = {"device_power_watts": 128.0, "device_power_limit_watts": 700.0}
BUSY = {"gpu": 1.0, "memory": 0.0}


class Watched:
    """A watch that is given samples a second apart, after the device has waited for some seconds."""

    def __init__(self, waiting: float | None = None) -> None:
        self.spans: dict[str, Span] = {}
        self.now = 1000.0
        if waiting is not None:
            self.after(0, WAITING)
            self.wait(waiting)

    def wait(self, seconds: float) -> float | None:
        """Give it a sample of the waiting device every five seconds."""
        for _ in range(round(seconds / 5)):
            said = self.after(5, WAITING)
        return said

    def after(
        self, seconds: float, device: DeviceReading, *, gap: bool = False, in_turns: bool = False
    ) -> float | None:
        """Return for how many seconds the device has been busy without work, None if it is not said."""
        self.now += seconds
        sample = Sample(Reading(self.now + 5e8, self.now), {}, 5.0, gap)
        since = busy_without_work(self.spans, device, sample, in_turns=in_turns)
        return None if since is None else sample.time - since


def active(**figures: float) -> DeviceReading:
    """Return the device that waits, with other figures."""
    return replace(WAITING, activity={**NOTHING, **figures})


def test_said_after_minutes() -> None:
    """A collective that hangs is said to be busy without work after minutes, with the time since it began."""
    watched = Watched()
    assert watched.after(0, WAITING) is None
    assert watched.wait(WAITS_AFTER - 5) is None
    assert watched.after(5, WAITING) == WAITS_AFTER
    assert watched.wait(1000) == WAITS_AFTER + 1000


@pytest.mark.parametrize(
    "work",
    [
        active(tensor=0.94, dram=0.24, integer=0.014),  # a matmul
        active(dram=0.97, integer=0.073),  # filling memory
        active(fp32=0.7, nvlink_transmit=7.67e9),  # a training on two GPUs
        active(nvlink_receive=5e6),  # a collective that goes on slowly
        active(fp64=0.001),
        active(video=0.01),
        active(integer=0.3),  # cryptography
        active(sm=0.0076, integer=0.0071),  # the same in one block
        active(sm=0.0076, integer=0.00081),  # and in one thread
        replace(WAITING, utilization={"gpu": 0.5, "memory": 0.0}),  # small kernels, one after the other
        replace(WAITING, error="timeout", activity=None),
    ],
)
def test_work_ends_it(work: DeviceReading) -> None:
    """One sample with any work, or of a device that does not answer, begins the time again."""
    watched = Watched()
    watched.after(0, WAITING)
    assert watched.wait(WAITS_AFTER) is not None
    assert watched.after(1, work) is None
    assert watched.after(1, WAITING) is None
    assert watched.wait(WAITS_AFTER - 5) is None


KILLED = active(dram=0.002563, pcie_transmit=2.54e6, pcie_receive=2.41e6)
"""Beside the waiting rank a program of 8 GiB was killed, and the driver cleared its memory."""

INITIALISED = active(pcie_transmit=6.57e6, pcie_receive=3.96e6)
"""A launcher initialised CUDA on the host."""


@pytest.mark.parametrize("movement", [KILLED, INITIALISED])
def test_programs_that_come_and_go_do_not_end_it(movement: DeviceReading) -> None:
    """A short movement every two minutes, without any computation, does not begin the time again."""
    watched = Watched(WAITS_AFTER - 5)
    for _ in range(20):
        assert watched.after(5, movement) is not None
        assert watched.wait(115) is not None
    assert watched.after(5, WAITING) == WAITS_AFTER + 20 * 120


def test_movement_that_lasts_ends_it() -> None:
    """Data that arrive for longer than a moment, or every few seconds, are work."""
    watched = Watched(600)
    assert [watched.after(4, INITIALISED) is not None for _ in range(3)] == [True, True, False]
    assert watched.after(4, WAITING) is None
    watched = Watched(600)
    assert None in [watched.after(1, INITIALISED if second % 5 == 0 else WAITING) for second in range(200)]


def test_a_sample_without_counters_changes_nothing() -> None:
    """The counters of the next sample cover the time of one that has none."""
    watched = Watched(WAITS_AFTER)
    missing = replace(WAITING, activity=None)
    assert watched.after(5, missing) == WAITS_AFTER + 5
    assert watched.after(5, missing) is None, "counters that stay away say nothing"
    assert watched.after(5, WAITING) is None


def test_when_nothing_is_said() -> None:
    """After missing samples, without counters, of what only moves memory or is gone."""
    assert Watched(WAITS_AFTER).after(60, WAITING, gap=True) is None
    watched = Watched()
    assert [watched.after(5, replace(WAITING, activity=None)) for _ in range(50)] == [None] * 50
    watched = Watched(WAITS_AFTER)
    watched.spans = follow_clock(Remembered(waits=watched.spans), 3600).waits
    assert watched.after(0, WAITING) == WAITS_AFTER - 3600
    watched = Watched()
    assert [watched.after(5, KILLED) for _ in range(50)] == [None] * 50


IN_TURNS = active(dram=0.002135, pcie_transmit=2.14e7, pcie_receive=6.08e7)
"""The ranks of four jobs wait on one H100, which runs them in turns."""


def test_one_that_computes_in_turns_with_one_that_waits() -> None:
    """A block of threads that computes with integers on one SM for a quarter of the time is work."""
    shares = {"sm": 0.75 * 0.18 + 0.25 / 132, "integer": 0.75 * 0.18 * 0.008 + 0.25 / 132 * 0.93}
    watched = Watched()
    assert {watched.after(5, active(**shares), in_turns=True) for _ in range(50)} == {None}


@pytest.mark.parametrize("name", ["tensor", "fp64", "fp32", "fp16", "pcie_receive", "integer", "dram", "sm"])
def test_a_figure_that_is_missing_says_nothing(name: str) -> None:
    """A device of which a figure cannot be read is never called busy without work."""
    less = replace(WAITING, activity={key: value for key, value in NOTHING.items() if key != name})
    watched = Watched()
    assert {watched.after(5, less) for _ in range(50)} == {None}


@pytest.mark.parametrize(("in_turns", "said"), [(True, WAITS_AFTER + 5), (False, None)])
def test_turns_move_something(in_turns: bool, said: float | None) -> None:
    """What turns move counts as nothing where several processes keep a device busy, else as work."""
    watched = Watched()
    times = round(WAITS_AFTER / 5) + 2
    assert [watched.after(5, IN_TURNS, in_turns=in_turns) for _ in range(times)][-1] == said


def test_work_in_turns_ends_it() -> None:
    """Programs that compute, or copy fast, in turns with one that waits end it."""
    for work in (active(fp32=0.01), active(dram=0.02), active(pcie_receive=1e9)):
        watched = Watched()
        assert [watched.after(5, work, in_turns=True) for _ in range(50)] == [None] * 50


@pytest.mark.parametrize(
    ("shares", "busy"),
    [
        *(({1: 1.0}, {1}), ({1: 0.4}, set()), ({1: 0.28, 2: 0.17, 3: 0.22, 4: 0.33}, {1, 2, 3, 4})),
        *(({1: 0.95, 2: 0.02}, {1}), ({1: 0.9, 2: 0.1}, {1}), ({1: 0.5, 2: 0.45, 3: 0.0}, {1, 2})),
        ({}, set()),
    ],
)
def test_who_keeps_a_device_busy(shares: dict[int, float], busy: set[int]) -> None:
    """One alone has half of the time at least, several have half of an equal part each."""
    assert who_keeps_busy(shares) == busy


@pytest.fixture
def hung() -> OneHolder:
    """Return a host whose only holder waits in a collective."""
    host = OneHolder()
    host.driver_says(utilization=BUSY, activity=NOTHING)
    return host


def test_the_holder_says_it(hung: OneHolder) -> None:
    """The holder of a device that does nothing says it as evidence, with its beginning; it stays active."""
    assert hung.watch(100).busy_without_work_since is None
    holding = hung.watch(100)
    assert (holding.state, holding.busy_without_work_since) == (State.ACTIVE, NOW + 1)
    assert holding.why.startswith("busy without work for 199 s: ")


def test_work_of_the_holder_ends_it(hung: OneHolder) -> None:
    """When the collective goes on, nothing is said any more."""
    hung.watch(200)
    hung.driver_says(activity={**NOTHING, "fp32": 0.7, "dram": 0.1})
    assert hung.holding().busy_without_work_since is None


def test_only_who_keeps_it_busy_says_it(hung: OneHolder) -> None:
    """Of several holders only the one that the driver names as busy says it: the others do nothing."""
    idle = Process(8, {0: Fixed(GIB)}, begin=-900.0, framework="", starter=SHELL)
    hung.host.processes = [*hung.host.processes, idle]
    for _ in range(200):
        row = ProcessUtilization(PID, NOW + hung.now + 0.5, 1.0, 0.0, 0.0, 0.0)
        hung.driver_says(process_utilization=(row,))
        (device,) = hung.sample().devices
    said = {holding.pid: holding.busy_without_work_since is not None for holding in device.holdings}
    assert said == {PID: True, 8: False}


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
    assert watch(host, 190).ghost is False


def test_a_device_with_a_listed_or_hidden_holder_is_no_ghost() -> None:
    """One thread that spins keeps a GPU busy at idle power; somebody is there."""
    host = OneHolder()
    host.driver_says(utilization=BUSY, hardware=IDLE)
    assert watch(host, 190).ghost is False
    host = ghostly()
    assert watch(host, 190, hidden=(HiddenHolder(9, 900, "cuda", "python", "ada", (0,)),)).ghost is False


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        ({"hardware": {}}, {}), ({"utilization": None}, {}), ({"processes": None}, {}),
        ({}, {"hidden": None}), ({}, {"host_pid_namespace": None}),
    ],
    ids=["power", "utilisation", "processes", "hidden", "namespace"],
)  # fmt: skip
def test_a_source_is_missing_for_a_ghost(says: dict[str, Any], changes: dict[str, Any]) -> None:
    """A ghost is a contradiction between five sources; with four there is none to see."""
    host = ghostly()
    host.driver_says(**says)
    assert watch(host, 190, **changes).ghost is None


def test_a_single_quiet_sample_begins_the_three_minutes_anew() -> None:
    """The device must have been busy in every sample."""
    host = ghostly()
    watch(host, 170)
    host.driver_says(utilization={"gpu": 0.0, "memory": 0.0})
    watch(host, 1)
    host.driver_says(utilization=BUSY)
    assert watch(host, 170).ghost is False
