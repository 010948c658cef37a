"""Report a failed allocation of a framework that tells nobody of it, from the error that ended the program.

The interpreter keeps the error that nobody caught until its exit. So no hook is needed, and none is replaced.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator

from vramledger_agent.frameworks.provider import OutOfMemoryMessage, Provider
from vramledger_agent.oom.report_file import traceback_lines, write_report
from vramledger_agent.oom.verdict import TOO_BIG, UNKNOWN
from vramledger_agent.protocol.frameworks import POOL_FIGURES

MAX_ERRORS = 50
MAX_MESSAGE_CHARS = 2000


def report_uncaught(
    providers: Iterable[Provider], directory: str | None, visible: dict[str, str | None]
) -> dict[str, object] | None:
    """Write a report if an out-of-memory error has ended the program; return what the exporter is told."""
    if hasattr(sys, "ps1"):  # somebody types: an error ends nothing
        return None
    ended_by = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if ended_by is None:
        return None
    listed = list(providers)
    for error in _chain(ended_by):
        for provider in listed:
            message = provider.recognise_out_of_memory(error)
            if message is not None:
                return _report(provider, error, message, directory, visible)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting = [error]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_ERRORS:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        further = [each.__cause__, None if each.__suppress_context__ else each.__context__]
        members = getattr(each, "exceptions", None)  # of a group; a program may use the name for anything
        further += members if isinstance(members, (tuple, list)) else ()
        waiting += [one for one in further if isinstance(one, BaseException)]


def _report(
    provider: Provider,
    error: BaseException,
    message: OutOfMemoryMessage,
    directory: str | None,
    visible: dict[str, str | None],
) -> dict[str, object]:
    entry = provider.read() or {}
    listed = entry.get("devices")
    devices = listed if isinstance(listed, list) else []
    device: dict[str, object] = next((each for each in devices if each.get("ordinal") == message.ordinal), {})
    limit = device.get("limit")
    too_big = message.requested is not None and isinstance(limit, int) and message.requested > limit
    told: dict[str, object] = {
        "time": time.time(),
        "framework": provider.name,
        "ordinal": message.ordinal,
        "requested": message.requested,
        "verdict": TOO_BIG if too_big else UNKNOWN,
    }
    path = write_report(
        {
            "version": 1,
            **told,
            "pid": os.getpid(),
            "framework_version": entry.get("version"),
            "visible": visible,
            "capacity": limit,
            "limited": limit is not None,
            "pool": {
                **{name: device[name] for name in POOL_FIGURES if device.get(name) is not None},
                "reserved": device.get("pool"),
                "active": device.get("in_use"),
            },
            "stack": {"phase": None, "frames": traceback_lines(error.__traceback__)},
            "message": str(error)[:MAX_MESSAGE_CHARS],
        },
        directory,
    )
    told = {name: value for name, value in told.items() if value is not None}
    return told if path is None else {**told, "report": path}
