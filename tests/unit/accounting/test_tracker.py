"""Readings in, snapshots out: what is remembered between samples."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.host.model import GIB, Fault, Gpu, Process
from tests.support.host.one_holder import NOW, START, UUID, OneHolder, gpu
from tests.support.host.programs import Fixed
from tests.support.sure import sure
from vramledger.model import reading
from vramledger.model.snapshot import Grade, State

TRAINING = reading.ParentFacts(500, 60, "python3", "train.py", init=False)


class TestIdle:
    """A holding is idle only on evidence that lasted."""

    def test_quiet_with_evidence_becomes_idle(self) -> None:
        """Without any sign of work a holding is idle after the threshold, since its last sign."""
        host = OneHolder()
        assert host.watch(10).state is State.ACTIVE
        holding = host.holding()
        assert (holding.state, holding.grade) == (State.IDLE, Grade.PROVEN)
        assert (holding.since, holding.last_active) == (NOW + 1, None)

    def test_a_failed_question_is_never_idleness(self) -> None:
        """Without an answer about work nobody is idle; one such sample ends the time of evidence."""
        host = OneHolder()
        host.say_nothing_of_work()
        assert host.watch(100).state is State.ACTIVE
        host = OneHolder()
        host.watch(9)
        host.say_nothing_of_work()
        host.sample()
        host.gpu.says.clear()
        assert host.watch(9).state is State.ACTIVE
        assert host.watch(1).state is State.IDLE

    def test_a_device_that_does_nothing_is_evidence_for_all(self) -> None:
        """Device utilisation of 0 replaces the query by process; without counters it proves nothing."""
        host = OneHolder()
        host.driver_says(process_utilization=None, utilization={"gpu": 0.0, "memory": 0.0}, activity=None)
        holding = host.watch(12)
        assert (holding.state, holding.grade) == (State.IDLE, Grade.INFERRED)

    def test_what_is_work(self) -> None:
        """Changing bytes, and a row of work at once; the driver's own 0 is shown, and is none."""
        host = OneHolder()
        holding = host.holding()
        for step in range(30):
            host.program.memory = 9 * GIB - step % 2
            holding = host.holding()
        assert (holding.state, holding.last_active) == (State.ACTIVE, NOW + 31)
        host = OneHolder()
        assert host.watch(15).state is State.IDLE
        host.program.work = 0.4
        holding = host.holding()
        assert (holding.state, holding.since, holding.last_active) == (State.ACTIVE, NOW + 16, NOW + 16)
        assert holding.sm == 0.4
        host = OneHolder()
        holding = host.holding()
        for second in range(2, 13):
            host.driver_says(
                process_utilization=(reading.ProcessUtilization(7, NOW + second, 0.0, 0.0, 0.0, 0.0),)
            )
            holding = host.holding()
        assert (holding.state, holding.sm) == (State.IDLE, 0.0)

    @pytest.mark.parametrize(("looked", "state"), [(4.0, State.IDLE), (2.0, State.ACTIVE)])
    def test_the_time_until_a_look_is_no_gap(self, looked: float, state: State) -> None:
        """A gap begins at the newest look at the GPU: until then it is known that it did nothing."""
        host = OneHolder()
        host.watch(9)
        ((device,), unchanged) = host.sample(0).devices, host.reading().monotonic + looked
        assert device.holdings[0].state is State.ACTIVE
        (device,) = host.sample(8, unchanged=unchanged).devices
        assert device.holdings[0].state is state

    def test_an_old_utilisation_sample_is_not_shown_as_new(self) -> None:
        """A utilisation sample is shown only for a moment, then it is unknown again."""
        host = OneHolder()
        host.program.work = 0.4
        assert host.holding().sm == 0.4
        host.program.work = 0.0
        host.driver_says(process_utilization=())
        assert host.watch(2).sm == 0.4
        assert host.watch(1).sm is None


class TestWatching:
    """Old and missing answers are not evidence."""

    def test_a_device_that_did_not_answer_was_not_watched(self) -> None:
        """While one GPU does not answer, the other GPU's samples are not evidence of quiet for it."""
        host = OneHolder()
        host.host.gpus = [host.gpu, gpu(1)]
        host.program.work = 0.4
        host.sample()
        host.program.work = 0.0
        host.host.faults = [Fault("device lost", since=host.now + 1, until=host.now + 61, name="timeout")]
        for _ in range(60):
            assert not host.sample().devices[0].up
        (holding,) = host.sample().devices[0].holdings
        assert holding.state is State.ACTIVE

    def test_a_utilisation_sample_ages_though_the_clock_is_set_back(self) -> None:
        """After a clock step backwards an old sample does not count as new for an hour."""
        host = OneHolder()
        host.program.work = 0.4
        host.sample()
        host.program.work = 0.0
        host.driver_says(process_utilization=())
        (device,) = host.sample(after=5.0, time=NOW - 3600).devices
        assert device.holdings[0].sm is None

    def test_bytes_that_become_unknown_are_no_work(self) -> None:
        """A figure that is missing in a sample, and is the same later, is not a sign of work."""
        host = OneHolder()
        host.watch(5)
        host.driver_says(processes=(reading.ProcessEntry(7, None, "C"),))
        host.sample()
        del host.gpu.says["processes"]
        assert host.holding().last_active is None

    def test_facts_that_come_late_count_from_the_start(self) -> None:
        """The result of a read that hung at first replaces what was not known."""
        host = OneHolder()
        host.holder.starter, host.holder.group = TRAINING, host.holder.pid
        outline = reading.ProcessFacts(7, START, parent=TRAINING, denied=("environ",))
        host.sample(facts=(outline,))
        host.sample(facts=(replace(outline, denied=()),))
        host.holder.fates["orphaned"] = host.now
        snapshot = host.sample(facts=(replace(outline, parent=None, denied=()),), ties=())
        assert snapshot.devices[0].holdings[0].state is State.ACTIVE  # a daemon: nothing says worker


class TestIdentity:
    """A process is its pid and its start time."""

    @pytest.mark.parametrize("memory", [2 * GIB, 10 * GIB])
    def test_a_reused_pid_is_a_new_holder(self, memory: int) -> None:
        """Another process under the pid has its own peak and since, also with as many bytes as before."""
        host = OneHolder()
        host.watch(3)
        host.holder.end = host.now
        host.reuse_pid(memory)
        holding = host.holding()
        assert (holding.peak, holding.state, holding.start) == (memory, State.ACTIVE, host.holder.start)

    def test_bytes_that_outlive_their_process_stay_dead_under_a_reused_pid(self) -> None:
        """The same bytes under a pid that now belongs to a younger process are the dead process's."""
        host = OneHolder()
        host.watch(3)
        host.holder.fates["dead"] = host.now
        host.reuse_pid(0)
        assert host.holding().state is State.DEAD
        assert host.watch(5).state is State.DEAD
        assert 7 not in {pid for pid, each in host.sample().processes.items() if each.start_time > NOW}

    def test_whose_the_bytes_under_a_reused_pid_are_may_not_be_known(self) -> None:
        """As long as it is not known whether the younger process uses the GPU, nothing is called dead."""
        host = OneHolder()
        host.watch(3)
        host.holder.fates["dead"] = host.now
        host.reuse_pid(0)
        facts = replace(host.holder.facts(host.now), uses_gpu=None)
        holding = host.sample(facts=(facts,)).devices[0].holdings[0]
        assert holding.state is State.UNKNOWN
        assert "which of them has the bytes is not known" in holding.why

    def test_a_process_that_dies_keeps_its_peak(self) -> None:
        """The dead holder has the peak and the owner that it had, until the driver frees its bytes."""
        host = OneHolder()
        host.watch(2)
        host.holder.fates["dead"] = host.now
        host.driver_says(processes=(reading.ProcessEntry(7, 1 * GIB, "C"),))
        holding = host.holding()
        assert (holding.state, holding.peak, holding.since) == (State.DEAD, 10 * GIB, NOW + 3)
        host = OneHolder()
        host.watch(2)
        alive = host.sample().processes[7]
        host.holder.fates["dead"] = host.now
        assert host.sample().processes[7] == alive
        host.holder.end = host.now
        assert host.sample().processes == {}

    @pytest.mark.parametrize("step", [3600.0, -3600.0, 0.5])
    def test_a_clock_that_is_set_makes_nothing_older(self, step: float) -> None:
        """After a step of the clock a state has lasted, and a process lived, for as long as it truly has."""
        host = OneHolder()
        host.program.work = 0.4
        host.sample()
        host.program.work = 0.0
        before = host.sample()
        host.host.faults = [Fault("clock", since=host.now + 1, number=step)]
        after = host.sample()
        assert after.time == sure(before.time) + 1 + step
        (old,), (new,) = before.devices[0].holdings, after.devices[0].holdings
        assert new.since == old.since + step
        assert after.time - sure(new.last_active) == 2
        pid = host.holder.pid
        assert after.processes[pid].start_time == before.processes[pid].start_time + step

    @pytest.mark.parametrize("step", [3600.0, -3600.0])
    def test_a_clock_that_is_set_gives_no_bytes_to_another(self, step: float) -> None:
        """The same rules decide before and after a clock step which process has a reused pid."""
        results = []
        for faults in ([], [Fault("clock", since=3.2, number=step)]):
            host = OneHolder()
            host.watch(3)
            host.host.faults = faults
            host.holder.fates["dead"] = host.now
            host.reuse_pid(0)
            results.append([(each.state, each.start) for each in host.sample().devices[0].holdings])
        assert results[0] == results[1]

    def test_an_active_holding_is_as_old_as_its_process(self) -> None:
        """A holding that is active when first seen counts as active since its process started."""
        assert OneHolder().holding().since == NOW - 900


class TestDevices:
    """What is published of devices, and when there is nothing."""

    def test_a_failed_sample_publishes_no_device(self) -> None:
        """After a failure, or when no device answers, there is no data of the sample before."""
        host = OneHolder()
        host.sample()
        host.host.faults = [Fault("driver lost", since=host.now + 1, until=host.now + 2)]
        snapshot = host.sample()
        assert not snapshot.up
        assert snapshot.devices == ()
        assert snapshot.failures["driver-lost"] == 1
        assert host.sample().up
        host = OneHolder()
        host.host.faults = [Fault("device lost", name="timeout")]
        assert (host.sample().failure or ("",))[0] == "timeout"

    def test_a_host_whose_gpus_sleep_is_well(self) -> None:
        """All GPUs may sleep: the driver has not failed, and their identity stays."""
        host = OneHolder()
        host.sample()
        shot = host.sample(devices=(host.reading().devices[0].without_data("asleep"),))
        (device,) = shot.devices
        assert (shot.failure, shot.up) == (None, True)
        assert (device.up, device.reading.error, device.reading.uuid) == (False, "asleep", UUID)
        assert host.sample().devices[0].up

    def test_a_device_that_vanishes_is_down(self) -> None:
        """A GPU that the driver no longer lists is down, and of it only its identity stays."""
        host = OneHolder()
        host.host.gpus = [host.gpu, gpu(1)]
        other = host.sample().devices[1].reading
        host.host.gpus = [host.gpu]
        assert host.sample().devices[1].reading == other.without_data("missing")

    def test_a_gpu_lost_at_a_restart_keeps_its_identity(self) -> None:
        """A GPU that a new sampler cannot identify is the one that is missing at its index."""
        host = OneHolder()
        host.host.gpus = [host.gpu, gpu(1)]
        device, _ = host.reading().devices
        host.sample()
        devices = host.sample(
            devices=(device, reading.DeviceReading(1, "GPU-unknown-1", error="lost"))
        ).devices
        assert [(each.reading.uuid, each.up) for each in devices] == [(UUID, True), ("GPU-1", False)]

    def test_nothing_piles_up_while_a_device_is_lost(self) -> None:
        """Short-lived holders on one GPU are forgotten, even if another GPU does not answer."""
        host = OneHolder()
        host.host.gpus = [host.gpu, gpu(1)]
        host.sample()
        host.host.faults = [Fault("device lost", gpu=1)]
        for pid in range(100, 200):
            host.host.processes = [Process(pid, {0: Fixed(GIB)})]
            host.sample()
        assert len(host.exporter.tracker.state.processes) == 1

    def test_a_destroyed_instance_is_forgotten(self) -> None:
        """A MIG instance that disappears while its GPU answers was destroyed on purpose."""
        host = OneHolder()
        host.gpu.divided = True
        host.host.gpus = [host.gpu, Gpu(uuids=((0.0, "MIG-1"),), parent=UUID)]
        host.holder.places = {1: host.program}
        assert len(host.sample().devices) == 2
        host.host.gpus = [host.gpu]
        host.holder.end = host.now
        assert [each.reading.uuid for each in host.sample().devices] == [UUID]

    def test_a_device_that_has_no_memory_of_its_own_is_up(self) -> None:
        """An unsupported query has not failed: the device is up, without a ledger; a failed one costs all."""
        host = OneHolder()
        host.host.gpus = [host.gpu, gpu(1)]
        host.driver_says(memory=None)
        device, _ = host.sample().devices
        assert device.up
        assert device.ledger is None
        for query in ("memory", "processes"):  # without its holders the device would seem to have none
            host.driver_says(failed=(query,))
            device, _ = host.sample().devices
            assert (device.up, device.reading.processes) == (False, None)

    def test_bytes_that_the_driver_does_not_tell_are_not_zero(self) -> None:
        """A holder without a figure has none; outside the host's PID namespace used bytes are unknown."""
        host = OneHolder()
        host.driver_says(processes=(reading.ProcessEntry(7, None, "C"),))
        (device,) = host.sample().devices
        assert (device.holdings[0].memory, device.holdings[0].peak) == (None, None)
        assert sure(device.ledger).unattributed == 10 * GIB
        host = OneHolder()
        host.host.faults = [Fault("blind")]
        (device,) = host.sample().devices
        assert device.blind
        assert device.ledger is not None
        assert (device.ledger.unattributed, device.ledger.states[State.UNKNOWN]) == (0, 10 * GIB)

    def test_the_used_peak_looks_back_a_minute(self) -> None:
        """The peak of used memory is that of 60 seconds; XID events are counted, also over a restart."""
        host = OneHolder()
        host.program.memory = 39 * GIB
        host.sample()
        host.program.memory = 10 * GIB
        peaks = [host.sample().devices[0].used_peak for _ in range(61)]
        assert (peaks[59], peaks[60]) == (39 * GIB, 10 * GIB)
        host = OneHolder()
        host.sample(events=(reading.XidEvent(UUID, 79, NOW), reading.XidEvent(UUID, 31, NOW)))
        assert dict(host.sample(events=(reading.XidEvent(UUID, 79, NOW),)).devices[0].xids) == {79: 2, 31: 1}
        host.host.faults = [Fault("driver lost", since=host.now + 1, until=host.now + 2)]
        assert not host.sample().up
        host.exporter.tracker.reset()  # by a new sampler
        assert dict(host.sample().devices[0].xids) == {79: 2, 31: 1}


class TestHidden:
    """Processes with a device open that NVML does not list."""

    HOLDERS = (
        reading.HiddenHolder(20, 1, "cuda", "a", "ann", (0,)),
        reading.HiddenHolder(21, 1, "monitor", "b", "ann", (0,)),
        reading.HiddenHolder(22, 1, "unknown", "c", None, (1,)),
        reading.HiddenHolder(23, 1, "inherited", "d", None, (0,)),
    )

    def test_monitors_workers_and_other_devices_do_not_count(self) -> None:
        """A monitor, a listed holder's worker and a holder of another device are not hidden holders."""
        hidden = sure(OneHolder().sample(hidden=self.HOLDERS).devices[0].hidden)
        assert [holder.pid for holder in hidden] == [20]

    @pytest.mark.parametrize("changes", [{"hidden": None}, {"host_pid_namespace": False}])
    def test_not_searched_is_not_none_found(self, changes: dict[str, Any]) -> None:
        """Before the first round, or where NVML lists no process to us, the number is not known."""
        assert OneHolder().sample(**{"hidden": self.HOLDERS, **changes}).devices[0].hidden is None
