"""What the agents of a simulated host report, as the series of the metric contract."""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.world import CONTEXT, EPOCH, Host

Series = tuple[str, float]


def series(host: Host, now: float) -> Iterator[Series]:
    """Yield every series of the agents and its value at a moment."""
    stamp = EPOCH + now + host.skew
    for process in host.living(now):
        if not process.agent or now >= min(process.dead, process.stopped) or not host.visible:
            continue
        speaks = now < process.silent
        pid = f'pid="{process.pid}"'
        yield f"vramledger_agent_up{{{pid}}}", float(speaks)
        yield f"vramledger_agent_report_timestamp_seconds{{{pid}}}", min(stamp, EPOCH + process.silent)
        if not speaks:
            continue
        for index in process.places:
            card, use = host.cards[index], host.uses.get((process.pid, index))
            if use is None or card.lost[0] <= now < card.lost[1]:
                continue
            labels = f'gpu="{card.index}",{pid},uuid="{card.uuid(now)}"'
            for name, value in use.agent.items():
                yield f"vramledger_{name}{{{labels}}}", value
            pool = use.agent.get("torch_reserved_bytes", use.memory - CONTEXT)
            if use.agent:
                yield f"vramledger_framework_overhead_bytes{{{labels}}}", use.memory - pool
