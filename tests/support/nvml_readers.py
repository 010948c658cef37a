"""Readers of the stand-in's GPUs, as the sampler opens them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.standin.library import Device, StandIn
from vramledger.config import SamplingConfig
from vramledger.model.reading import DeviceReading
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver

ALL = SamplingConfig().collectors | {"pcie"}

Open = Callable[[], list[DeviceReader]]


@pytest.fixture
def device(standin_here: StandIn) -> Device:
    """Return the stand-in's only GPU."""
    return standin_here.device(0)


@pytest.fixture
def open_driver(standin_here: StandIn) -> Iterator[Callable[[], Driver]]:
    """Open the driver, as often as requested; it is closed after the test."""
    drivers: list[Driver] = []

    def open_driver() -> Driver:
        drivers.append(Driver.open())
        return drivers[-1]

    assert standin_here.device_count
    yield open_driver
    for driver in drivers:
        driver.close()


@pytest.fixture
def open_readers(open_driver: Callable[[], Driver]) -> Open:
    """Open the driver and return its readers, as often as requested."""

    def open_readers() -> list[DeviceReader]:
        readers = open_driver().readers(ALL)
        for reader in readers:
            reader.open()
        return readers

    return open_readers


@pytest.fixture
def reader(open_readers: Open) -> DeviceReader:
    """Return the reader of the only GPU."""
    (reader,) = open_readers()
    return reader


def opened(driver: Driver, *sources: Any, **more: Any) -> DeviceReader:  # noqa: ANN401 as the driver takes them
    """Return the opened reader of the only GPU, with other sources of facts about it."""
    (reader,) = driver.readers(ALL, *sources, **more)
    reader.open()
    return reader


def read(reader: DeviceReader, monotonic: float = 0.0) -> DeviceReading:
    """Read a GPU that MIG does not divide."""
    (reading,) = reader.read(time.time(), monotonic)
    return reading
