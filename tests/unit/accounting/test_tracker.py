"""Readings in, snapshots out: what is remembered between samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.reading import (
    DeviceReading,
    HiddenHolder,
    MemoryReading,
    ParentFacts,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    ProcessUtilization,
    Reading,
    XidEvent,
)
from vramledger.model.snapshot import Holding, Snapshot, State

GIB = 1024**3
UUID = "GPU-0"
START = 10_000  # ticks: 100 s after boot
NOW = 1_000_000.0
SHELL = ParentFacts(400, 50, "bash", "bash", init=False)
FREE_69 = MemoryReading(80 * GIB, 69 * GIB, 10 * GIB, 1 * GIB)


class Host:
    """A GPU with one holder, to be changed from sample to sample."""

    def __init__(self) -> None:
        """Boot 1,000 s before the first sample; the holder is a shell's job."""
        self.tracker = HoldingTracker(idle_after=10.0)
        self.clock = 0.0
        self.row: ProcessRow | None = ProcessRow(7, START, "S", 400, 7, 400, 0, 1)
        self.parent: ParentFacts | None = SHELL
        self.unseen: dict[int, str] = {}
        self.device = DeviceReading(
            0,
            UUID,
            minor=0,
            memory=FREE_69,
            processes=(ProcessEntry(7, 10 * GIB, "C"),),
            utilization={"gpu": 0.5, "memory": 0.1},
            process_utilization=(),
        )
        self.told: tuple[int, int] | None = None

    def reading(self, **changes: Any) -> Reading:  # noqa: ANN401 any field of a reading
        """Return the reading of this moment, with facts when the sampler would send them."""
        facts: tuple[ProcessFacts, ...] = ()
        if self.row is not None and self.told != (self.row.start, self.row.ppid):
            self.told = (self.row.start, self.row.ppid)
            facts = (ProcessFacts(7, self.row.start, user="ann", parent=self.parent, leader_alive=True),)
        reading = Reading(
            time=NOW + self.clock,
            monotonic=self.clock,
            boot_time=NOW - 1000,
            host_pid_namespace=True,
            devices=(self.device,),
            rows=() if self.row is None else (self.row,),
            unseen=self.unseen,
            facts=facts,
        )
        return replace(reading, **changes)

    def sample(self, after: float = 1.0, **changes: Any) -> Snapshot:  # noqa: ANN401
        """Let time pass and take a sample."""
        self.clock += after
        return self.tracker.update(self.reading(**changes))

    def set(self, **changes: Any) -> None:  # noqa: ANN401 any field of a device's reading
        """Change what the driver says of the device."""
        self.device = replace(self.device, **changes)

    def holding(self, after: float = 1.0) -> Holding:
        """Take a sample and return the only holding."""
        (device,) = self.sample(after).devices
        (holding,) = device.holdings
        return holding

    def watch(self, seconds: int) -> Holding:
        """Sample once a second and return the last holding."""
        for _ in range(seconds - 1):
            self.sample()
        return self.holding()


def busy(at: float, sm: float = 0.4) -> tuple[ProcessUtilization, ...]:
    """Return the driver's sample of pid 7."""
    return (ProcessUtilization(7, at, sm, 0.1, 0.0, 0.0),)


class TestIdle:
    """Idle only on evidence that lasted."""

    def test_quiet_with_evidence_becomes_idle(self) -> None:
        """Without any sign of work a holding is idle after the threshold, since its last sign."""
        host = Host()
        assert host.watch(10).state is State.ACTIVE

        holding = host.holding()

        assert holding.state is State.IDLE
        assert holding.since == NOW + 1
        assert holding.last_active is None

    def test_a_failed_question_is_never_idleness(self) -> None:
        """Where utilisation cannot be asked, nobody is idle, however long."""
        host = Host()
        host.set(process_utilization=None)

        assert host.watch(100).state is State.ACTIVE

    def test_one_failed_question_starts_the_quiet_anew(self) -> None:
        """A single unanswered sample breaks the chain of evidence."""
        host = Host()
        host.watch(9)
        host.set(process_utilization=None)
        host.sample()
        host.set(process_utilization=())

        assert host.watch(9).state is State.ACTIVE
        assert host.watch(1).state is State.IDLE

    def test_a_device_that_does_nothing_is_evidence_for_all(self) -> None:
        """Device utilisation of exactly 0 replaces the per-process question."""
        host = Host()
        host.set(process_utilization=None, utilization={"gpu": 0.0, "memory": 0.0})

        assert host.watch(12).state is State.IDLE

    def test_a_client_of_mps_is_not_idle_without_samples(self) -> None:
        """Under MPS the driver books work on the server, so silence about a client means nothing."""
        host = Host()
        host.set(processes=(ProcessEntry(7, 10 * GIB, "CM"),))

        assert host.watch(100).state is State.ACTIVE

    def test_changing_bytes_are_work(self) -> None:
        """A holding whose bytes change is not idle, whatever utilisation says."""
        host = Host()
        holding = host.holding()
        for step in range(30):
            host.set(processes=(ProcessEntry(7, 9 * GIB - step % 2, "C"),))
            holding = host.holding()

        assert holding.state is State.ACTIVE
        assert holding.last_active == NOW + 31

    def test_work_ends_idleness(self) -> None:
        """A utilisation sample makes an idle holding active at once, since now."""
        host = Host()
        assert host.watch(15).state is State.IDLE
        host.set(process_utilization=busy(NOW + 16))

        holding = host.holding()

        assert holding.state is State.ACTIVE
        assert holding.since == NOW + 16
        assert holding.last_active == NOW + 16
        assert holding.sm == 0.4

    def test_a_sample_of_zero_is_no_work(self) -> None:
        """The driver's own 0 is shown as 0 and is not a sign of work."""
        host = Host()
        holding = host.holding()
        for second in range(2, 13):
            host.set(process_utilization=(ProcessUtilization(7, NOW + second, 0.0, 0.0, 0.0, 0.0),))
            holding = host.holding()

        assert holding.state is State.IDLE
        assert holding.sm == 0.0

    def test_a_gap_in_the_samples_starts_the_quiet_anew(self) -> None:
        """Nobody watched during a gap, so the quiet is not known to have lasted."""
        host = Host()
        host.watch(9)

        assert host.holding(after=60).state is State.ACTIVE

    def test_an_old_utilisation_sample_is_not_shown_as_new(self) -> None:
        """A utilisation sample is shown for a moment only, then it is unknown again."""
        host = Host()
        host.set(process_utilization=busy(NOW + 1))
        assert host.holding().sm == 0.4
        host.set(process_utilization=())

        assert host.watch(2).sm == 0.4
        assert host.watch(1).sm is None


class TestWatching:
    """Old and missing answers are not evidence."""

    def test_a_device_that_did_not_answer_was_not_watched(self) -> None:
        """While one GPU is silent the other's samples are no evidence of quiet for it."""
        host = Host()
        other = replace(host.device, uuid="GPU-1", index=1, processes=())
        host.set(process_utilization=busy(NOW + 1))
        host.sample(devices=(host.device, other))
        silent = host.device.without_data("timeout")
        for _ in range(60):
            host.sample(devices=(silent, other))
        host.set(process_utilization=())

        (holding,) = host.sample(devices=(host.device, other)).devices[0].holdings

        assert holding.state is State.ACTIVE

    def test_a_utilisation_sample_ages_though_the_clock_is_set_back(self) -> None:
        """After a clock step backwards an old sample is not fresh for an hour."""
        host = Host()
        host.set(process_utilization=busy(NOW + 1))
        host.sample()
        host.set(process_utilization=())
        (device,) = host.sample(after=5.0, time=NOW - 3600).devices

        assert device.holdings[0].sm is None

    def test_bytes_that_become_unknown_are_no_work(self) -> None:
        """A figure that is missing for a sample, and comes back the same, is no sign of work."""
        host = Host()
        host.watch(5)
        host.set(processes=(ProcessEntry(7, None, "C"),))
        host.sample()
        host.set(processes=(ProcessEntry(7, 10 * GIB, "C"),))

        assert host.holding().last_active is None

    def test_facts_that_come_late_count_from_the_start(self) -> None:
        """A read that hung at first sight and came back replaces what could not be told."""
        host = Host()
        row = ProcessRow(7, START, "S", 500, 7, 7, 0, 1)
        host.row = row
        parent = ParentFacts(500, 60, "python3", "train.py", init=False)
        outline = ProcessFacts(7, START, parent=parent, denied=("environ",))
        host.sample(facts=(outline,))
        host.sample(facts=(replace(outline, denied=()),))
        host.row = row._replace(ppid=1)

        snapshot = host.sample(facts=(replace(outline, parent=None, denied=()),))

        assert snapshot.devices[0].holdings[0].state is State.ACTIVE  # a daemon: nothing says worker


class TestIdentity:
    """A process is its pid and its start time."""

    YOUNGER = ProcessRow(7, 100_350, "S", 400, 7, 400, 0, 1)
    """Started 3.5 s after the first sample."""

    def test_a_reused_pid_is_a_new_holder(self) -> None:
        """Another process under the same pid starts with its own peak and its own since."""
        host = Host()
        host.watch(3)
        host.row = self.YOUNGER
        host.set(processes=(ProcessEntry(7, 2 * GIB, "C"),))

        holding = host.holding()

        assert holding.peak == 2 * GIB
        assert holding.state is State.ACTIVE
        assert holding.start == 100_350

    def test_bytes_that_outlive_their_process_stay_dead_under_a_reused_pid(self) -> None:
        """The same bytes under a pid that now belongs to a younger process are the dead one's."""
        host = Host()
        host.watch(3)
        host.row = self.YOUNGER

        assert host.holding().state is State.DEAD
        assert host.watch(5).state is State.DEAD
        assert 7 not in {pid for pid, each in host.sample().processes.items() if each.start_time > NOW}

    def test_a_process_that_dies_keeps_its_peak(self) -> None:
        """The dead holder is the same holder, with the peak that it had."""
        host = Host()
        host.watch(2)
        host.row = None
        host.unseen = {7: "gone"}
        host.set(processes=(ProcessEntry(7, 1 * GIB, "C"),))

        holding = host.holding()

        assert holding.state is State.DEAD
        assert holding.peak == 10 * GIB
        assert holding.since == NOW + 3

    def test_a_process_that_dies_keeps_its_name(self) -> None:
        """Whose the bytes of a dead holder are is still known, until the driver lets go of them."""
        host = Host()
        host.watch(2)
        alive = host.sample().processes[7]
        host.row = None
        host.unseen = {7: "gone"}

        assert host.sample().processes[7] == alive

        host.set(processes=())
        assert host.sample().processes == {}

    def test_an_orphan_seen_from_the_start(self) -> None:
        """The parent of the first sight is remembered, and its end makes the orphan."""
        host = Host()
        host.parent = ParentFacts(500, 60, "python3", "train.py", init=False)
        row = ProcessRow(7, START, "S", 500, 500, 400, 0, 1)
        host.row = row
        assert host.watch(2).state is State.ACTIVE
        host.row = row._replace(ppid=1)
        host.parent = ParentFacts(1, 1, "systemd", "systemd", init=True)

        holding = host.holding()

        assert holding.state is State.ORPHANED
        assert "train.py (pid 500)" in holding.why
        assert holding.since == NOW + 3
        assert host.watch(5).since == NOW + 3

    def test_an_active_holding_is_as_old_as_its_process(self) -> None:
        """What is active at first sight has been so since its process started, for all anybody knows."""
        assert Host().holding().since == NOW - 1000 + 100


class TestDevices:
    """What is published of devices, and when nothing is."""

    def test_a_failed_sample_publishes_no_device(self) -> None:
        """After a failure there is no data of the sample before."""
        host = Host()
        host.sample()

        snapshot = host.sample(failure=("driver-lost", "gone"), devices=())

        assert not snapshot.up
        assert snapshot.devices == ()
        assert snapshot.failures["driver-lost"] == 1
        assert host.sample().up

    def test_no_device_that_answers_is_a_failed_sample(self) -> None:
        """When every device is silent, the sample as a whole has failed."""
        host = Host()
        host.set(error="timeout", memory=None, processes=None)

        assert (host.sample().failure or ("",))[0] == "timeout"

    def test_a_lost_device_costs_only_itself(self) -> None:
        """One lost device is down without data, the other has its ledger."""
        host = Host()
        other = replace(host.device, uuid="GPU-1", index=1)
        host.sample(devices=(host.device, other))

        gone = replace(host.device, error="lost", memory=None, processes=None)
        lost, fine = host.sample(devices=(gone, other)).devices

        assert (lost.up, fine.up) == (False, True)
        assert lost.ledger is None
        assert lost.holdings == ()
        assert fine.ledger is not None

    def test_a_device_that_vanishes_is_down(self) -> None:
        """A GPU that the driver no longer lists stays known and is down."""
        host = Host()
        other = replace(host.device, uuid="GPU-1", index=1)
        host.sample(devices=(host.device, other))

        devices = host.sample(devices=(host.device,)).devices

        assert [(each.reading.uuid, each.up) for each in devices] == [(UUID, True), ("GPU-1", False)]

    def test_a_device_that_vanished_tells_nothing_old(self) -> None:
        """Of a missing GPU only its identity is left."""
        host = Host()
        other = replace(host.device, uuid="GPU-1", index=1)
        host.sample(devices=(host.device, other))

        missing = host.sample(devices=(host.device,)).devices[1].reading

        assert missing == other.without_data("missing")

    def test_a_gpu_lost_at_a_restart_keeps_its_identity(self) -> None:
        """A GPU that a fresh sampler cannot even name is the one that is missing at its index."""
        host = Host()
        other = replace(host.device, uuid="GPU-1", index=1)
        host.sample(devices=(host.device, other))
        nameless = DeviceReading(1, "GPU-unknown-1", error="lost")

        devices = host.sample(devices=(host.device, nameless)).devices

        assert [(each.reading.uuid, each.up) for each in devices] == [(UUID, True), ("GPU-1", False)]

    def test_nothing_piles_up_while_a_device_is_lost(self) -> None:
        """Short-lived holders on one GPU are forgotten though another one does not answer."""
        host = Host()
        other = replace(host.device, uuid="GPU-1", index=1, processes=())
        host.sample(devices=(host.device, other))
        lost = other.without_data("lost")
        for pid in range(100, 200):
            host.sample(
                devices=(replace(host.device, processes=(ProcessEntry(pid, GIB, "C"),)), lost),
                rows=(ProcessRow(pid, START, "S", 400, pid, 400, 0, 1),),
                facts=(ProcessFacts(pid, START),),
            )

        assert len(host.tracker._processes) == 1  # noqa: SLF001 what it must not remember

    def test_a_destroyed_instance_is_forgotten(self) -> None:
        """A MIG instance that goes while its GPU answers was destroyed on purpose."""
        host = Host()
        parent = DeviceReading(0, UUID, divided=True)
        instance = replace(host.device, uuid="MIG-1", parent=UUID)
        assert len(host.sample(devices=(parent, instance)).devices) == 2

        assert [each.reading.uuid for each in host.sample(devices=(parent,)).devices] == [UUID]

    @pytest.mark.parametrize("question", ["processes", "memory"])
    def test_without_what_the_book_needs_the_device_is_down(self, question: str) -> None:
        """When NVML fails to say who holds, or how much there is, used is not called unattributed."""
        host = Host()
        host.set(failed=(question,), **{question: None})

        (device,) = host.sample().devices

        assert not device.up
        assert device.reading.error == "failed"
        assert device.ledger is None

    def test_a_device_that_has_no_memory_of_its_own_is_up(self) -> None:
        """A question that is not supported has not failed: unified memory has no ledger, and is up."""
        host = Host()
        host.set(memory=None)

        (device,) = host.sample().devices

        assert device.up
        assert device.ledger is None

    def test_bytes_that_the_driver_does_not_tell_are_not_zero(self) -> None:
        """A holder without a figure has none, and the used bytes stay unattributed."""
        host = Host()
        host.set(processes=(ProcessEntry(7, None, "C"),))

        (device,) = host.sample().devices

        assert device.holdings[0].memory is None
        assert device.holdings[0].peak is None
        assert device.ledger is not None
        assert device.ledger.unattributed == 10 * GIB

    def test_what_nobody_may_see_is_unknown_and_not_unattributed(self) -> None:
        """Outside the host's PID namespace NVML lists nobody: used bytes have holders that we cannot see."""
        host = Host()
        host.row = None
        host.set(processes=())

        (device,) = host.sample(host_pid_namespace=False).devices

        assert device.blind
        assert device.ledger is not None
        assert device.ledger.unattributed == 0
        assert device.ledger.states[State.UNKNOWN] == 10 * GIB

    def test_the_used_peak_looks_back_a_minute(self) -> None:
        """The peak of used memory is that of the last 60 seconds of samples."""
        host = Host()
        host.set(memory=MemoryReading(80 * GIB, 40 * GIB, 39 * GIB, 1 * GIB))
        host.sample()
        host.set(memory=FREE_69)

        peaks = [host.sample().devices[0].used_peak for _ in range(61)]

        assert peaks[59] == 39 * GIB
        assert peaks[60] == 10 * GIB

    def test_xids_are_counted(self) -> None:
        """XID events add up by number."""
        host = Host()
        host.sample(events=(XidEvent(UUID, 79, NOW), XidEvent(UUID, 31, NOW)))

        assert dict(host.sample(events=(XidEvent(UUID, 79, NOW),)).devices[0].xids) == {79: 2, 31: 1}


class TestHidden:
    """Processes with a device open that NVML does not list."""

    HOLDERS = (
        HiddenHolder(20, 1, "cuda", "a", "ann", (0,)),
        HiddenHolder(21, 1, "monitor", "b", "ann", (0,)),
        HiddenHolder(22, 1, "unknown", "c", None, (1,)),
        HiddenHolder(23, 1, "inherited", "d", None, (0,)),
    )

    def test_monitors_workers_and_other_devices_do_not_count(self) -> None:
        """A monitor, a forked worker of a listed holder and who has another device are no hidden holders."""
        hidden = Host().sample(hidden=self.HOLDERS).devices[0].hidden

        assert hidden is not None
        assert [holder.pid for holder in hidden] == [20]

    @pytest.mark.parametrize("changes", [{"hidden": None}, {"host_pid_namespace": False}])
    def test_not_searched_is_not_none_found(self, changes: dict[str, Any]) -> None:
        """Before the first round, or where NVML lists nobody to us, the number is not known."""
        device = Host().sample(**{"hidden": self.HOLDERS, **changes}).devices[0]

        assert device.hidden is None
