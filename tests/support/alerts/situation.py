"""A situation: what there is on a node or two, and all that is told of it; and the evaluation of many."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from tests.support.alerts.nodes import Node
from tests.support.alerts.parts import with_labels
from tests.support.alerts.promtool import STEP, alerts_over_time
from tests.support.faults.evaluation import Manager

_TOLD = re.compile(r"([\w@-]+)(?: ([\d.]+)\.\.([\d.]+))?(?: to ([\d.]+)\.\.([\d.]+))?(?: x(\d+))?")


@dataclass(frozen=True)
class Situation:
    """What there is for some minutes, in words what is wanted, and all that is told of it meanwhile.

    ``told`` names alerts with their severity's letter: ``GpuDeviceLost-p 31..34 to 60..80 x2`` fires for two
    sets of labels, begins and ends between these minutes, and has no pause. Without an end it lasts to the
    last minute; without minutes any will do. With ``@7`` it is about a pid. What is not named must not fire.
    """

    wanted: str
    node: Node
    told: str = ""
    minutes: float = 120
    beside: Node | None = None

    def apart(self) -> "Situation":
        """Return the situation in a cluster of its own, where its nodes may have the names of others'."""
        own = with_labels(cluster=self.wanted)
        beside = self.beside and replace(self.beside, relabel=own)
        return replace(self, node=replace(self.node, relabel=own), beside=beside)


Told = Mapping[str, Mapping[str, list[float]]]
"""At which minutes each alert fires, by its labels."""


def what_is_told(situations: Sequence[Situation], folder: Path, version: str, step: int) -> Sequence[Told]:
    """Return what is told of each situation, by a Prometheus that watches them all."""
    nodes = {f"n{number}": (each.node, each.minutes) for number, each in enumerate(situations)}
    nodes |= {f"n{at}b": (each.beside, each.minutes) for at, each in enumerate(situations) if each.beside}
    times = range(0, round(max(each.minutes for each in situations)) + 1, step // 60)
    found: list[dict[str, dict[str, list[float]]]] = [{} for _ in situations]
    for key, seen in alerts_over_time(nodes, times, folder, version, Manager(step)).items():
        labels = dict(key)
        name = labels.get("instance", "")
        if labels["alertstate"] != "firing" or name not in nodes:
            continue  # it is about many nodes
        alert = f"{labels['alertname']}-{labels['severity'][0]}"
        own = ",".join(f"{label}={text}" for label, text in sorted(labels.items()))
        minutes = [at / 60 for at in seen if at / 60 <= nodes[name][1]]
        if minutes:
            found[int(name.strip("nb"))].setdefault(alert, {})[own] = minutes
    return found


def complaints(situation: Situation, told: Told) -> list[str]:
    """Return what is told that is not wanted, and the other way round."""
    wanted = [_TOLD.fullmatch(each) for each in situation.told.split(", ") if each]
    left, found = {alert: dict(of) for alert, of in told.items()}, []
    for each in wanted:
        assert each is not None, situation.told
        alert, pid = each[1].partition("@")[::2]
        mine = {
            own: left[alert].pop(own) for own in [*left.get(alert, ())] if not pid or f",pid={pid}," in own
        }
        spans = {own: (minutes[0], minutes[-1]) for own, minutes in mine.items()}
        ends = (float(each[4]), float(each[5])) if each[4] else (int(situation.minutes),) * 2
        if len(mine) != int(each[6] or 1):
            found.append(f"{each[0]}: {len(mine)} times: {spans}")
        for own, minutes in mine.items() if each[2] else ():
            begins = float(each[2]) <= minutes[0] <= float(each[3])
            if not begins or not ends[0] <= minutes[-1] <= ends[1]:
                found.append(f"{each[0]}: {spans[own]}")
            if any(after - before > STEP / 60 for before, after in pairwise(minutes)):
                found.append(f"{each[0]} pauses: {minutes}")
    return found + [
        f"{alert}: {minutes[0]} to {minutes[-1]}: {own}"
        for alert, of in left.items()
        for own, minutes in of.items()
    ]
