"""Read how busy a GPU was, and which process ran on it last; decide when that can give an answer that is new.

With 25 holders on an H100 (driver 580), the list of compute processes takes 1.03 ms of CPU time, the rows of
utilisation 1.49, the used bytes 0.07 and a sample of GPM's counters 0.19. The last two are read in every
sample, and show when the first two must be read as well. They also show that a whole sample would say what
the last one said; then they are all that is read.

GPM's counters say what a GPU's engines did between two readings, and need no privilege. They are
cumulative, so two samples give the mean of the whole time between them, however long that is. The busy
share of the SMs is exactly 0 if no kernel ran in that time, and above 0 if one 64x64 matmul did. Copies by
the copy engine do not show in it. GPM needs a Hopper GPU or a newer one.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from vramledger.model.device_signs import CountedActivity
from vramledger.model.reading import MemoryReading, ProcessEntry, ProcessUtilization
from vramledger.readers.nvml import calls
from vramledger.readers.nvml.calls import Handle, Nvml
from vramledger.readers.nvml.process_lists import RowBuffer, Rows, find_function

_MEBIBYTE: Final = float(2**20)
_MOST_MEBIBYTES: Final = 1e8
"""100 TB/s: no link of the next decades comes near it."""
_MOST_PERCENT: Final = 110.0
"""The mean of a short time may be a little above 100 %; more is garbage."""
_FIRST_DRIVERS: Final = 97
"""The last metric that the first drivers with GPM know."""


_NO_METRIC: Final = calls.UNSUPPORTED | {calls.INVALID_ARGUMENT}


class _Metric(NamedTuple):
    """A metric of GPM: the figure that it becomes, and bytes a second instead of percent."""

    figure: str
    is_traffic: bool = False


_GRAPHICS: Final = 1
"""The share of the time in which anything ran, asked of instances only. It alone takes 1.42 ms of CPU time on
an H200 (driver 580), all other metrics together 2 µs."""

_VIDEO_ENGINES: Final = (*range(30, 38), *range(40, 48), 50, 51, *range(166, 170))
"""The metrics of the decoders, the JPEG and the optical flow engines, and the encoders."""

_METRICS: Final[Mapping[int, _Metric]] = {
    _GRAPHICS: _Metric("graphics"),
    2: _Metric("sm"),
    3: _Metric("occupancy"),
    4: _Metric("integer"),
    5: _Metric("tensor"),
    10: _Metric("dram"),
    11: _Metric("fp64"),
    12: _Metric("fp32"),
    13: _Metric("fp16"),
    20: _Metric("pcie_transmit", is_traffic=True),
    21: _Metric("pcie_receive", is_traffic=True),
    **dict.fromkeys(_VIDEO_ENGINES, _Metric("video")),
    60: _Metric("nvlink_receive", is_traffic=True),
    61: _Metric("nvlink_transmit", is_traffic=True),
}
"""By the number that NVML gives the metric; the busiest engine counts where several give one figure."""


class ActivityReader:
    """The counters of a GPU or an instance; each reading covers the time since the last one that worked."""

    def __init__(self, nvml: Nvml, gpu_instance: int | None = None) -> None:
        self._nvml = nvml
        self._gpu_instance = gpu_instance
        self._unsupported: int | None = None
        self._worked = False
        asked = _METRICS.keys() - (set() if gpu_instance is not None else {_GRAPHICS})
        self._metrics = {number: _METRICS[number] for number in sorted(asked)}
        self._taken_at: float | None = None
        self._before: Handle = None
        self._now: Handle = None
        self._request: Handle = None
        self._asked: list[Handle] = []  # the request's rows, set once: attributes of pynvml are slow
        self._answer: tuple[float, dict[str, float]] | None = None

    @property
    def unsupported(self) -> bool:
        return self._unsupported is not None

    def read(self, gpu: Handle, monotonic: float) -> dict[str, float]:
        """Return the means since the previous reading; empty for the first one.

        A second reading in the same sample gets the same answer: a mean of microseconds says nothing. Raises
        NVMLError if the query failed or is not supported, or the answer is garbage.
        """
        if self._unsupported is not None:
            raise self._nvml.NVMLError(self._unsupported)
        if self._answer is not None and self._answer[0] == monotonic:
            return self._answer[1]
        try:
            if self._request is None:
                self._prepare(gpu)
            answer = self._read_span(gpu)
        except self._nvml.NVMLError as error:
            if error.value not in calls.UNSUPPORTED:
                raise
            if self._worked:
                raise self._nvml.NVMLError(calls.UNKNOWN) from error
            self._unsupported = int(error.value)
            raise
        self._answer = (monotonic, answer)
        return answer

    def forget(self) -> None:
        """Make the next reading a first one, because a reset GPU counts from 0."""
        self._taken_at = self._answer = None

    def close(self) -> None:
        samples, self._before, self._now, self._request = (self._before, self._now), None, None, None
        self.forget()
        for sample in samples:
            if sample is not None:
                with suppress(self._nvml.NVMLError):
                    self._nvml.nvmlGpmSampleFree(sample)

    def _prepare(self, gpu: Handle) -> None:
        nvml = self._nvml
        if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            raise nvml.NVMLError(calls.NOT_SUPPORTED)
        for name in ("_before", "_now"):
            if getattr(self, name) is None:
                setattr(self, name, nvml.nvmlGpmSampleAlloc())
        self._request, self._asked = nvml.c_nvmlGpmMetricsGet_t(), []
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION

    def _read_span(self, gpu: Handle) -> dict[str, float]:
        nvml = self._nvml
        if self._gpu_instance is None:
            nvml.nvmlGpmSampleGet(gpu, self._now)
        else:
            nvml.nvmlGpmMigSampleGet(gpu, self._gpu_instance, self._now)
        taken_at = time.monotonic()
        figures: dict[str, float] = {}
        if self._taken_at is not None:
            figures = self._compare_samples()
            figures["seconds"] = taken_at - self._taken_at
        self._taken_at = taken_at
        self._before, self._now = self._now, self._before
        return figures

    def _ask_for_metrics(self) -> None:
        if len(self._asked) != len(self._metrics):
            self._asked = [self._request.metrics[position] for position in range(len(self._metrics))]
            self._request.numMetrics = len(self._asked)
            for metric, number in zip(self._asked, self._metrics, strict=True):
                metric.metricId = number

    def _compare_samples(self) -> dict[str, float]:
        nvml, request = self._nvml, self._request
        while True:
            self._ask_for_metrics()
            request.sample1, request.sample2 = self._before, self._now
            try:
                nvml.nvmlGpmMetricsGet(request)
                break
            except nvml.NVMLError as error:
                newer = [number for number in self._metrics if number > _FIRST_DRIVERS]
                if error.value != calls.INVALID_ARGUMENT or not newer:
                    raise
                for number in newer:  # the driver is older than these metrics
                    del self._metrics[number]
        figures: dict[str, float] = {}
        for metric, number in zip(self._asked, list(self._metrics), strict=True):
            status = metric.nvmlReturn
            if status == calls.SUCCESS:
                figure, is_traffic = self._metrics[number]
                value = self._checked(metric.value, is_traffic=is_traffic)
                figures[figure] = max(value, figures.get(figure, 0.0))
            elif status in _NO_METRIC:
                del self._metrics[number]
        if not figures:
            raise nvml.NVMLError(calls.NOT_SUPPORTED)
        self._worked = True
        return figures

    def _checked(self, value: float, *, is_traffic: bool) -> float:
        if not 0.0 <= value <= (_MOST_MEBIBYTES if is_traffic else _MOST_PERCENT):  # also false for NaN
            raise self._nvml.NVMLError(calls.UNKNOWN)
        return value * _MEBIBYTE if is_traffic else min(value / 100, 1.0)


def pcie_throughput(activity: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the traffic over PCIe by direction, None where the counters do not have it."""
    if not activity:
        return None
    directions = ("transmit", "receive")
    return {each: activity[name] for each in directions if (name := f"pcie_{each}") in activity} or None


_SAMPLE: Final = struct.Struct("@I4xQIIII")
"""pid, µs since 1970, then SM, memory, encoder and decoder in percent."""
_CLOCK_TOLERANCE: Final = 5_000_000
"""In µs; a row further in the future than this is garbage."""
_LOOK_BACK: Final = 2_500_000
"""In µs; the driver makes a row about twice a second, and may show it a second later."""
_PERCENT: Final = 100


def read_utilization(nvml: Nvml, handle: Handle) -> dict[str, float] | None:
    """Return a GPU's and its memory's rates, None if neither is reported. Raises NVMLError."""
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    values = {"gpu": rates.gpu, "memory": rates.memory}
    if any(value > _PERCENT and value != calls.NONE_32 for value in values.values()):
        raise nvml.NVMLError(calls.UNKNOWN)
    return {name: value / 100 for name, value in values.items() if value != calls.NONE_32} or None


class DeviceUtilizationLog:
    """The driver's samples of a GPU without GPM, several a second: NVML's rates miss short bursts."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._newest = 0

    def highest(self, handle: Handle) -> float | None:
        """Return the highest sample since the last reading, None at the first. Raises NVMLError."""
        nvml = self._nvml
        first = self._newest == 0
        try:
            kind, samples = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._newest)
        except nvml.NVMLError as error:
            if error.value == calls.NOT_FOUND:
                return None
            raise
        new = [each for each in samples if each.timeStamp > self._newest]
        if not new:
            return None
        highest = max(each.sampleValue.uiVal for each in new)
        if kind != nvml.NVML_VALUE_TYPE_UNSIGNED_INT or highest > _PERCENT:
            raise nvml.NVMLError(calls.UNKNOWN)
        self._newest = max(each.timeStamp for each in new)
        return None if first else highest / 100


class UtilizationLog:
    """The driver's log of process utilisation; each reading returns what is new since the last one.

    The driver's answer has one row for each process: its newest stamp, and the mean of all that the log has
    since the time that we ask for (H100, driver 580: asked for everything, an idle program has 1 % for
    minutes). Asked for the rows after the newest stamp of all processes, it loses rows: those of other
    processes are stamped earlier and come later (H200: two of three). So we ask for the time since the last
    reading and some seconds before it, and a row is new if its process had another stamp before.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._function = find_function(nvml, "nvmlDeviceGetProcessUtilization")
        self._buffer = RowBuffer(_SAMPLE)
        self._stamps: dict[int, int] = {}
        self._newest: tuple[int, float] | None = None
        self._read_at: float | None = None

    def read(
        self, handle: Handle, wall: float, monotonic: float, listed_pids: Collection[int] | None
    ) -> tuple[ProcessUtilization, ...]:
        """Return the newest valid row of each pid that has a new one since the previous reading.

        Raises NVMLError if the query failed; or all that is new, or all of a listed pid, is garbage, which is
        not evidence that the process did not work. A garbage row of any other pid is ignored, because the pid
        itself may be garbage.
        """
        if self._function is None:
            raise self._nvml.NVMLError(calls.FUNCTION_NOT_FOUND)
        function = self._function
        now = int(wall * 1e6)
        since_last = 0.0 if self._read_at is None else monotonic - self._read_at
        span = _LOOK_BACK + int(since_last * 1e6)
        begin = ctypes.c_ulonglong(max(0, self._driver_time(now, monotonic) - span))
        rows: Rows
        try:
            rows = self._buffer.read(
                self._nvml, lambda count, samples: function(handle, samples, count, begin)
            )
        except self._nvml.NVMLError as error:
            if error.value != calls.NOT_FOUND:
                raise
            rows = ()  # no process ran
        self._read_at = monotonic
        newest, garbage = self._new_rows(rows, now, begin.value)
        stamps = self._stamps.values()
        if stamps:
            self._newest = (max(stamps), monotonic)
        if garbage and (not newest or listed_pids is None or not garbage.isdisjoint(listed_pids)):
            raise self._nvml.NVMLError(calls.UNKNOWN)
        return tuple(
            ProcessUtilization(pid, stamp / 1e6, sm / 100, memory / 100, encoder / 100, decoder / 100)
            for pid, stamp, sm, memory, encoder, decoder in newest
        )

    def _driver_time(self, now: int, monotonic: float) -> int:
        """Return the driver's time or earlier, in µs: our clock may be set forward and its stamps not."""
        if self._newest is None:
            return now
        stamp, then = self._newest
        return min(now, stamp + int((monotonic - then) * 1e6))

    def _new_rows(self, rows: Rows, now: int, begin: int) -> tuple[list[tuple[int, ...]], set[int]]:
        """Return new rows and garbage pids by pid; garbage is remembered, to be reported only once."""
        newest: dict[int, tuple[int, ...]] = {}
        garbage: set[int] = set()
        stamps: dict[int, int] = {}
        for row in rows:
            pid, stamp, *percents = row
            if pid == 0 or stamp <= begin:
                continue  # an unused row, or an old one
            if stamp == self._stamps.get(pid):
                stamps[pid] = max(stamp, stamps.get(pid, 0))
            elif stamp > now + _CLOCK_TOLERANCE:
                garbage.add(pid)
            else:
                stamps[pid] = max(stamp, stamps.get(pid, 0))
                if max(percents) > _PERCENT:
                    garbage.add(pid)
                elif pid not in newest or stamp > newest[pid][1]:
                    newest[pid] = row
        # A driver that gives several rows of a process repeats the older ones.
        repeated = {pid for pid, stamp in stamps.items() if stamp == self._stamps.get(pid)}
        self._stamps = stamps
        fresh = [row for pid, row in newest.items() if pid not in repeated]
        return fresh, garbage - newest.keys() - repeated


LIST_INTERVAL = 5.0
"""Seconds after which the list is read, whatever the used bytes are: changes in one second may balance."""

ROWS_INTERVAL = 2.5
"""Seconds after which the rows are read in any case; so long is a row shown as a process' utilisation."""

ATTENTION = 5.0
"""Seconds for which every sample reads the list after anything has changed."""

STEADY_AFTER = 10.0
"""Seconds of sameness before rows are read at :data:`ROWS_INTERVAL`: a burst needs readings after it."""


class ListPace:
    """Whether the list of processes can have changed: all that changes it changes the used bytes."""

    def __init__(self) -> None:
        self._used: MemoryReading | None = None
        self._read_at = self._changed_at = float("-inf")
        self._list: tuple[ProcessEntry, ...] | None = None
        self._asked_for = True

    def expect_changes(self) -> None:
        """Have the next samples read the list; may be called from another thread."""
        self._asked_for = True

    def known(self, memory: MemoryReading | None, now: float) -> tuple[ProcessEntry, ...] | None:
        """Return the list if ``memory``, the used bytes of this sample, shows it unchanged; else None."""
        if self._asked_for or memory is None or memory != self._used:
            self._asked_for = False
            self._changed_at = now
        self._used = memory
        if now - self._changed_at < ATTENTION or now - self._read_at >= LIST_INTERVAL:
            return None
        return self._list

    def is_calm(self, now: float) -> bool:
        """Tell whether the list is known and nothing has changed for some time."""
        return self._list is not None and not self._asked_for and now - self._changed_at >= ATTENTION

    def is_unchanged(self, memory: MemoryReading | None) -> bool:
        """Tell whether the used bytes are those of the last sample."""
        return memory is not None and memory == self._used

    def remember(self, processes: tuple[ProcessEntry, ...] | None, now: float) -> None:
        """Remember the list as it was read, None if that failed."""
        if processes is None or processes != self._list:
            self._changed_at = now
        self._list, self._read_at = processes, now


class RowPace:
    """Whether rows of utilisation that are new can say what the counters and the last rows have not said.

    No row is lost by this: a query covers the time since the one before. Where the counters have shown for a
    while that kernels ran in every sample, or that nothing did in any, the rows of some seconds together say
    the same as those of each second. Without counters they are read each time.
    """

    def __init__(self) -> None:
        self._doing: CountedActivity | None = None
        self._since = self._read_at = float("-inf")
        self._none_known = False
        self._incomplete = True

    def are_due(self, counted: CountedActivity | None, now: float) -> bool:
        """Tell whether a sample needs the rows; ``counted``: what the counters say since the last one."""
        doing = _doing(counted)
        if doing != self._doing:
            self._doing, self._since = doing, now
        return not self.is_steady(now) or now - self._read_at >= ROWS_INTERVAL

    def is_steady(self, now: float) -> bool:
        """Tell whether the device has done the same in every sample for some time, by its counters."""
        return self._doing is not None and now - self._since >= STEADY_AFTER and not self._incomplete

    def is_unchanged(self, counted: CountedActivity | None) -> bool:
        """Tell whether the device does what it did in the last sample, by its counters."""
        return _doing(counted) == self._doing

    def remember(
        self,
        rows: Collection[ProcessUtilization] | None,
        listed: Collection[int],
        now: float,
        *,
        failed: bool,
    ) -> None:
        """Remember a query's new ``rows``, None where the driver has none, or that it ``failed``."""
        busy = self._doing is not None and any(self._doing)
        named = {row.pid for row in rows or ()}
        stranger = not named.issubset(listed)
        self._incomplete = failed or stranger or (busy and not named)
        self._none_known = rows is None
        self._read_at = now

    @property
    def between(self) -> tuple[ProcessUtilization, ...] | None:
        """What a sample says that has not read them: no new row, or that the driver has none."""
        return None if self._none_known else ()


def _doing(counted: CountedActivity | None) -> CountedActivity | None:
    """Return what the counters say, without what they say of the memory while kernels run: it may vary."""
    if counted is not None and counted.kernels:
        return CountedActivity(kernels=True, other=True)
    return counted
