"""Count the messages of nine disasters by a real Alertmanager: ``python -m tests.lab.disasters``.

All that fires in the course of a disaster is sent at once to the shipped configuration; a message is a group
of a receiver in which an alert is not inhibited. The tenth is of real minutes: ``tests.lab.restarts``.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.integration.alerts.test_delivery import post, running
from tests.support.alerts.cases import DEVICE
from tests.support.alerts.holder_cases import IDLE, LAST_OOM
from tests.support.alerts.nodes import Holder, Node, Values, changing_at
from tests.support.alerts.promtool import ALERTS, STEP, alerts_over_time
from tests.support.faults.evaluation import Manager
from tests.support.requirements import VERSIONS
from tests.support.waiting import wait_until

UP = f"vramledger_device_up{DEVICE}"
STAMP = "vramledger_sample_timestamp_seconds{NODE}"
FULL = {"vramledger_storage_up{NODE}": changing_at(5, 1, 0)}
MINUTES = 60.0


def nodes(count: int, of: int, node: Node) -> list[Node]:
    """Return a fleet in which so many nodes have a fault."""
    return [node] * count + [Node([replace(IDLE, state="active")])] * (of - count)


def away(begins: Iterable[int], lasting: float) -> list[Node]:
    """Return nodes whose exporters do not answer for a while, each from its own minute on."""
    return [Node(missing=_between(begin, begin + lasting)) for begin in begins]


def _between(begin: float, end: float) -> Callable[[float], bool]:
    return lambda minute: begin <= minute < end


def _job(number: int) -> Node:
    oom: dict[str, Values] = {
        f'{LAST_OOM}{{NODE,pid="9",framework="jax",verdict="too_big"}}': changing_at(20, None, 1190)
    }
    return Node([Holder(9, 30, user="ann", owner_type="slurm", owner=f"17_{number}")], extra=oom)


DISASTERS = {
    "a rack of 16 of 64 nodes without power": [
        *away([5] * 16, 999), *nodes(0, 48, Node())
    ],
    "a driver update gone wrong on 64 of 64 nodes": nodes(
        64, 64, Node([IDLE], driver_up=changing_at(5, 1, 0))
    ),
    "200 jobs of an array out of memory": [_job(each) for each in range(200)],
    "a roll-out of the exporter, a node a minute, each away for 3 minutes": away(range(5, 45), 3),
    "the network to 30 of 64 nodes split for 20 minutes": [
        *away([5] * 30, 20), *nodes(0, 34, Node())
    ],
    "64 clocks set forward by an hour": nodes(
        64, 64, Node([replace(IDLE, since=-15)], extra={STAMP: lambda m: 60 * m + 3600 * (m >= 10)})
    ),
    "the storage full on 64 of 64 nodes": nodes(64, 64, Node(extra=FULL)),
    "a node drained and switched off": nodes(1, 64, Node(missing=lambda m: m >= 5)),
    "one GPU of 64 that comes and goes": nodes(
        1, 64, Node([IDLE], extra={UP: lambda m: float(m % 6 < 4)})
    ),
}  # fmt: skip
"""Minutes of fleets. ``test_many.py`` and ``test_false_pages.py`` have a test of most of them."""


def messages(fleet: list[Node], folder: Path) -> tuple[int, Counter[str]]:
    """Return how many alerts fired on the nodes, and the messages by receiver."""
    named = {f"gpu-{number}:10839": (node, MINUTES) for number, node in enumerate(fleet)}
    fired = [
        {"labels": {name: value for name, value in key if name not in {"__name__", "alertstate"}}}
        for key in alerts_over_time(named, range(int(MINUTES)), folder, VERSIONS[0], Manager(STEP))
        if dict(key)["alertstate"] == "firing"
    ]
    config = yaml.safe_load((ALERTS / "alertmanager.yml").read_text(encoding="utf-8"))
    with running(VERSIONS[0], folder, yaml.safe_dump(config)) as url:
        wait_until(lambda: post(url, *fired), "Alertmanager")

        def groups(inhibited: str) -> list[dict[str, Any]]:
            with urllib.request.urlopen(f"{url}/api/v2/alerts/groups?inhibited={inhibited}") as answer:  # noqa: S310
                found: list[dict[str, Any]] = json.load(answer)
                return found

        def all_known() -> bool:
            known = {str(one["labels"]) for each in groups("true") for one in each["alerts"]}
            return len(known) >= len(fired)

        wait_until(all_known, "all alerts")
        return len(fired), Counter(each["receiver"]["name"] for each in groups("false") if each["alerts"])


def main() -> None:
    """Print a row for each disaster."""
    print("| disaster | alerts | messages |\n|---|--:|---|")
    for name, fleet in DISASTERS.items():
        with tempfile.TemporaryDirectory(prefix="disaster-") as folder:
            count, sent = messages(fleet, Path(folder))
        told = {receiver: number for receiver, number in sorted(sent.items()) if receiver != "discard"}
        print(
            f"| {name} | {count} | {', '.join(f'{r} {n}' for r, n in told.items()) or 'none'} |", flush=True
        )


if __name__ == "__main__":
    main()
