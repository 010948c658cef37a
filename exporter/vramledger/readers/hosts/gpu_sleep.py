"""Tell whether a GPU sleeps, without waking it: by the kernel's runtime power management.

By NVIDIA's documentation of Runtime D3 a GPU without work is switched off, and whatever asks it something
switches it on: each query of NVML, and nvidia-smi. Files of sysfs and of the driver's procfs do not. From
documentation, not seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from vramledger.model.reading import DeviceReading

REST: Final = 30.0
"""Seconds after which an unused GPU that can sleep is not asked, and for how many: commands get answers."""

_ENABLED: Final = "Runtime D3 status:"


class KnownGpu(NamedTuple):
    """What the driver says of a GPU that it need not wake for it; None for what it does not know."""

    uuid: str | None = None
    name: str | None = None
    minor: int | None = None


class GpuSleep:
    """Whether the GPUs of a host sleep, or could."""

    def __init__(self, procfs: str = "/proc", rootfs: Path = Path("/")) -> None:
        self._gpus = Path(procfs) / "driver/nvidia/gpus"
        below = rootfs / "sys/bus/pci/devices"
        # A container may have the host's files without its mounts; the kernel shows its devices everywhere.
        self._devices = below if below.is_dir() else Path("/sys/bus/pci/devices")

    def address(self, index: int, count: int) -> str | None:
        """Return the PCI address of a GPU by NVML's index, whose order is that of the bus."""
        try:
            addresses = sorted(each.name for each in self._gpus.iterdir())
        except OSError:
            return None
        return addresses[index] if index < len(addresses) == count else None

    def known(self, address: str) -> KnownGpu:
        """Return what the driver says of a GPU in its procfs; a GPU that was never used has no UUID there."""
        lines = (line.partition(":") for line in _read(self._gpus / address / "information").splitlines())
        fields = {name.strip(): value.strip() for name, _, value in lines}
        uuid, minor = fields.get("GPU UUID", ""), fields.get("Device Minor", "")
        return KnownGpu(
            uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
            fields.get("Model") or None,
            int(minor) if minor.isdigit() else None,
        )

    def is_asleep(self, address: str) -> bool:
        return _read(self._devices / address / "power/runtime_status").strip() == "suspended"

    def may_sleep(self, address: str) -> bool:
        """Tell whether a GPU is set up to sleep while programs have it open; a server's GPU is not."""
        if _read(self._devices / address / "power/control").strip() != "auto":
            return False
        lines = _read(self._gpus / address / "power").splitlines()
        status = next((line for line in lines if line.startswith(_ENABLED)), "")
        return "Enabled (fine-grained)" in status


class SleepWatch:
    """Say when not to ask one GPU."""

    def __init__(self, gpus: GpuSleep, address: str | None) -> None:
        self._gpus = gpus
        self.address = address  # its PCI address, None while it is not known
        self._rests_until = float("-inf")
        self._unused_since: float | None = None

    def is_asleep(self) -> bool:
        return self.address is not None and self._gpus.is_asleep(self.address)

    def known(self) -> KnownGpu:
        return KnownGpu() if self.address is None else self._gpus.known(self.address)

    def leaves_alone(self, monotonic: float) -> bool:
        """Tell whether it sleeps, or is given the time to fall asleep."""
        if self.is_asleep():
            self._rests_until = float("-inf")  # who wakes it is seen at once
            return True
        return monotonic < self._rests_until

    def plan_rest(self, reading: DeviceReading, monotonic: float) -> None:
        """Do not ask it for a while if it can sleep and nobody uses it: each query keeps it awake."""
        if reading.processes != () or (reading.utilization or {}).get("gpu"):
            self._unused_since = None
            return
        self._unused_since = monotonic if self._unused_since is None else self._unused_since
        due = monotonic - self._unused_since >= REST
        if due and self.address is not None and self._gpus.may_sleep(self.address):
            self._rests_until = monotonic + REST


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
