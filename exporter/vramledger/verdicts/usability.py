"""Tell whether the driver itself says that a GPU cannot be used, whatever it still answers.

After some errors the driver answers memory and process lists, refuses temperature, power and clocks, and
every new program fails. A row that waits for its replacement, or cannot get one, is not among these: by
NVIDIA's documentation new work runs beside it. From documentation, not seen.
"""

from __future__ import annotations

from typing import NamedTuple

from vramledger.model.reading import ASLEEP, DeviceReading

_FIRST_STEPS = {
    "gpu_reset": "end its programs, then `nvidia-smi --gpu-reset`",
    "node_reboot": "restart the node",
    "drain_p2p": "end the programs that use its peers, then look again",
    "drain_and_reset": "end the programs that use it and its peers, then `nvidia-smi --gpu-reset`",
    "recover_imex_domain": "recover the IMEX domain",
    "bus_reset": "reset its PCIe bus, or restart the node",
    "system_reboot": "restart the node",
}


class Unusable(NamedTuple):
    """What the driver says against using a GPU, and the first step."""

    reason: str
    first_step: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.first_step}"


def why_unusable(reading: DeviceReading) -> Unusable | None:
    """Return what the driver says against using a GPU; None where it says nothing."""
    if reading.reset_required:
        return Unusable(f"the driver refuses queries ({reading.words})", _FIRST_STEPS["gpu_reset"])
    actions = reading.hardware.get("device_recovery_action")
    if not isinstance(actions, dict):
        return None
    wanted = next((name for name in actions if name != "none"), None)
    if wanted is None:
        return None
    return Unusable(f"the driver asks for {wanted}", _FIRST_STEPS.get(wanted, "see `nvidia-smi -q`"))


def words_of_error(reading: DeviceReading) -> str:
    """Return why a device gives no data, with the driver's own words."""
    if reading.error == ASLEEP:
        return "asleep: it was not asked, as this would wake it; what it holds is not known"
    return f"no data: {reading.error}" + (f" ({reading.words})" if reading.words else "")
