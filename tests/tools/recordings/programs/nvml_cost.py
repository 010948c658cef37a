"""Print the cost of each NVML query of the driver module on this host: calls, median, worst, in µs."""

from __future__ import annotations

import collections
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from tests.tools.recordings.programs import cue


def main() -> None:
    """Read every device 60 times with a clock around each call into the library."""
    cue.enter()
    pynvml: Any = importlib.import_module("pynvml")
    costs: dict[str, list[float]] = collections.defaultdict(list)
    find = pynvml._nvmlGetFunctionPointer  # noqa: SLF001 every call goes through it

    def timed(name: str) -> Callable[..., Any]:
        function = find(name)

        def call(*args: Any) -> Any:  # noqa: ANN401
            begun = time.perf_counter()
            try:
                return function(*args)
            finally:
                costs[name].append(time.perf_counter() - begun)

        return call

    pynvml._nvmlGetFunctionPointer = timed  # noqa: SLF001
    config: Any = importlib.import_module("vramledger.config")
    driver_module: Any = importlib.import_module("vramledger.readers.nvml.driver")
    driver = driver_module.Driver.open()
    readers = driver.readers(config.SamplingConfig().collectors)
    durations = []
    for _ in range(60):
        begun = time.perf_counter()
        for reader in readers:
            reader.read(time.time(), time.monotonic())
        durations.append((time.perf_counter() - begun) / len(readers))
        time.sleep(0.05)
    print(f"{'call':50} calls  median      max  (µs; 60 samples, {len(readers)} devices)")
    for name, seconds in sorted(costs.items(), key=lambda item: -sum(item[1])):
        figures = f"{statistics.median(seconds) * 1e6:7.1f} {max(seconds) * 1e6:8.1f}"
        print(f"{name:50} {len(seconds):5} {figures}")
    middle, worst = statistics.median(durations) * 1000, sorted(durations)[-2] * 1000
    print(f"a device's whole sample: median {middle:.2f} ms, second worst {worst:.2f} ms")


if __name__ == "__main__":
    main()
