"""Join what vLLM servers say of KV caches to the holders."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from vramledger.model.reading import KvCache, ProcessRow
from vramledger.model.snapshot import DeviceSnapshot


def join_kv_caches(
    told: Sequence[KvCache],
    rows: Mapping[int, ProcessRow],
    devices: Iterable[DeviceSnapshot],
    reused: Collection[int],
) -> dict[int, KvCache]:
    """Return the KV caches by holder; a size that is larger than what the holder holds is left out.

    A server is told a size before it takes it. So at its start, and for its processes that have no cache, the
    size is not that of the holding.
    """
    if not told:  # without --collector.vllm, in every sample
        return {}
    held: dict[int, int] = {}
    for device in devices:
        for holding in device.holdings:
            held[holding.pid] = max(held.get(holding.pid, 0), holding.held or 0)
    found = {}
    for each in told:
        row = rows.get(each.pid)
        if row is None or row.start != each.start or each.pid in reused or each.pid not in held:
            continue
        fits = each.memory is not None and each.memory <= held[each.pid]
        known = each if fits else each._replace(memory=None)
        if known[2:] != (None, None, None):
            found[each.pid] = known
    return found
