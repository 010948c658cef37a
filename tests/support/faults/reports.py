"""What the agents of a simulated host report, as the series of the metric contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from tests.support.host.model import CONTEXT, EPOCH, Host
from vramledger.agent_protocol.frameworks import POOL_FIGURES, REPORTING_FRAMEWORKS
from vramledger.model.snapshot import Snapshot

Series = tuple[str, float]


def series(host: Host, now: float) -> Iterator[Series]:
    """Yield every series of the agents and its value at a moment."""
    stamp = host.clock(now)
    for process in host.living(now):
        gone = process.met("dead", now) or process.met("stopped", now)
        if not process.agent or gone or any(host.present("blind", now)):
            continue
        speaks = not process.met("silent", now)
        pid = f'pid="{process.pid}"'
        yield f"vramledger_agent_up{{{pid}}}", float(speaks)
        yield (
            f"vramledger_agent_report_timestamp_seconds{{{pid}}}",
            min(stamp, EPOCH + process.fates.get("silent", inf)),
        )
        if not speaks:
            continue
        for index in process.places:
            card, use = host.gpus[index], host.uses.get((process.pid, index))
            lost = any(fault.gpu == index for fault in host.present("device lost", now))
            if use is None or lost:
                continue
            labels = f'gpu="{card.index}",{pid},uuid="{card.uuid(now)}"'
            pool = use.agent.get("torch_reserved_bytes", use.memory - CONTEXT)
            if use.agent:
                yield from _served(labels, process.framework, use.agent, use.memory - pool)


def labelled(snapshot: Snapshot, said: Mapping[int, Mapping[str, float]], stamp: float) -> Iterator[Series]:
    """Yield the series of what programs said of themselves, with the labels of where they hold memory."""
    for device in snapshot.devices:
        index, uuid = device.key
        for holding in device.holdings:
            figures = said.get(holding.pid)
            if figures is None or holding.memory is None:
                continue
            pid = f'pid="{holding.pid}"'
            labels = f'gpu="{index}",{pid},uuid="{uuid}"'
            yield f"vramledger_agent_up{{{pid}}}", 1.0
            yield f"vramledger_agent_report_timestamp_seconds{{{pid}}}", stamp
            yield from _served(labels, "torch", figures, holding.memory - figures["torch_reserved_bytes"])


def _served(labels: str, framework: str, told: Mapping[str, float], overhead: float) -> Iterator[Series]:
    """Yield what the exporter serves of a framework's figures on a device, and what follows from them."""
    renamed = REPORTING_FRAMEWORKS[framework].general
    own = {
        f"framework_{name}_bytes": told.get(f"{framework}_{renamed.get(name, name)}_bytes")
        for name in POOL_FIGURES
    }
    figures = {**{name: value for name, value in own.items() if value is not None}, **told}
    for name, value in figures.items():
        more = f',framework="{framework}"' if name.startswith("framework_") else ""
        yield f"vramledger_{name}{{{labels}{more}}}", value
    yield f"vramledger_framework_overhead_bytes{{{labels}}}", overhead
