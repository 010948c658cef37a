"""What to do about a holding, or about memory that nobody holds: one sentence for each case, written once.

The page, ``vramledger show`` and the JSON take their words from here. No sentence tells to end a program
without asking whoever it belongs to, and none calls for anything where nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from vramledger.agent_protocol.frameworks import FRAMEWORKS_BY_NAME
from vramledger.model.policy import NO_POLICY, Policy
from vramledger.model.snapshot import DeviceSnapshot, Holding, ProcessSnapshot, State

_END_IT = "`vramledger end --pid {pid} --yes`"

_BY_STATE: Mapping[State, str] = {
    State.DEAD: "The driver has not given it back. When the GPU has no other holders: "
    "`nvidia-smi --gpu-reset -i {gpu}`; else drain the node and restart it.",
    State.ZOMBIE: f"It has exited and the driver still holds its bytes: {_END_IT}. If they stay, look for "
    "NVRM and Xid in the kernel log.",
    State.ORPHANED: f"Nobody waits for its result any more. Ask its user, then {_END_IT}.",
    State.STOPPED: f"Let it go on with `kill -CONT {{pid}}`, or end it: {_END_IT}.",
    State.UNKNOWN: "Run the exporter in the host's PID namespace; `vramledger doctor` says how.",
}

_BY_POLICY = {
    "preallocate": "It took the device at its start, whatever it needs; for the next start: {remedy}.",
    "fraction": "It took its share at its start, whatever it needs; for the next start: {remedy}.",
    "caching": "What it has only cached comes back with {remedy} in the program.",
}
"""What an idle holder's framework can do, where its declaration has a remedy."""

_GROWN = "Its pool never shrinks; only its end gives the memory back."


def remedy(holding: Holding, process: ProcessSnapshot | None, gpu: int) -> str | None:
    """Say what to do about a holding; None when nothing calls for anything.

    Args:
        holding: the bytes and why they are held.
        process: what is known of the holder, None when /proc does not show it.
        gpu: index of the device.
    """
    if holding.state is State.ACTIVE:
        return None
    if holding.state is State.IDLE:
        return _for_idle(holding.pid, process)
    return _BY_STATE[holding.state].format(pid=holding.pid, gpu=gpu)


def _for_idle(pid: int, process: ProcessSnapshot | None) -> str:
    policy: Policy = process.policy if process is not None else NO_POLICY
    facts = process.facts if process is not None else None
    owner = facts.owner if facts is not None else None
    if owner is not None and owner.type == "notebook":
        first = "Ask its user to shut the notebook's kernel down."
    else:
        first = f"Ask its user whether it is still needed; if not: {_END_IT.format(pid=pid)}."
    framework = FRAMEWORKS_BY_NAME.get(policy.framework)
    remedy = framework.remedies.get(policy.policy) if framework is not None else None
    more = _GROWN if policy.policy == "growth" else None
    if remedy is not None:
        more = _BY_POLICY[policy.policy].format(remedy=remedy)
    return f"{first} {more}" if more else first


def about_unattributed(device: DeviceSnapshot) -> str | None:
    """Explain a device's unattributed bytes as far as is known; None when there are none."""
    ledger, hidden = device.ledger, device.hidden
    if ledger is None or not ledger.unattributed:
        return None
    what = "Used, but NVML lists no process that holds it."
    if hidden is None:
        return (
            f"{what} Whether a hidden process has the device open is not known here; see `vramledger doctor`."
        )
    able = [each for each in hidden if each.kind in ("cuda", "unknown")]
    if able:
        pids = ", ".join(str(each.pid) for each in able[:5])
        return f"{what} Hidden processes that may hold it: pid {pids}. End them as soon as their users agree."
    return f"{what} No hidden process has the device open: it is the driver's own, or managed memory."


def about_hidden(kind: str) -> str:
    """Explain a process that has the device open and is not in NVML's list (``HiddenHolder.kind``)."""
    return {
        "cuda": "It has CUDA loaded on this device, and NVML does not list it: it may hold memory that shows "
        "as unattributed.",
        "monitor": "It only reads NVML, as nvidia-smi does, and holds no memory.",
        "inherited": "It has the device open from its parent, which NVML lists; it keeps the device busy "
        "after the parent's end.",
    }.get(kind, "It has the device open, and we may not see what for.")
