"""Define a metric family: its name, labels, meaning, and the collector that gives its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct

from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot

PREFIX = "vramledger_"
SAMPLING = "sampling"
"""The collector of the families about sampling itself: always served, whatever is selected."""

Labels = tuple[str, ...]
Sample = tuple[Labels, float]

DEVICE = ("gpu", "uuid")
HOLDING = (*DEVICE, "pid")
PROCESS_LISTS = "NVML's process lists"
"""The calls that list the holders of a device, as a :attr:`Family.source`; METRICS.md names them."""
_UNITS = ("bytes_per_second", "bytes", "seconds", "ratio", "celsius", "watts", "joules", "hertz")


class Family(Struct, frozen=True):
    """One metric family of the contract."""

    name: str  # as on the text page, with ``_total`` or ``_info``
    labels: Labels  # label names in the order of a sample's label values
    help: str  # one sentence: the meaning, the source, the delay
    collector: str  # a key of :data:`vramledger.config.COLLECTORS`, or :data:`SAMPLING`
    source: str  # the call, file or message that the value comes from; Markdown
    # when a device that is up has no sample: "never", or words that begin with "when" or "before"; Markdown
    absent: str

    @property
    def kind(self) -> Literal["gauge", "counter", "info"]:
        """The OpenMetrics type; the text format has no info and calls it a gauge."""
        if self.name.endswith("_total"):
            return "counter"
        return "info" if self.name.endswith("_info") else "gauge"

    @property
    def base(self) -> str:
        """The name that OpenMetrics gives the family: without the suffix of its type."""
        return self.name.removesuffix("_total").removesuffix("_info")

    @property
    def unit(self) -> str:
        """The unit at the end of :attr:`base`, or nothing."""
        return next((unit for unit in _UNITS if self.base.endswith(f"_{unit}")), "")


class HolderFactFamily(Family, frozen=True):
    """A family with a series for each holder of which a fact of ``model/holder_facts`` is known."""

    fact: str  # the field of the snapshot
    read: Callable[[Any], float | None]  # returns the value; None for no series


Collected = list[tuple[Family, list[Sample]]]
FamilySamples = Iterator[tuple[Family, Labels, float | None]]


def group(families: Iterable[Family], found: FamilySamples) -> Collected:
    """Return samples by family, in the order of the families, without values of None."""
    samples: dict[str, tuple[Family, list[Sample]]] = {each.name: (each, []) for each in families}
    for family, labels, value in found:
        if value is not None:
            samples[family.name][1].append((labels, value))
    return list(samples.values())


def ordered_devices(snapshot: Snapshot) -> list[DeviceSnapshot]:
    """Return the devices in the order of the page."""
    return sorted(snapshot.devices, key=lambda device: (device.reading.index, device.reading.uuid))


def devices_shown(snapshot: Snapshot, *, down: bool = False) -> list[tuple[tuple[str, str], DeviceSnapshot]]:
    """Return the devices whose data may be shown, with their labels, in the order of the page."""
    if not snapshot.up:
        return []
    return [(device.key, device) for device in ordered_devices(snapshot) if device.up or down]


def collect_holder_facts(snapshot: Snapshot, families: Iterable[HolderFactFamily]) -> Collected:
    """Return the series of the holders of which something is known."""
    collected: Collected = []
    for family in families:
        known = sorted(getattr(snapshot, family.fact).items()) if snapshot.up else []
        values = ((pid, family.read(each)) for pid, each in known)
        collected.append((family, [((str(pid),), value) for pid, value in values if value is not None]))
    return collected


def split_largest(
    holdings: tuple[Holding, ...], most: int
) -> tuple[tuple[Holding, ...], tuple[Holding, ...]]:
    """Return the ``most`` largest of a device's holdings, largest first, and the rest; 0 means all."""
    return (holdings[:most], holdings[most:]) if most else (holdings, ())
