"""Say what to do about a holding, about unattributed memory, or a GPU that the driver says cannot be used.

The page, ``vramledger show`` and the JSON use these sentences, each written once. A sentence that says to end
an idle or orphaned program also says to ask its user first. After some errors the driver answers memory and
process lists, refuses temperature, power and clocks, and every new program fails. A row that waits for its
replacement, or cannot get one, is not among these: by NVIDIA's documentation new work runs beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vramledger.accounting.holders.states import FROZEN
from vramledger.model.device_signs import beyond_contexts
from vramledger.model.reading import ASLEEP, UNIFIED, DeviceReading
from vramledger.model.snapshot import (
    NO_POLICY,
    DeviceSnapshot,
    Holding,
    LeftBytes,
    Policy,
    ProcessSnapshot,
    State,
)
from vramledger_agent.printable import gib
from vramledger_agent.protocol.frameworks import FRAMEWORKS_BY_NAME

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


_GIB = 2**30
SHOWN_MIN = 128 * 2**20
"""The smallest difference between the ends of a range that is shown."""

PIDS_SHOWN = 5
_END_IT = "`vramledger end --pid {pid}`"
"""A dry run: it says what it would end and why, and how to do it. Who copies a hint ends nothing by that."""

_BY_STATE: Mapping[State, str] = {
    State.DEAD: "The driver has not freed it. When the GPU has no other holders: `nvidia-smi "
    "--gpu-reset -i {gpu}`; otherwise drain the node and restart it.",
    State.ZOMBIE: f"It has exited and the driver still holds its bytes: {_END_IT} says what would end it. "
    "If they stay after that, look for NVRM and Xid in the kernel log.",
    State.STUCK: "No signal ends it, and no scheduler can free its memory. Look for NVRM and Xid in the "
    "kernel log; drain the node, then reset the GPU (`nvidia-smi --gpu-reset -i {gpu}`) or restart the node.",
    State.ORPHANED: f"No program waits for its result any more. Ask its user; then {_END_IT} says what would "
    "be ended, and how.",
    State.STOPPED: f"Ask its user why it is stopped. `kill -CONT {{pid}}` continues it; {_END_IT} says "
    "how to end it.",
    State.UNKNOWN: "The exporter may not see it; `vramledger doctor` says why, and what would change that.",
}

_KEPT = f"Hidden pid {{pids}} has the device open and may keep it, as a forked child does: {_END_IT} first."

_WORKING_ORPHAN = (
    f"It still works, although the program that started it has ended: ask its user. {_END_IT} says how to "
    "end it."
)

_MAY_BE_WANTED = (
    f"The program that started it has ended, but somebody may still want it: ask its user. {_END_IT} says "
    "how to end it."
)

_BY_POLICY = {
    "preallocate": "It took the device at its start, even if it needs little; for the next start: {remedy}.",
    "fraction": "It took its share at its start, even if it needs little; for the next start: {remedy}.",
    "caching": "{remedy} in the program frees what it has only cached.",
}
"""What an idle holder's framework can do, if its declaration has a remedy."""

_FRAGMENTED_BYTES = 256 * 2**20
_FRAGMENTED_SHARE = 0.1
"""The bytes and the share of the allocator's memory between tensors from which on a setting is worth it."""

_GROWN = "Its pool never shrinks; only the end of the program frees the memory."


def remedy(holding: Holding, process: ProcessSnapshot | None, device: DeviceSnapshot) -> str | None:
    """Say what to do about a holding; None when nothing needs to be done."""
    gpu = device.reading.index
    if holding.state is State.ACTIVE:
        return None
    if holding.state is State.IDLE:
        return _for_idle(holding.pid, process)
    if holding.state is State.STOPPED and holding.why == FROZEN:
        return "Ask its user why its container is paused, or its cgroup frozen: no signal continues it."
    if holding.state is State.ORPHANED and (holding.working or not holding.left_over):
        text = _WORKING_ORPHAN if holding.left_over else _MAY_BE_WANTED
        return text.format(pid=holding.pid)
    if holding.state in (State.DEAD, State.ZOMBIE) and (pids := able_hidden(device)):
        kept = _KEPT.format(pids=", ".join(map(str, pids[:PIDS_SHOWN])), pid=pids[0])
        return f"{kept} {_BY_STATE[State.DEAD].format(gpu=gpu)}" if holding.state is State.DEAD else kept
    return _BY_STATE[holding.state].format(pid=holding.pid, gpu=gpu)


def able_hidden(device: DeviceSnapshot) -> list[int]:
    """Return the hidden processes that may keep the memory of a dead one, such as its forked children.

    Measured on an H100: a child that a killed program had forked kept its 4 GiB by the inherited files alone,
    and NVML went on listing the dead pid until the child ended.
    """
    return [each.pid for each in device.hidden or () if each.kind in ("cuda", "unknown")]


def _for_idle(pid: int, process: ProcessSnapshot | None) -> str:
    policy: Policy = process.policy if process is not None else NO_POLICY
    facts = process.facts if process is not None else None
    owner = facts.owner if facts is not None else None
    if owner is not None and owner.notebook:
        first = "Ask its user to shut the notebook's kernel down."
    else:
        ending = _END_IT.format(pid=pid)
        first = f"Ask its user whether the program is still needed; if not, {ending} says how to end it."
    framework = FRAMEWORKS_BY_NAME.get(policy.framework)
    remedy = framework.remedies.get(policy.policy) if framework is not None else None
    more = _GROWN if policy.policy == "growth" else None
    if remedy is not None:
        more = _BY_POLICY[policy.policy].format(remedy=remedy)
    return f"{first} {more}" if more else first


def allocator_advice(reserved: int | None, between: int | None, settings: Mapping[str, str]) -> str | None:
    """Say what a setting of PyTorch's allocator would free; None where nothing, or it is set already."""
    if not reserved or not between or settings.get("expandable_segments") == "true":
        return None
    if between < _FRAGMENTED_BYTES or between < _FRAGMENTED_SHARE * reserved:
        return None
    known = "" if "expandable_segments" in settings else ", if that is not set already,"
    limited = settings.get("max_split_size_mb", "unlimited")
    instead = "" if limited == "unlimited" else f" instead of max_split_size_mb:{limited}"
    return (
        f"expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF{instead} at the next start{known} makes a part "
        f"of the {between / 2**30:.2f} GiB usable that lie free between tensors"
    )


def about_unattributed(device: DeviceSnapshot) -> str | None:
    """Explain a device's unattributed bytes as far as possible; None when there are none."""
    ledger, hidden = device.ledger, device.hidden
    if ledger is None or not ledger.unattributed:
        return None
    what = f"Used, but NVML lists no process that holds it.{_tried(device)}"
    if hidden is None:
        return (
            f"{what} Whether a hidden process has the device open is not known here; see `vramledger doctor`."
        )
    if able := able_hidden(device):
        pids = ", ".join(map(str, able[:5]))
        return f"{what} Hidden processes that may hold it: pid {pids}. End them when their users agree."
    return f"{what} No hidden process has the device open: it is the driver's own, or was not freed."


def about_operating_system(device: DeviceSnapshot) -> str | None:
    """Explain what the operating system holds of a device's memory; None when it holds nothing there."""
    if device.ledger is None or not device.ledger.operating_system:
        return None
    if device.reading.memory_kind == UNIFIED:
        return (
            "This GPU uses the host's memory. These bytes are those of the kernel and of programs that NVML "
            "does not list. What the kernel can take back from its caches counts as free."
        )
    node = device.reading.node
    text = (
        "The operating system manages this GPU's memory as a NUMA node; no GPU program is charged for these."
    )
    if node is None:
        return f"{text} What the kernel uses them for is not readable here."
    files = {"page cache, shared memory and tmpfs": node.file}
    if node.shared is not None:
        files = {"page cache": node.file - node.shared, "shared memory and tmpfs": node.shared}
    parts = {**files, "memory of programs": node.anonymous, "the kernel's own": node.kernel}
    named = ", ".join(f"{what} {size / _GIB:.2f} GiB" for what, size in parts.items())
    return f"{text} The kernel counts: {named}. Pages that stay after a program's end are the rest."


def _tried(device: DeviceSnapshot) -> str:
    """Say what else was looked for, where the bytes are more than contexts leave: mappings and handles."""
    if device.ledger is None or not beyond_contexts(device.ledger.unattributed, len(device.holdings)):
        return ""
    able = [str(each.pid) for each in device.holdings if each.uncharged is not None]
    parts = [" No holder is known to map as much managed memory."]
    if able:
        parts = [f" By its mappings pid {', '.join(able[:5])} can have a part of it as managed memory."]
    for each in device.left:
        parts.append(f" Some of it was {each.why}.")
    return "".join(parts)


def about_hidden(kind: str) -> str:
    """Explain a process that has the device open and that NVML does not list (``HiddenHolder.kind``)."""
    return {
        "cuda": "It has CUDA loaded on this device, and NVML does not list it: it may hold memory that shows "
        "as unattributed.",
        "monitor": "It only reads NVML, as nvidia-smi does, and holds no memory.",
        "inherited": "It has the device open from its parent, which NVML lists; it keeps the device "
        "open after the parent's end.",
    }.get(kind, "It has the device open, and we may not see why.")


def left_text(left: LeftBytes) -> str:
    """Say what an ended holder has left behind, and who can have it."""
    amount = gib(left.most) if left.most - left.least < SHOWN_MIN else f"up to {gib(left.most)}"
    pids = ", ".join(map(str, left.pids[:PIDS_SHOWN])) + (", …" if len(left.pids) > PIDS_SHOWN else "")
    heirs = f"held by pid {pids}" if left.pids else "and no process that NVML lists can have them"
    if len(left.pids) > 1:
        heirs = f"held by one or several of pid {pids}"
    return f"{amount} {left.why}; {heirs}"
