"""Who worked on a device, and how well it is known that somebody did not: measured situations, replayed."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.host.model import EPOCH, GIB, QUIET_CPU
from vramledger.accounting.tracker import HoldingTracker
from vramledger.accounting.work.thread_times import CpuBesideWork
from vramledger.model.reading import (
    DeviceReading,
    MemoryReading,
    ParentFacts,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    ProcessUtilization,
    Reading,
)
from vramledger.model.snapshot import Grade, Holding, State

IDLE_AFTER = 60.0
NOTHING = {
    "seconds": 1.0, "graphics": 6e-5, "sm": 0.0, "dram": 4e-6, "pcie_transmit": 4e5, "pcie_receive": 2e5,
}  # fmt: skip
"""An H200 in a second in which no kernel ran."""
MATMUL = {**NOTHING, "sm": 2e-8}
"""A second in which one 64x64 matmul ran."""
TRAINING = {**NOTHING, "sm": 0.9, "dram": 0.3}
COPIES = {**NOTHING, "pcie_receive": 64.0 * 2**20}
OFF = {"gpu": 0.0, "memory": 0.0}
SERVER = 5
"""The holder whose parent is root's control daemon of MPS."""
IDLE, LAUNCH = 0.0019, 0.0004
"""CPU seconds that an idle server took in a second on an H200, and that the smallest launch takes."""


def row(pid: int, sm: float = 0.0) -> tuple[int, float]:
    """Return what a row of the driver says: who, and how busy."""
    return pid, sm


class Device:
    """A GPU whose driver says what the test tells, once a second."""

    def __init__(self, *pids: int, kinds: str = "C") -> None:
        self.pids, self.kinds = pids, dict.fromkeys(pids, kinds)
        self.now = 0.0
        self.tracker = HoldingTracker(idle_after=IDLE_AFTER)
        self.says: dict[str, Any] = {"utilization": OFF}
        self.more_cpu = dict.fromkeys(pids, 0.0)
        self.quiet_cpu = dict.fromkeys(pids, QUIET_CPU)

    def sample(
        self,
        rows: Sequence[tuple[int, float]] | None = (),
        activity: dict[str, float] | None = None,
        *,
        after: float = 1.0,
        reading: dict[str, Any] | None = None,
        **says: Any,  # noqa: ANN401 any field of a device's reading
    ) -> dict[int, Holding]:
        """Advance; return the holdings by pid. The reading may have other fields too."""
        self.now += after
        cpu = tuple((pid, seconds + self.more_cpu[pid]) for pid, seconds in self.quiet_cpu.items())
        self.more_cpu = dict.fromkeys(self.pids, 0.0)
        clock = EPOCH + self.now
        shell = ParentFacts(400, 50, "bash", "bash", init=False)
        daemon = shell._replace(uid=0, program="nvidia-cuda-mps-control")
        told = {
            "memory": MemoryReading(80 * GIB, 40 * GIB, 40 * GIB, 0), "activity": activity,
            "processes": tuple(ProcessEntry(pid, GIB, self.kinds[pid]) for pid in self.pids),
            "process_utilization": None if rows is None else tuple(
                ProcessUtilization(pid, clock - 0.5 + place / 10, sm, 0.0, 0.0, 0.0)
                for place, (pid, sm) in enumerate(rows)
            ),
        }  # fmt: skip
        known = {
            "boot_time": 600.0, "host_pid_namespace": True, "cpu_taken": cpu,
            "devices": (DeviceReading(0, "GPU-0", **{**told, **self.says, **says}),),
            "rows": tuple(ProcessRow(pid, 100, "S", 400, 400, 400, 0, 4) for pid in self.pids),
            "facts": tuple(
                ProcessFacts(pid, 100, 7, command="python", parent=daemon if pid == SERVER else shell)
                for pid in self.pids if self.now == 1.0
            ),
        }  # fmt: skip
        (snapshot,) = self.tracker.update(Reading(clock, self.now, **{**known, **(reading or {})})).devices
        return {each.pid: each for each in snapshot.holdings}

    def watch(self, seconds: int, *args: Any, **says: Any) -> dict[int, Holding]:  # noqa: ANN401 as for a sample
        return [self.sample(*args, **says) for _ in range(seconds)][-1]


def idle_with(holding: Holding) -> Grade | None:
    """Return the grade at which a holder is idle, None when it is not."""
    return holding.grade if holding.state is State.IDLE else None


def test_a_small_kernel_every_three_seconds_is_work_whose_rows_say_0() -> None:
    """Alone, and beside five idle ones: the counters see it, and the rows of 0 % say whose it is."""
    device = Device(7, 11, 12, 13, 14, 15)
    for second in range(150):
        held = device.sample([row(7)], MATMUL if second % 3 == 0 else NOTHING)
        assert held[7].state is State.ACTIVE
    assert {idle_with(held[pid]) for pid in (11, 12, 13, 14, 15)} == {Grade.SEEN}


def test_without_rows_the_only_holder_is_the_one_that_works() -> None:
    """On a MIG instance kernels are the only holder's, or anybody's; once they stop, all are idle."""
    device = Device(7)
    for second in range(150):
        held = device.sample(None, MATMUL if second % 10 == 0 else NOTHING, utilization=None)
        assert held[7].state is State.ACTIVE
    device = Device(7, 8)
    for second in range(200):
        held = device.sample(None, MATMUL if second % 10 == 0 else NOTHING, utilization=None)
        assert held[7].state is held[8].state is State.ACTIVE
    held = device.watch(61, None, NOTHING, utilization=None)
    assert idle_with(held[7]) is idle_with(held[8]) is Grade.PROVEN


@pytest.mark.parametrize("says", [{"failed": ("activity",)}, {"gpu_instance": None, "failed": ("mig",)}])
def test_a_failed_query_of_the_counters_is_no_missing_counter(says: dict[str, Any]) -> None:
    """Only where the instance is known and the driver says so has a GPU no counters on it."""
    instance: dict[str, Any] = {"parent": "GPU-a", "gpu_instance": 1, "utilization": None}
    assert "this GPU has no GPM counters" in Device(7).sample(None, None, **instance)[7].why
    device = Device(7)
    for answer in (NOTHING, None, NOTHING, None, None):
        why = device.sample(None, answer, **{**instance, **(says if answer is None else {})})[7].why
        assert "no GPM counters" not in why
    assert why == "alive; nothing says whether it works, so it is not called idle"


def pipeline(device: Device, seconds: int, taken: dict[int, float]) -> dict[int, Holding]:
    """Let the last holder work every four seconds, and others take more CPU time then."""
    for second in range(seconds):
        burst = second % 4 == 3
        for pid, more in taken.items():
            device.more_cpu[pid] += more if burst else 0.0
        held = device.sample([row(device.pids[-1], 0.08)], TRAINING if burst else NOTHING)
    return held


def test_the_first_program_of_a_pipeline_is_not_seen_to_be_idle() -> None:
    """The rows name only the program that works after it; its CPU time says that it may work too."""
    device = Device(7, 8, 9)
    for _ in range(200):
        held = pipeline(device, 4, {7: 0.0009})
        assert idle_with(held[7]) in (None, Grade.INFERRED)
    assert idle_with(held[8]) is Grade.SEEN
    pipeline(device, 40, {})
    held = pipeline(device, 60, {})
    assert idle_with(held[7]) is Grade.INFERRED, "it has worked within the threshold"
    held = pipeline(device, 120, {})
    assert idle_with(held[7]) is Grade.SEEN


def test_cpu_time_of_work_ends_what_was_quiet_before_a_restart() -> None:
    """A restart makes no verdict harsher: the first program of a pipeline is idle since its last work."""
    device = Device(7, 8)
    assert idle_with(pipeline(device, 300, {})[7]) is Grade.SEEN
    restarted = device.tracker.fresh()
    restarted.recall(device.tracker.state)
    device.tracker = restarted
    device.now += 20
    pipeline(device, 60, {})
    pipeline(device, 300, {7: 0.0009})
    ended = EPOCH + device.now
    held = pipeline(device, 300, {})
    assert idle_with(held[7]) is Grade.SEEN
    assert held[7].since > ended - 5


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_a_first_program_that_works_in_some_bursts_is_not_seen_to_be_idle(every: int) -> None:
    """Of a pipeline's bursts the first program may take part in few, and still it works."""
    device = Device(7, 8)
    for turn in range(120):
        held = pipeline(device, 4, {7: 0.0009 if turn % every == 0 else 0.0})
        if turn >= 60:
            assert idle_with(held[7]) in (None, Grade.INFERRED)


@pytest.mark.parametrize("usual", [None, 1.0, 0.6])
def test_whose_cpu_time_says_nothing_is_not_seen_to_be_idle(usual: float | None) -> None:
    """A process whose CPU time is not known, or that spins, may launch what the rows do not name."""
    device = Device(7, 8)
    if usual is None:
        del device.quiet_cpu[7]
    else:
        device.quiet_cpu[7] = usual
    assert idle_with(pipeline(device, 400, {})[7]) is Grade.INFERRED


def test_a_chance_of_more_cpu_time_is_not_work() -> None:
    """An idle server takes more CPU time in one burst of eight, as in any other second."""
    device = Device(7, 8)
    for turn in range(100):
        held = pipeline(device, 4, {7: 0.002 if turn % 8 == 0 else 0.0})
    assert idle_with(held[7]) is Grade.SEEN


def test_a_change_of_the_runner_is_work() -> None:
    """Two programs with small work have only rows of 0 %: each change names the one that worked."""
    device = Device(7, 8, 9)
    for second in range(150):
        held = device.sample([row(7 if second % 20 < 10 else 8)], MATMUL if second % 10 == 0 else NOTHING)
        assert held[7].state is held[8].state is State.ACTIVE
    assert idle_with(held[9]) is Grade.SEEN


def test_beside_a_busy_holder_a_quiet_one_is_idle_only_by_inference() -> None:
    """A busy process has every row, so small work of another one would have none."""
    held = Device(7, 8).watch(200, [row(7, 1.0)], TRAINING, utilization={"gpu": 1.0, "memory": 0.3})
    assert held[7].state is State.ACTIVE
    assert idle_with(held[8]) is Grade.INFERRED
    assert held[8].working is None
    assert not held[8].wasted


def test_work_beside_a_burst_is_found_when_the_burst_was_long() -> None:
    """The quiet of the time after a training says nothing of the time during it."""
    device = Device(7, 8)
    device.watch(100, [row(7, 1.0)], TRAINING)
    grades = []
    for _ in range(100):
        held = device.sample([row(7)], NOTHING)
        grades.append(idle_with(held[8]))
    assert grades[:59] == [Grade.INFERRED] * 59
    assert set(grades[62:]) == {Grade.PROVEN}
    assert held[8].since >= EPOCH + 99


def test_what_is_seen_takes_the_threshold_without_anything_running() -> None:
    """Of a holder beside bursts, only the time between the bursts is evidence."""
    device = Device(7, 8)
    for second in range(150):
        busy = second % 10 == 0
        held = device.sample([row(7, 0.5 if busy else 0.0)], TRAINING if busy else NOTHING)
        if idle_with(held[8]) not in (None, Grade.INFERRED):
            break
    assert idle_with(held[8]) is Grade.SEEN
    assert device.now > IDLE_AFTER * 10 / 9


def test_kernels_that_no_row_names_are_evidence_against_nobody() -> None:
    """On a device that works without a row, with counters or without, nobody is called idle."""
    for counters in (None, TRAINING):
        device = Device(7, 8)
        for _ in range(300):
            held = device.sample([], counters, utilization={"gpu": 0.6, "memory": 0.1})
            assert held[7].state is held[8].state is State.ACTIVE
    assert "nothing says whether it works" in held[7].why


def test_without_counters_a_burst_between_two_samples_is_work() -> None:
    """The driver's samples since the last reading count, not only the newest one."""
    device = Device(7)
    for second in range(200):
        peak = 0.3 if second % 10 == 0 else 0.0
        held = device.sample([row(7)], None, utilization={**OFF, "gpu_peak": peak})
        assert held[7].state is State.ACTIVE


def test_one_sample_without_a_row_is_only_late() -> None:
    """A row may come a second after its work; that does not restart the quiet of the others."""
    device = Device(7, 8)
    for second in range(120):
        rows = [] if second % 5 == 0 else [row(7, 0.9)]
        held = device.sample(rows, TRAINING, utilization={"gpu": 0.9, "memory": 0.1})
    assert idle_with(held[8]) is Grade.INFERRED


def test_without_counters_nothing_is_better_than_inferred() -> None:
    """Before Hopper a 64x64 matmul is below 1 % and leaves no other row: quiet may be work."""
    held = Device(7, 8).watch(150, [row(7)], None)
    assert idle_with(held[7]) is idle_with(held[8]) is Grade.INFERRED


@pytest.mark.parametrize(
    "activity",
    [COPIES, {**NOTHING, "video": 0.1}, {**NOTHING, "nvlink_receive": 2.0**30}, {**NOTHING, "dram": 0.2}],
    ids=["PCIe", "video", "NVLink", "memory"],
)
def test_work_without_kernels_proves_nobody_idle(activity: dict[str, float]) -> None:
    """Copies and video do not show as kernels; a row of 0 % does not say whose they are."""
    device = Device(7, 8)
    for second in range(150):
        held = device.sample([row(8)], activity if second % 5 == 0 else NOTHING)
        assert held[7].state is State.ACTIVE
        assert idle_with(held[8]) is None


def test_a_program_that_only_copies_alone_works() -> None:
    """The only holder is the one that copies."""
    device = Device(7)
    for _ in range(200):
        assert device.sample([row(7)], COPIES)[7].last_active == EPOCH + device.now


def test_counters_that_do_not_move_prove_nothing() -> None:
    """Where none moves they are not counting; where the driver says busy, zeros do not count."""
    held = Device(7).watch(200, [row(7)], dict.fromkeys(NOTHING, 0.0) | {"seconds": 1.0})
    assert idle_with(held[7]) is Grade.INFERRED
    held = Device(7, 8).watch(200, [row(7, 0.4)], NOTHING, utilization={"gpu": 0.4, "memory": 0.0})
    assert held[7].state is State.ACTIVE
    assert idle_with(held[8]) is Grade.INFERRED


def test_a_sample_without_counters_ends_what_was_proven() -> None:
    """A counter that was not read may have missed work."""
    device = Device(7)
    device.watch(60, [row(7)], NOTHING)
    device.sample([row(7)], None)
    for _ in range(59):
        assert idle_with(device.sample([row(7)], NOTHING)[7]) is not Grade.PROVEN
    device.sample([row(7)], NOTHING)
    assert idle_with(device.sample([row(7)], NOTHING)[7]) is Grade.PROVEN


@pytest.mark.parametrize("kinds", ["CM", "C"], ids=["listed as clients", "the list is not supported"])
def test_clients_of_mps_are_not_idle_while_their_server_works(kinds: str) -> None:
    """The driver names the server in place of its clients, so any of them may have worked."""
    device = Device(SERVER, 7, 8, kinds=kinds)
    device.kinds[SERVER], device.says["mps_listed"] = "C", kinds == "CM"
    for second in range(150):
        busy = second % 10 == 0
        held = device.sample([row(SERVER, 0.3 if busy else 0.0)], TRAINING if busy else NOTHING)
        assert held[7].state is held[8].state is State.ACTIVE


def test_clients_of_mps_are_idle_when_the_device_does_nothing() -> None:
    """Counters at 0 hold for every holder."""
    device = Device(SERVER, 7, 8, kinds="CM")
    held = device.watch(61, [row(SERVER)], NOTHING)
    assert {idle_with(held[pid]) for pid in (7, 8)} == {Grade.PROVEN}


def test_a_new_holder_has_not_been_quiet_before_it_was_there() -> None:
    """What the device did not do before says nothing about a program that has just come."""
    device = Device(7)
    device.watch(200, [row(7)], NOTHING)
    device.pids, device.kinds[8] = (7, 8), "C"
    for _ in range(59):
        assert device.sample([row(7)], NOTHING)[8].state is State.ACTIVE


@pytest.mark.parametrize("length", [1.0, 3.0])
def test_a_longer_sample_has_more_cpu_time_and_no_work(length: float) -> None:
    """An idle program takes three times as much in three seconds, and is not taken for one that may work."""
    known = CpuBesideWork()
    for _ in range(20):
        known.update(IDLE * (4.0 - length), 4.0 - length, busy=False, own=False)
    for _ in range(15):
        known.update(IDLE * length, length, busy=True, own=False)
    assert known.tells(length)
    assert not known.may_work


@pytest.mark.parametrize(("quiet", "busy"), [(1.0, 1.0), (3.0, 1.0), (3.0, 3.0), (1.0, 3.0)])
def test_a_launch_stands_out_of_samples_of_any_length(quiet: float, busy: float) -> None:
    """The smallest launch in each second shows, whether the samples before were as long or not."""
    known = CpuBesideWork()
    for _ in range(20):
        known.update(IDLE * quiet, quiet, busy=False, own=False)
    for _ in range(5):
        known.update((IDLE + LAUNCH) * busy, busy, busy=True, own=False)
    assert known.may_work
