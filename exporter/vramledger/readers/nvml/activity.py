"""Read GPM's counters: what a GPU's engines did between two readings.

Measured on an H200 and an H100 (driver 580): a sample takes 0.25 ms and needs no privilege. The counters are
cumulative, so two samples give the mean of the whole time between them, however long that is. The busy share
of the SMs is exactly 0 if no kernel ran in that time, and above 0 if one 64x64 matmul did. Copies by the copy
engine do not show in it. GPM needs a Hopper GPU or a newer one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from vramledger.readers.nvml.calls import (
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    SUCCESS,
    UNKNOWN,
    UNSUPPORTED,
    Handle,
    Nvml,
)

_MEBIBYTE: Final = float(2**20)
_MOST_MEBIBYTES: Final = 1e8
"""100 TB/s: no link of the next decades comes near it."""
_MOST_PERCENT: Final = 110.0
"""The mean of a short time may be a little above 100 %; more is garbage."""
_FIRST_DRIVERS: Final = 97
"""The last metric that the first drivers with GPM know."""


_NO_METRIC: Final = UNSUPPORTED | {INVALID_ARGUMENT}


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
            if error.value not in UNSUPPORTED:
                raise
            if self._worked:
                raise self._nvml.NVMLError(UNKNOWN) from error
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
            raise nvml.NVMLError(NOT_SUPPORTED)
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
                if error.value != INVALID_ARGUMENT or not newer:
                    raise
                for number in newer:  # the driver is older than these metrics
                    del self._metrics[number]
        figures: dict[str, float] = {}
        for metric, number in zip(self._asked, list(self._metrics), strict=True):
            status = metric.nvmlReturn
            if status == SUCCESS:
                figure, is_traffic = self._metrics[number]
                value = self._checked(metric.value, is_traffic=is_traffic)
                figures[figure] = max(value, figures.get(figure, 0.0))
            elif status in _NO_METRIC:
                del self._metrics[number]
        if not figures:
            raise nvml.NVMLError(NOT_SUPPORTED)
        self._worked = True
        return figures

    def _checked(self, value: float, *, is_traffic: bool) -> float:
        if not 0.0 <= value <= (_MOST_MEBIBYTES if is_traffic else _MOST_PERCENT):  # also false for NaN
            raise self._nvml.NVMLError(UNKNOWN)
        return value * _MEBIBYTE if is_traffic else min(value / 100, 1.0)


def pcie_throughput(activity: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return the traffic over PCIe by direction, None where the counters do not have it."""
    if not activity:
        return None
    directions = ("transmit", "receive")
    return {each: activity[name] for each in directions if (name := f"pcie_{each}") in activity} or None
