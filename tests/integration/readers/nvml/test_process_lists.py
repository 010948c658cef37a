"""NVML's lists and rows, and how often they are read, on the stand-in through the real pynvml."""

import time
from collections.abc import Callable

import pytest

from tests.support.nvml_readers import read
from tests.support.standin.library import GIB, MIB, Code, Device, StandIn
from tests.support.sure import sure
from vramledger.model.reading import DeviceReading, ProcessEntry
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.sampling.device_threads import failed_collectors


def test_the_lists_are_merged_by_maximum(device: Device, reader: DeviceReader) -> None:
    """A pid in several lists is one holder with its largest bytes, and all kinds; no list means nobody."""
    assert read(reader).processes == ()
    device.set_processes(
        [(10, 100), (20, 500), (40, None)], graphics=[(30, 7), (40, 9)], mps=[(20, 500), (10, 120)]
    )
    assert read(reader, 20.0).processes == (
        ProcessEntry(10, 120, "CM"),
        ProcessEntry(20, 500, "CM"),
        ProcessEntry(40, 9, "CG"),
        ProcessEntry(30, 7, "G"),
    )


@pytest.mark.parametrize("kind", ["graphics", "mps"])
def test_a_process_of_an_empty_list_is_seen(device: Device, reader: DeviceReader, kind: str) -> None:
    """The first graphics process, or MPS client, is in the next reading, and so is its end."""
    device.set_processes([(10, 100 * MIB)])
    for second in range(3):
        read(reader, float(second))
    device.set_processes([(10, 100 * MIB)], **{kind: [(20, 7 * MIB)]})
    first, other = ProcessEntry(10, 100 * MIB, "C"), ProcessEntry(20, 7 * MIB, kind[0].upper())
    assert [read(reader, float(second)).processes for second in (3, 4)] == [(first, other)] * 2
    device.set_processes([(10, 100 * MIB)])
    assert read(reader, 5.0).processes == (first,)


def test_an_mps_client_in_place_of_another_is_seen(device: Device, reader: DeviceReader) -> None:
    """A new pid has every list read, also if it holds exactly what the one before held."""
    device.set_processes([(10, 100 * MIB)])
    for second in range(3):
        read(reader, float(second))
    device.set_processes([(20, 100 * MIB)], mps=[(20, 100 * MIB)])
    assert read(reader, 3.0).processes == (ProcessEntry(20, 100 * MIB, "CM"),)


def test_an_empty_list_is_read_again_after_some_seconds(device: Device, reader: DeviceReader) -> None:
    """A process that takes no memory of the device is seen with the next slow sample."""
    device.set_processes([(10, 100 * MIB)])
    for second in range(3):
        read(reader, float(second))
    device.set_processes([(10, 100 * MIB)], graphics=[(30, 0)])
    assert ProcessEntry(30, 0, "G") in (read(reader, 11.0).processes or ())


KINDS = ("Compute", "Graphics", "MPSCompute")


@pytest.mark.parametrize(
    ("kinds", "code", "expected"),
    [(KINDS[1:], Code.NOT_SUPPORTED, ((ProcessEntry(10, 100, "C"),), ())),
     (KINDS[:1], Code.NOT_SUPPORTED, (None, ())), (KINDS[:1], Code.INSUFFICIENT_SIZE, (None, ("processes",))),
     (KINDS[2:], Code.UNKNOWN, (None, ("processes",)))],
    ids=["the compute list is valid alone", "without it nothing is known", "never fits", "fails"],
)  # fmt: skip
def test_lists_that_are_missing(
    standin_here: StandIn, reader: DeviceReader, kinds: tuple[str, ...], code: Code, expected: object
) -> None:
    """Without the compute list nothing is known; a list that fails, or never fits, is reported."""
    standin_here.device(0).set_processes([(10, 100)])
    for kind in kinds:
        standin_here.fail(f"nvmlDeviceGet{kind}RunningProcesses_v3", code)
    reading = read(reader)
    assert (reading.processes, reading.failed) == expected
    assert set(failed_collectors([reading])) == ({"ledger"} if reading.failed else set())
    assert reading.memory is not None


@pytest.mark.parametrize("code", [0, Code.NOT_SUPPORTED, Code.FUNCTION_NOT_FOUND])
def test_an_empty_list_of_mps_is_no_missing_one(
    standin_here: StandIn, reader: DeviceReader, code: Code
) -> None:
    """A reading says whether the driver names clients of MPS, also while it names none."""
    standin_here.device(0).set_processes([(10, 100)])
    for suffix in ("", "_v2", "_v3"):
        standin_here.fail(f"nvmlDeviceGetMPSComputeRunningProcesses{suffix}", code)
    assert [read(reader, second).mps_listed for second in (0.0, 1.0)] == [not code] * 2


def test_a_list_that_grows_meanwhile_is_read_whole(device: Device, reader: DeviceReader) -> None:
    """All processes are read, even if there are more than the first call said."""
    device.set_processes([(pid, MIB) for pid in range(1, 101)])
    device.grow_processes("compute", [(pid, MIB) for pid in range(101, 501)])
    assert [entry.pid for entry in sure(read(reader).processes)] == list(range(1, 501))


def test_process_utilization_is_a_ratio_at_its_time(device: Device, reader: DeviceReader) -> None:
    """A busy pid has its newest sample; a pid that is not in the driver's log has none."""
    read(reader)
    before = time.time()
    device.set_processes([(10, 100), (20, 100)])
    device.busy(10, sm=0.4, memory=0.15)
    ((pid, stamp, *ratios),) = sure(read(reader).process_utilization)
    assert (pid, ratios) == (10, [0.4, 0.15, 0, 0])
    assert before <= stamp <= time.time()


def test_nobody_busy_is_an_answer(standin_here: StandIn, reader: DeviceReader) -> None:
    """NVML's "not found" is an empty result; a failed query is unknown, not idleness, and is repeated."""
    reading = read(reader)
    assert (reading.process_utilization, reading.failed) == ((), ())
    assert standin_here.calls("nvmlDeviceGetProcessUtilization") == 1
    standin_here.fail("nvmlDeviceGetProcessUtilization", Code.UNKNOWN)
    for second in range(1, 20):
        reading = read(reader, float(second))
        assert (reading.process_utilization, reading.failed) == (None, ("process_utilization",))
        assert standin_here.calls("nvmlDeviceGetProcessUtilization") == 1 + second


def test_no_row_is_lost(standin_here: StandIn, reader: DeviceReader) -> None:
    """A row is new by its own pid, also after a failure; one of before the first reading is old."""
    device = standin_here.device(0)
    device.raw_sample(10, timestamp=900_000_000, sm=50)
    device.raw_sample(20, timestamp=999_500_000, sm=50)
    assert _pids(reader, 0.0) == [20]
    device.raw_sample(30, timestamp=800_000_000, sm=50)
    assert _pids(reader, 1.0) == []
    device.raw_sample(40, timestamp=1_001_700_000, sm=5)
    assert _pids(reader, 2.0) == [40]
    device.raw_sample(50, timestamp=1_001_300_000, sm=5)
    assert _pids(reader, 3.0) == [50], "the driver's rows come late and in any order"
    device.raw_sample(60, timestamp=1_005_000_000, sm=5)
    standin_here.fail("nvmlDeviceGetProcessUtilization", Code.UNKNOWN)
    reader.read(1030.0, 30.0)
    standin_here.fail("nvmlDeviceGetProcessUtilization", Code.SUCCESS)
    assert _pids(reader, 60.0) == [60], "each reading covers the time since the last that worked"


def _pids(reader: DeviceReader, second: float) -> list[int]:
    (reading,) = reader.read(1000.0 + second, second)
    return [row.pid for row in reading.process_utilization or ()]


@pytest.mark.parametrize("step", [60.0, 3600.0, 86_400.0 * 365, -3600.0])
def test_no_row_is_lost_by_a_set_clock(device: Device, reader: DeviceReader, step: float) -> None:
    """A row is new although the driver's stamps do not follow our clock when it is set, or follow it back."""
    reader.read(100_000_000.0, 0.0)
    for second in (1, 2, 3):
        device.idle()
        wall = 100_000_000.0 + second + (step if second > 1 else 0.0)
        device.raw_sample(10, timestamp=int((wall if step < 0 else 100_000_000 + second) * 1e6), sm=5)
        (reading,) = reader.read(wall, float(second))
        assert [row.pid for row in reading.process_utilization or ()] == [10]


GARBAGE = 4_000_000
"""A percentage that drivers are known to write."""

Row = tuple[int, int, int]
"""A pid, milliseconds and a percentage."""


@pytest.mark.parametrize(
    ("holders", "log", "expected"),
    [
        ((), [(10, 500, 5)], [(10, 1000.5, 0.05)]),
        ((), [(10, 200, 20), (10, 800, 80), (10, 500, 50)], [(10, 1000.8, 0.8)]),
        ((10, 40), [(10, 500, GARBAGE), (40, 400, 5)], None),
        ((10,), [(10, 300, 5), (10, 500, GARBAGE)], [(10, 1000.3, 0.05)]),
        ((), [(10, 500, GARBAGE)], None),
    ],
    ids=["one", "the newest counts", "a holder with garbage alone", "garbage beside a good one",
         "garbage alone"],
)  # fmt: skip
def test_what_is_new_in_the_log(
    device: Device, reader: DeviceReader, holders: tuple[int, ...], log: list[Row], expected: object
) -> None:
    """Of each process the newest valid row counts, and each row, also garbage, is read once."""
    device.set_processes([(pid, 100) for pid in holders])
    reader.read(1000.0, 0.0)
    for pid, milliseconds, sm in log:
        device.raw_sample(pid, timestamp=1_000_000_000 + 1000 * milliseconds, sm=sm)
    (reading,) = reader.read(1001.0, 1.0)
    rows = reading.process_utilization
    assert (rows and [(row.pid, row.time, row.sm) for row in rows]) == expected
    assert reading.failed == (() if expected else ("process_utilization",))
    (again,) = reader.read(1002.0, 2.0)
    assert (again.process_utilization, again.failed) == ((), ())


def test_garbage_samples_are_dropped(device: Device, reader: DeviceReader) -> None:
    """Drivers are known to write times in the future and long ago, and pid 0."""
    reader.read(1000.0, 0.0)
    for pid, stamp in ((20, 9_000_000_000_000_000), (0, 1_000_500_000), (30, 0x10), (40, 1_000_500_000)):
        device.raw_sample(pid, timestamp=stamp, sm=5)
    (reading,) = reader.read(1001.0, 1.0)
    assert [sample.pid for sample in sure(reading.process_utilization)] == [40]


LIST = "nvmlDeviceGetComputeRunningProcesses_v3"
ROWS = "nvmlDeviceGetProcessUtilization"

BEGIN = 1_000_000.0
"""Unix time of the first sample."""


class Seconds:
    """Samples of a reader, one a second."""

    def __init__(self, standin: StandIn, reader: DeviceReader) -> None:
        self._standin = standin
        self._reader = reader
        self.now = 0.0

    def sample(self) -> DeviceReading:
        """Read the GPU, and let a second pass."""
        (reading,) = self._reader.read(BEGIN + self.now, self.now)
        self.now += 1.0
        return reading

    def asked(self, function: str, samples: int, each: Callable[[], None] = lambda: None) -> list[int]:
        """Return by sample how often a function was called; ``each`` is called before each sample."""
        counts = []
        for _ in range(samples):
            each()
            before = self._standin.calls(function)
            self.sample()
            counts.append(self._standin.calls(function) - before)
        return counts

    def row(self, pid: int, sm: int = 5) -> None:
        self._standin.device(0).raw_sample(pid, timestamp=int((BEGIN + self.now) * 1e6), sm=sm)


@pytest.fixture
def seconds(standin_here: StandIn, reader: DeviceReader) -> Seconds:
    """Return samples of a GPU with two holders, of which nothing has changed for 20 s."""
    standin_here.device(0).set_processes([(10, GIB), (20, MIB)])
    begun = Seconds(standin_here, reader)
    for _ in range(21):
        begun.sample()
    return begun


def test_a_list_that_cannot_have_changed_is_read_every_five_seconds(seconds: Seconds) -> None:
    """While used bytes stay, one sample in five reads the list, and each says whole who holds what."""
    assert sum(seconds.asked(LIST, 20)) == 4
    assert seconds.sample().processes == (ProcessEntry(10, GIB, "C"), ProcessEntry(20, MIB, "C"))


@pytest.mark.parametrize(
    "holders",
    [[(10, GIB), (20, MIB), (30, MIB)], [(10, GIB)], [(10, GIB + MIB), (20, MIB)], []],
    ids=["one comes", "one ends", "one grows", "all end"],
)
def test_every_change_is_read(device: Device, seconds: Seconds, holders: list[tuple[int, int]]) -> None:
    """Who comes, ends, allocates or frees is in the next sample, wherever between two lists that is."""
    for _ in range(5):
        device.set_processes(holders)
        assert seconds.sample().processes == tuple(ProcessEntry(*each, "C") for each in holders)
        device.set_processes([(10, GIB), (20, MIB)])
        seconds.asked(LIST, 7)


def test_after_a_change_every_sample_reads_the_list(standin_here: StandIn, seconds: Seconds) -> None:
    """What changed may change again: for five seconds no sample goes without."""
    standin_here.device(0).set_processes([(10, 2 * GIB), (20, MIB)])
    assert seconds.asked(LIST, 5) == [1] * 5
    assert sum(seconds.asked(LIST, 20)) == 4


def test_a_change_that_balances_is_seen_after_five_seconds(device: Device, seconds: Seconds) -> None:
    """If one frees to the byte what another takes in the same second, the used bytes tell nothing."""
    device.set_processes([(10, MIB), (20, GIB)])
    lists = [seconds.sample().processes for _ in range(5)]
    assert lists[-1] == (ProcessEntry(10, MIB, "C"), ProcessEntry(20, GIB, "C"))


def test_a_list_that_failed_is_read_in_the_next_sample(standin_here: StandIn, seconds: Seconds) -> None:
    """An old list never stands for one that failed, and the next sample asks again."""
    standin_here.fail(LIST, Code.UNKNOWN)
    readings = [seconds.sample() for _ in range(5)]
    assert (readings[-1].processes, readings[-1].failed) == (None, ("processes",))
    assert seconds.asked(LIST, 2) == [1, 1]
    standin_here.fail(LIST, Code.SUCCESS)
    assert len(seconds.sample().processes or ()) == 2


def test_without_used_bytes_every_sample_reads_the_list(standin_here: StandIn, seconds: Seconds) -> None:
    """Where the used bytes are not known, nothing says that the list is as it was."""
    standin_here.fail("nvmlDeviceGetMemoryInfo_v2", Code.UNKNOWN)
    assert seconds.asked(LIST, 10) == [1] * 10


def test_what_happened_to_a_holder_has_the_list_read(seconds: Seconds, reader: DeviceReader) -> None:
    """The sampler sees in /proc that a holder has ended, or an XID error: the next sample reads the list."""
    seconds.asked(LIST, 1)
    reader.read_list_again()
    assert seconds.asked(LIST, 5) == [1] * 5


def test_a_gpu_that_was_lost_is_read_whole(standin_here: StandIn, seconds: Seconds) -> None:
    """A list of before a loss is not one of after it, although it may be of the same bytes."""
    standin_here.device(0).lost = True
    assert seconds.sample().error == "lost"
    standin_here.device(0).lost = False
    standin_here.device(0).set_processes([(30, GIB + MIB)])
    seconds.now += 10.0
    assert seconds.sample().processes == (ProcessEntry(30, GIB + MIB, "C"),)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "quiet"])
def test_a_steady_gpus_rows_are_read_less(standin_here: StandIn, seconds: Seconds, busy: bool) -> None:
    """A GPU that was busy, or quiet, in each of the last ten seconds is asked at every third sample."""
    if busy:
        standin_here.device(0).set_activity(sm=90.0, dram=20.0)

    def work() -> None:
        if busy:
            seconds.row(10)

    seconds.asked(ROWS, 12, work)
    assert sum(seconds.asked(ROWS, 12, work)) == 4


def test_no_row_is_lost_between_two_queries(standin_here: StandIn, seconds: Seconds) -> None:
    """Everybody whom the driver has noted in the seconds between is named by the next query."""
    standin_here.device(0).set_activity(sm=90.0)
    seconds.asked(ROWS, 12, lambda: seconds.row(10))
    named = set()
    for pid in (20, 30, 40, 50, 60, 70):
        seconds.row(10)
        seconds.row(pid)
        named |= {row.pid for row in seconds.sample().process_utilization or ()}
    named |= {row.pid for _ in range(3) for row in seconds.sample().process_utilization or ()}
    assert named == {10, 20, 30, 40, 50, 60, 70}


def test_a_burst_is_named_in_its_own_second(standin_here: StandIn, seconds: Seconds) -> None:
    """When the counters of a quiet GPU move, that very sample reads the rows, and so do those after it."""
    for _ in range(3):  # at any place between two queries
        standin_here.device(0).do(sm=0.001)
        seconds.row(20)
        assert [row.pid for row in seconds.sample().process_utilization or ()] == [20]
        assert seconds.asked(ROWS, 9) == [1] * 9
        seconds.asked(ROWS, 5)


def test_a_busy_gpu_without_names_is_asked_each_second(standin_here: StandIn, seconds: Seconds) -> None:
    """Work that no row names is not known to be anybody's: the rows may come any moment."""
    standin_here.device(0).set_activity(sm=90.0)
    seconds.asked(ROWS, 12)
    assert seconds.asked(ROWS, 6) == [1] * 6


def test_a_row_of_somebody_unlisted_has_the_list_read(standin_here: StandIn, seconds: Seconds) -> None:
    """A process that works has come, although the used bytes are as before."""
    seconds.asked(LIST, 1)
    standin_here.device(0).do(sm=0.001)
    seconds.row(30)
    seconds.sample()
    assert seconds.asked(LIST, 2) == [1, 1]


def test_where_there_are_no_rows_their_absence_is_no_answer(standin_here: StandIn, seconds: Seconds) -> None:
    """A driver without rows has none in any sample, which is not the same as no new ones."""
    standin_here.fail(ROWS, Code.NOT_SUPPORTED)
    seconds.asked(ROWS, 3)
    assert [seconds.sample().process_utilization for _ in range(4)] == [None] * 4


def test_without_counters_every_sample_reads_the_rows(standin_here: StandIn, reader: DeviceReader) -> None:
    """Before Hopper nothing but the rows says who worked."""
    standin_here.fail("nvmlGpmQueryDeviceSupport", Code.NOT_SUPPORTED)
    seconds = Seconds(standin_here, reader)
    seconds.asked(ROWS, 20)
    assert seconds.asked(ROWS, 6) == [1] * 6
