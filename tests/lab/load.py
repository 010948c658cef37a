"""Measure what loading each dashboard costs Prometheus: 24 hours of 504 GPUs with 8 holders each.

``python -m tests.lab.load``. One host is simulated for three hours, and promtool evaluates its rules. The
last hour of that is written for each of 63 hosts and each of 24 hours, under names of their own: what is read
over the time range for all 24 hours, the rest for the last 20 minutes.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.lab.bench.cost import cpu_seconds, cpu_share
from tests.support.dashboards import database, files
from tests.support.dashboards.database import Labels, Points, Samples
from tests.support.dashboards.nodes import HOURS, NOW, SCRAPE, Page
from tests.support.fleet.engines import Engine
from tests.support.fleet.hosts import LIFE, FleetHost
from tests.support.host.model import EPOCH, Process
from tests.support.host.programs import Torch
from tests.support.host.scrapes import Renderer
from tests.support.requirements import require_tool

HOSTS, SPAN, LATELY = 63, 24, 1200.0
"""Hosts of 8 GPUs, hours of data, and the seconds of which every series is written."""
RANGE = SPAN * 3600 - 600
AHEAD = 48 * 3600.0
"""Seconds by which all samples are moved: the simulation begins in 1970, and its copies before it."""
ROUNDS = 3


class _Host(FleetHost):
    """A host on which a quarter of the holders has an agent."""

    def pages(self) -> Iterator[Page]:
        renderer = Renderer()
        self._host.interval = SCRAPE  # else time between two readings counts for nobody
        self._exporter.restart()
        for number in range(int(HOURS * 3600 / SCRAPE)):
            self._host.processes = list(self._holders(number * SCRAPE))
            yield EPOCH + number * SCRAPE, renderer.lines(self._exporter.sample(number * SCRAPE))

    def _process(self, pid: int, index: int, slot: int, begin: float) -> Process:
        process = super()._process(pid, index, slot, begin)
        if slot % 4 == 1:
            size = self._size
            process.places, process.agent = {index: Torch(lambda age: size * (0.8 + age / LIFE / 10))}, True
        return process


def read_over_time(content: files.Json) -> set[str]:
    """Return the metrics that a dashboard's open panels read over the whole time range."""
    found: set[str] = set()
    for panel in content["panels"]:
        for target in panel.get("targets", ()):
            ends = r"\{" if target["range"] else r"\{[^{}]*\}(?:\)*\[\$__range|\s+offset \$__range)"
            found.update(re.findall(rf"\b([a-zA-Z_][\w:]*){ends}", target["expr"]))
    return found


def copies(
    points: Points, everywhere: set[str], on_one: set[str], shown: set[str]
) -> Iterator[tuple[float, Points]]:
    """Yield the samples of all hosts, an hour after the other, with the seconds by which they are moved."""
    begin = NOW - 3600
    for back in range(SPAN - 1, -1, -1):
        moved: Points = {}
        for labels, values in points.items():
            name = dict(labels)["__name__"]
            since = begin if name in everywhere | on_one else NOW - LATELY
            if name not in everywhere | on_one | shown or (back and since > begin):
                continue
            kept = [each for each in values if since <= each[0] < NOW]
            for host in range(HOSTS if name in everywhere or not back else 1) if kept else ():
                moved[_renamed(labels, host, back)] = kept
        yield -3600.0 * back, moved


def _renamed(labels: Labels, host: int, back: int) -> Labels:
    def another(found: re.Match[str]) -> str:
        pid = int(found[0])
        return str(pid // 10 * 10 + (pid - back) % 10 + 10_000 * host)

    own = {"instance": f"gpu{host:04}"}
    return tuple(
        (key, own.get(key) or re.sub(r"\b1\d{5}\b", another, text.replace("GPU-00000000", f"GPU-{host:08x}")))
        for key, text in labels
    )


def load(engine: Engine, content: files.Json, chosen: dict[str, str]) -> list[tuple[float, str]]:
    """Ask what open panels ask when loaded; return each query's seconds of CPU with its panel."""
    spent = []
    for panel in content["panels"]:
        for target in panel.get("targets", ()):
            step = max(15, RANGE // panel.get("maxDataPoints", 1000))
            rated = max(240, step + 60)
            own = {"__range": f"{RANGE}s", "__interval": f"{step}s", "__rate_interval": f"{rated}s"}
            expr = files.substitute_variables(target["expr"], **own, **chosen)
            before = cpu_seconds(engine.pid)
            database.ask(engine, expr, instant=target["instant"], span=RANGE, step=step, ahead=AHEAD)
            spent.append((cpu_seconds(engine.pid) - before, f"{panel['title']} {target['refId']}"))
    return spent


def main() -> None:
    program = require_tool("prometheus")
    require_tool("promtool")
    dashboards = files.load_dashboards()
    one_node = {"vramledger-node", "vramledger-device", "vramledger-process"}
    ranged = {uid: read_over_time(content) for uid, content in dashboards.items()}
    everywhere = set().union(*(names for uid, names in ranged.items() if uid not in one_node))
    shown = set(re.findall(r"\b[a-zA-Z_][\w:]*(?=\{)", " ".join(each.expr for each in files.all_queries())))
    with tempfile.TemporaryDirectory(prefix="load-") as scratch:
        points = database.collect({"gpu0000": _Host(0).pages()}, Path(scratch), " ".join(shown)).points
        with database.empty_prometheus(program, Path(scratch) / "prometheus") as engine:
            number = 0
            for ahead, moved in copies(points, everywhere, set().union(*ranged.values()), shown):
                part = Samples()
                part.points = moved
                number += sum(map(len, moved.values()))
                database.send(part, engine, ahead + AHEAD)
            series = engine.get("/api/v1/status/tsdb")["data"]["headStats"]["numSeries"]
            print(f"{number / 1e6:.1f} million samples; {series:,.0f} series in memory", flush=True)
            share = [1.0]
            while share[0] >= 0.02:  # until nothing is compacted any more
                with cpu_share(engine.pid) as share:
                    time.sleep(5)
            chosen = {"uuid": "GPU-00000000-0000-4000-8000-000000000000"}
            for uid, content in dashboards.items():
                own = {**chosen, "instance": "gpu0000", "pid": "10001."} if uid in one_node else {}
                rounds = [load(engine, content, own) for _ in range(ROUNDS)]
                costs = ", ".join(f"{sum(spent for spent, _ in each):.2f}" for each in rounds)
                slowest = max(rounds[0])
                print(f"{content['title']}: {costs} s; slowest: {slowest[1]} {slowest[0]:.2f} s", flush=True)


if __name__ == "__main__":
    main()
