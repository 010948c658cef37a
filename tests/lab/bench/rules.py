"""The cost of one evaluation of all rules: ``python -m tests.lab.bench.rules`` prints a table.

A made-up node with 8 GPUs and 8 holders each, whose bytes go up and down all the time, is lived through for
some hours by the real rule manager (``promtool test rules``), so that there is all that the rules read. Node
and recorded series are then multiplied into a database, and a real Prometheus with one core is asked each
rule's expression at the last moment. What is counted is the CPU of its threads, not the wall: other work
beside it does not count. Writing the results down comes on top; ``make fleet`` has it, with real scrapes.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TextIO

import yaml

from tests.support.alerts.promtool import RULE_FILES, evaluation_order, rules
from tests.support.fleet.engines import Engine, running
from tests.support.ports import free_port

GIB = 2**30
MIB = 2**20
SCRAPE = 15
ROUND = 60
HOURS = 3.95
"""To the end of a block of two hours: a server has its last one to three hours in one piece, too."""

GPUS, HOLDERS = 8, 8
AGENTS = 0.25
"""Share of the holders with an agent."""

BEGIN = 1_800_000_000 // 7200 * 7200
"""Unix time of the database's first sample: where a block of Prometheus' begins."""

RECENT = 600
"""Seconds back from the last moment for which a series is kept that no rule looks at for longer."""

LIMIT = 1.2
"""Seconds of CPU a minute for 1,000 GPUs, of all rules: on Prometheus 2.42 1.08 to 1.14 were measured without
other work. The limit may only fall."""

ValueAt = Callable[[int], float]

_SAMPLE = re.compile(r'(\{__name__="[^{}]*\}) ([-+.\dA-Za-z]+)')
_TIME = re.compile(r"^    expr: .*, time: ([0-9a-z]+),$")
_SPAN = re.compile(r"(\d+)([smhd])")
_LOOK = re.compile(r"\b([a-z_][\w:]*)(?:\{[^}]*\})?(?:\[(\w+)\])?(?: offset (\w+))?")


class Cost(NamedTuple):
    """The cost of one evaluation of a group, seconds of CPU; ``interval`` in seconds."""

    group: str
    interval: int
    rules: Mapping[str, float]

    @property
    def total(self) -> float:
        """The cost of all rules of the group."""
        return sum(self.rules.values())


def seconds(span: str) -> int:
    """Return a duration of Prometheus' in seconds."""
    return sum(
        int(number) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit] for number, unit in _SPAN.findall(span)
    )


def node(random: Random) -> Iterator[tuple[str, str, ValueAt]]:
    """Yield name, labels and values of every series of a busy node."""

    def steady(value: float) -> ValueAt:
        return lambda _: value

    yield from (
        ("up", "", steady(1)), ("vramledger_up", "", steady(1)),
        ("vramledger_host_pid_namespace", "", steady(1)),
        ("vramledger_sample_timestamp_seconds", "", lambda t: t - 1.0),
    )  # fmt: skip
    for collector in ("ledger", "process", "owner", "hardware", "energy", "xid", "hidden", "exporter"):
        yield "vramledger_collector_success", f'collector="{collector}"', steady(1)
    for gpu in range(GPUS):
        device = f'gpu="{gpu}",uuid="GPU-NODE-{gpu}"'
        yield "vramledger_device_up", device, steady(1)
        yield "vramledger_device_memory_total_bytes", device, steady(140 * GIB)
        ledger = {"free": 20, "active": 80, "idle": 38, "driver_reserved": 1, "unattributed": 1}
        for state in (*ledger, "stopped", "orphaned", "zombie", "stuck", "dead", "unknown"):
            size = ledger.get(state, 0) * GIB
            yield (
                "vramledger_device_memory_bytes",
                f'{device},state="{state}"',
                _wave(random, size, size // 9),
            )
        for name in ("device_hidden_holders", "processes_dropped", "owners_dropped"):
            yield f"vramledger_{name}", device, steady(0)
        for place in range(HOLDERS):
            yield from _holder(random, device, 1000 + gpu * HOLDERS + place, idle=place < 2)


def _holder(random: Random, device: str, pid: int, *, idle: bool) -> Iterator[tuple[str, str, ValueAt]]:
    state = "idle" if idle else "active"
    size, holding = random.randint(1, 12) * GIB, f'{device},pid="{pid}"'
    memory = _wave(random, size, 0 if idle else size // 3)
    yield "vramledger_process_memory_bytes", holding, memory
    yield (
        "vramledger_process_state_since_timestamp_seconds",
        f'{holding},state="{state}"',
        lambda _: BEGIN - 9000,
    )
    working: ValueAt = (lambda _: BEGIN - 9000.0) if idle else (lambda t: t - 1.0)
    yield "vramledger_process_last_active_timestamp_seconds", holding, working
    if not idle:
        yield "vramledger_process_sm_utilization_ratio", holding, lambda _: 0.5
    yield "vramledger_process_start_time_seconds", f'pid="{pid}"', lambda _: BEGIN - 9999.0
    policy = random.choice(["caching", "preallocate", "growth", "unknown"])
    about = (
        f'pid="{pid}",user="u{pid}",command="train.py",framework="torch",policy="{policy}",owner_type="user",'
        f'owner="u{pid}",namespace="",pod="",container="",slurm_job="",unit="",notebook=""'
    )
    yield "vramledger_process_info", about, lambda _: 1.0
    owned = f'{device},owner_type="user",owner="u{pid}",state="{state}"'
    yield "vramledger_owner_memory_bytes", owned, memory
    yield "vramledger_owner_memory_byte_seconds_total", owned, lambda t: size * (t - BEGIN + 1.0)
    if random.random() < AGENTS:
        yield "vramledger_agent_up", f'pid="{pid}",reason=""', lambda _: 1.0
        for name in ("reserved", "allocated", "allocated_peak"):
            yield f"vramledger_torch_{name}_bytes", holding, _wave(random, size, size // 3)
        for name in ("pool", "in_use", "in_use_peak"):
            general = f'{holding},framework="torch"'
            yield f"vramledger_framework_{name}_bytes", general, _wave(random, size, size // 3)
        yield "vramledger_torch_inactive_split_bytes", holding, lambda _: 2.0**28
        yield "vramledger_framework_overhead_bytes", holding, _wave(random, GIB // 2, GIB // 8)
        for name in ("alloc_retries", "ooms"):
            yield f"vramledger_torch_{name}_total", holding, lambda _: 0.0


def _wave(random: Random, base: int, height: int) -> ValueAt:
    """Return a sawtooth whose period no scrape interval matches."""
    period = math.exp(random.uniform(math.log(1), math.log(300)))
    return lambda t: base + (int(height * (t % period) / period) // MIB * MIB)


def recorded_values(scratch: Path, series: Iterable[tuple[str, str, ValueAt]]) -> dict[str, dict[int, str]]:
    """Return what the rules record over the node's hours: values by time, by series."""
    steps = range(0, int(HOURS * 3600), SCRAPE)
    rounds = range(ROUND, int(HOURS * 3600), ROUND)
    test = {
        "interval": f"{SCRAPE}s",
        "input_series": [
            {
                "series": _labelled(name, labels, "NODE"),
                "values": " ".join(f"{value_at(BEGIN + step) - _shift(name):.0f}" for step in steps),
            }
            for name, labels, value_at in series
        ],
        "promql_expr_test": [
            {"expr": '{__name__=~"vramledger_.*:.*"}', "eval_time": f"{at}s"} for at in rounds
        ],
    }
    content = {
        "rule_files": [str(path) for path in RULE_FILES],
        "evaluation_interval": f"{ROUND}s",
        "group_eval_order": evaluation_order(),
        "tests": [test],
    }
    path = scratch / "node.test.yml"
    path.write_text(yaml.dump(content, Dumper=yaml.CSafeDumper, width=10**9), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    found: dict[str, dict[int, str]] = {}
    at = 0
    for line in (done.stdout + done.stderr).splitlines():
        if time := _TIME.match(line):
            at = seconds(time[1])
        elif line.lstrip().startswith("got:"):
            for labels, value in _SAMPLE.findall(line):
                found.setdefault(labels, {})[BEGIN + at] = value
    if not found:
        raise RuntimeError(done.stderr[-2000:])
    return found


def _shift(name: str) -> int:
    """Return a function that turns a time of the database into one of promtool's, which begin at 0."""
    return BEGIN if name.endswith(("timestamp_seconds", "time_seconds")) else 0


def _labelled(name: str, labels: str, instance: str) -> str:
    return f'{name}{{job="vramledger",instance="{instance}"{"," if labels else ""}{labels}}}'


def looks_back() -> dict[str, int]:
    """Return for how many seconds the rules look back at a metric."""
    back: dict[str, int] = {}
    for rule in rules():
        for name, span, offset in _LOOK.findall(rule["expr"]):
            if span or offset:
                back[name] = max(back.get(name, 0), seconds(span) + seconds(offset))
    return back


def backfill(file: TextIO, nodes: int) -> None:
    """Write the fleet as OpenMetrics."""
    last = BEGIN + int(HOURS * 3600) - ROUND
    back = looks_back()
    intervals: dict[str, int] = {}
    for rule in rules():
        if name := rule.get("record"):  # two groups may record one name: what comes more often counts
            every = max(1, seconds(rule["interval"]) // ROUND) * ROUND
            intervals[name] = min(every, intervals.get(name, every))
    by_name: dict[str, list[tuple[str, dict[int, str]]]] = {}
    raw = list(node(Random(1)))  # noqa: S311 it is chance for a measurement
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        recorded = recorded_values(Path(scratch), raw)
    for name, labels, value_at in raw:
        since = last - max(RECENT, back.get(name, 0)) - ROUND
        times = range(since // SCRAPE * SCRAPE, last + 1, SCRAPE)
        series = _labelled(name, labels, "NODE")
        by_name.setdefault(name, []).append((series, {at: f"{value_at(at):.0f}" for at in times}))
    for labels, values in recorded.items():
        name = labels.partition('"')[2].partition('"')[0]
        since = last - max(RECENT, back.get(name, 0)) - ROUND
        every = intervals.get(name, ROUND)
        shown = f"{name}{{{labels.partition(', ')[2]}".replace('", ', '",')
        scale = _shift(name.replace(":last", "").replace(":min", ""))
        texts = {
            at: f"{float(value) + scale:.17g}"
            for at, value in values.items()
            if at >= since and at % every == 0
        }
        by_name.setdefault(name, []).append((shown, texts))
    for name, found in by_name.items():
        file.write(
            f"# TYPE {name.removesuffix('_total')} {'counter' if name.endswith('_total') else 'gauge'}\n"
        )
        for number in range(nodes):
            for series, values in found:
                mine = series.replace('instance="NODE"', f'instance="node{number}"').replace(
                    "NODE", f"{number:04}"
                )
                file.writelines(f"{mine} {value} {at}\n" for at, value in values.items())
    file.write("# EOF\n")


def cpu(engine: Engine) -> float:
    """Return the seconds of CPU that an engine's threads have used, to the microsecond."""
    tasks = Path(f"/proc/{engine.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


def measured(engine: Engine, times: int) -> list[Cost]:
    """Query every rule's expression at the last moment, several times."""
    at = str(BEGIN + int(HOURS * 3600) - ROUND)
    costs: dict[str, tuple[int, dict[str, float]]] = {}
    before = cpu(engine)
    for _ in range(20):
        _ask(engine, "vector(1)", at)
    nothing = (cpu(engine) - before) / 20
    for path in RULE_FILES:
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            spent = costs.setdefault(group["name"], (seconds(group["interval"]), {}))[1]
            for number, rule in enumerate(group["rules"]):
                # The cost of a query's request is not the cost of its evaluation.
                name = f"{number} {rule.get('alert') or rule['record']}"
                _ask(engine, rule["expr"], at)
                before = cpu(engine)
                for _ in range(times):
                    _ask(engine, rule["expr"], at)
                spent[name] = max(0.0, (cpu(engine) - before) / times - nothing)
    return [Cost(name, interval, spent) for name, (interval, spent) in costs.items()]


def _ask(engine: Engine, expression: str, at: str) -> Any:  # noqa: ANN401 JSON
    """Query only the number of series: a rule in a server does not write thousands of them as JSON."""
    answer = engine.get("/api/v1/query", query=f"count({expression})", time=at)
    if answer is None or answer["status"] != "success":
        message = f"no answer to {expression}: {answer}"
        raise RuntimeError(message)
    return answer["data"]["result"]


def a_minute(costs: Iterable[Cost]) -> float:
    """Return the seconds of CPU that all groups take in a minute."""
    return sum(cost.total * 60 / cost.interval for cost in costs)


def table(costs: list[Cost], detail: float) -> Iterator[str]:
    """Write the costs, with the rules that take at least ``detail`` seconds."""
    yield "| group | every | CPU of a round |"
    yield "|---|--:|--:|"
    for cost in sorted(costs, key=lambda each: -each.total):
        yield f"| {cost.group} | {cost.interval} s | {cost.total:.3f} s |"
        for name, spent in sorted(cost.rules.items(), key=lambda each: -each[1]):
            if spent >= detail:
                yield f"| - {name} | | {spent:.3f} s |"
    every = [sum(cost.total for cost in costs if cost.interval <= most) for most in (30, 60, 300)]
    minute = a_minute(costs)
    yield ""
    yield (
        f"One round of all groups that are due takes {every[0]:.2f} s a half minute, {every[1]:.2f} s a"
        f" minute, {every[2]:.2f} s when all are due at once; a minute takes {minute:.2f} s,"
        f" {minute / 60:.1%} of one core."
    )


def main() -> None:
    """Make the fleet, query, print."""
    options = argparse.ArgumentParser(prog="python -m tests.lab.bench.rules", description=__doc__)
    options.add_argument("--gpus", type=int, default=1000)
    options.add_argument("--times", type=int, default=5, help="evaluations of each rule (default 5)")
    options.add_argument("--detail", type=float, default=1.0, help="name the rules from so many seconds on")
    options.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program to measure")
    options.add_argument("--home", type=Path, help="keep the database here, and use it if it is there")
    args = options.parse_args()
    if args.prometheus is None or shutil.which("promtool") is None:
        sys.exit("python -m tests.lab.bench.rules: needs prometheus and promtool on PATH")
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        home = args.home or Path(scratch)
        if not (home / "data").exists():
            home.mkdir(parents=True, exist_ok=True)
            with (home / "fleet.txt").open("w", encoding="utf-8") as file:
                backfill(file, args.gpus // GPUS)
            command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "-q"]
            subprocess.run(
                [*command, home / "fleet.txt", home / "data"], check=True, stdout=subprocess.DEVNULL
            )
            (home / "fleet.txt").unlink()
        (home / "prometheus.yml").write_text("{}\n", encoding="utf-8")
        port = free_port()
        command = [
            args.prometheus, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data",
            "--storage.tsdb.retention.time=99y", f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        os.environ["GOMAXPROCS"] = "1"
        with running(command, home, f"http://127.0.0.1:{port}") as engine:
            costs = measured(engine, args.times)
    print("\n".join(table(costs, args.detail)))
    if a_minute(costs) > (most := LIMIT * args.gpus / 1000):
        sys.exit(f"The limit is {most:.2f} s a minute.")


if __name__ == "__main__":
    main()
