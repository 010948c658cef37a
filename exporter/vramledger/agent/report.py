"""Build one report: the full state each time, in the wire format's version 1."""

from __future__ import annotations

import json
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vramledger.agent.worker import Worker

VERSION = 1
LONGEST = 65536
PYTHON = sys.version.split(maxsplit=1)[0]


def build(worker: Worker) -> dict[str, object]:
    """Return the report of this process as it is now; what is not known is not in it."""
    return known(
        {
            "version": VERSION,
            "sequence": worker.sequence,
            "dropped": worker.connection.dropped if worker.connection is not None else 0,
            "agent": getattr(sys.modules.get("vramledger"), "__version__", None),
            "interval": worker.settings.interval,
            "monotonic": time.clock_gettime(time.CLOCK_BOOTTIME),
            "python": PYTHON,
            "visible": dict(worker.visible),
            "consents": sorted(worker.desk.answers) if worker.desk is not None else [],
            "errors": dict(worker.errors),
            "collector": known(worker.collector.entry()),
            "frameworks": [known(entry) for entry in worker.entries()],
            "last_oom": worker.last_oom,
        }
    )


def known(entry: dict[str, object]) -> dict[str, object]:
    """Leave out what is None: not known is never zero."""
    return {name: value for name, value in entry.items() if value is not None}


def encode(report: dict[str, object]) -> bytes:
    """Return the message, without the frameworks' figures if it would be too long for the wire."""
    message = json.dumps(report, separators=(",", ":")).encode()
    if len(message) <= LONGEST:
        return message
    return json.dumps({**report, "frameworks": []}, separators=(",", ":")).encode()
