"""Which expensive queries a sample makes, on the stand-in: none whose answer could be new is left out."""

from collections.abc import Callable

import pytest

from tests.support.nvml_readers import Open
from tests.support.standin.library import GIB, MIB, Code, StandIn
from vramledger.model.reading import DeviceReading, ProcessEntry
from vramledger.readers.nvml.device_reader import DeviceReader

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
        """Have the driver note a process in this second."""
        self._standin.device(0).raw_sample(pid, timestamp=int((BEGIN + self.now) * 1e6), sm=sm)


@pytest.fixture
def seconds(standin_here: StandIn, reader: DeviceReader) -> Seconds:
    """Return samples of a GPU with two holders, of which nothing has changed for 20 s."""
    standin_here.device(0).set_processes([(10, GIB), (20, MIB)])
    begun = Seconds(standin_here, reader)
    for _ in range(21):
        begun.sample()
    return begun


# --- the list of processes -----------------------------------------------------------------------


def test_a_list_that_cannot_have_changed_is_read_every_five_seconds(seconds: Seconds) -> None:
    """While used bytes stay, one sample in five reads the list, and each says whole who holds what."""
    assert sum(seconds.asked(LIST, 20)) == 4
    assert seconds.sample().processes == (ProcessEntry(10, GIB, "C"), ProcessEntry(20, MIB, "C"))


@pytest.mark.parametrize(
    "holders",
    [[(10, GIB), (20, MIB), (30, MIB)], [(10, GIB)], [(10, GIB + MIB), (20, MIB)], []],
    ids=["one comes", "one ends", "one grows", "all end"],
)
def test_every_change_of_used_bytes_has_the_list_read_at_once(
    standin_here: StandIn, seconds: Seconds, holders: list[tuple[int, int]]
) -> None:
    """Who comes, ends, allocates or frees is in the next sample, wherever between two lists that is."""
    for _ in range(5):
        standin_here.device(0).set_processes(holders)
        assert seconds.sample().processes == tuple(ProcessEntry(*each, "C") for each in holders)
        standin_here.device(0).set_processes([(10, GIB), (20, MIB)])
        seconds.asked(LIST, 7)


def test_after_a_change_every_sample_reads_the_list(standin_here: StandIn, seconds: Seconds) -> None:
    """What changed may change again: for five seconds no sample goes without."""
    standin_here.device(0).set_processes([(10, 2 * GIB), (20, MIB)])
    assert seconds.asked(LIST, 5) == [1] * 5
    assert sum(seconds.asked(LIST, 20)) == 4


def test_a_change_that_balances_is_seen_after_five_seconds(standin_here: StandIn, seconds: Seconds) -> None:
    """If one frees to the byte what another takes in the same second, the used bytes tell nothing."""
    standin_here.device(0).set_processes([(10, MIB), (20, GIB)])
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


# --- the rows of utilisation ---------------------------------------------------------------------


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


def test_a_failed_query_of_rows_is_repeated_each_second(standin_here: StandIn, seconds: Seconds) -> None:
    """It stays a failure until it succeeds, and is never an answer without rows."""
    standin_here.fail(ROWS, Code.UNKNOWN)
    seconds.asked(ROWS, 3)
    reading = seconds.sample()
    assert (reading.process_utilization, reading.failed) == (None, ("process_utilization",))
    assert seconds.asked(ROWS, 5) == [1] * 5


def test_where_there_are_no_rows_their_absence_is_no_answer(standin_here: StandIn, seconds: Seconds) -> None:
    """A driver without rows has none in any sample, which is not the same as no new ones."""
    standin_here.fail(ROWS, Code.NOT_SUPPORTED)
    seconds.asked(ROWS, 3)
    assert [seconds.sample().process_utilization for _ in range(4)] == [None] * 4


def test_without_counters_every_sample_reads_the_rows(standin_here: StandIn, open_readers: Open) -> None:
    """Before Hopper nothing but the rows says who worked."""
    standin_here.fail("nvmlGpmQueryDeviceSupport", Code.NOT_SUPPORTED)
    (reader,) = open_readers()
    seconds = Seconds(standin_here, reader)
    seconds.asked(ROWS, 20)
    assert seconds.asked(ROWS, 6) == [1] * 6
