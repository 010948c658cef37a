"""Join what collectors read of holders to the holders, for every fact that the model declares in one way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vramledger.logs import COLLECTOR_FAILED, FailureStreaks
from vramledger.model.holder_facts import HOLDER_FACTS, HolderFact
from vramledger.model.reading import ProcessRow, Reading
from vramledger.model.snapshot import DeviceSnapshot

_FAILING = FailureStreaks(COLLECTOR_FAILED)


def join_holder_facts(
    reading: Reading,
    rows: Mapping[int, ProcessRow],
    devices: Iterable[DeviceSnapshot],
    reused: Collection[int],
) -> dict[str, Any]:
    """Return the facts of holders by pid, and the collectors: one fails if its facts cannot be joined."""
    collectors = dict(reading.collectors)
    joined: dict[str, Any] = {"collectors": collectors}
    told = [(fact, values) for fact in HOLDER_FACTS if (values := getattr(reading, fact.field))]
    if not told:
        return joined
    held: dict[int, int] = {}
    for device in devices:
        for holding in device.holdings:
            held[holding.pid] = max(held.get(holding.pid, 0), holding.held or 0)
    present = {
        (pid, rows[pid].start): most for pid, most in held.items() if pid in rows and pid not in reused
    }
    for fact, values in told:
        try:
            joined[fact.field] = _join(fact, values, present)
        except Exception as error:  # noqa: BLE001 only this fact is not known
            _FAILING.failed(fact.collector, error)
            collectors[fact.collector] = False, collectors.get(fact.collector, (False, 0.0))[1]
        else:
            _FAILING.succeeded(fact.collector)
    return joined


def _join(fact: HolderFact, values: Sequence[Any], held: Mapping[tuple[int, int], int]) -> dict[int, Any]:
    within = getattr(fact.kind, "within", None)
    known = ((each, most) for each in values if (most := held.get((each.pid, each.start))) is not None)
    found = (each if within is None else within(each, most) for each, most in known)
    return {each.pid: each for each in found if each is not None}
