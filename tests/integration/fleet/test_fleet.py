"""A fleet and the real engines: every rule gives the same result in every engine."""

import gzip
import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.fleet import BEGIN, BEYOND, END, HEADER, INTERVAL, README, SIZES
from tests.support.fleet.engines import (
    RULES,
    Engine,
    Labels,
    prometheus,
    scrape,
    simulated,
    until,
    victoria_metrics,
)
from tests.support.fleet.hosts import fleet
from tests.support.requirements import VERSIONS, require_newer, require_tool

FLEET = Path(__file__).parents[3] / "deploy" / "fleet"
HOSTS = 3
GPUS, HOLDERS = 2, 4
"""Of each host: enough for every kind of series; the engines' work is in proportion to their number."""
SPAN = 20.0
"""Seconds of data, a scrape a second, before the engines are queried."""

pytestmark = pytest.mark.timeout(600)


def expressions() -> list[tuple[str, str]]:
    return [
        (rule.get("record") or rule["alert"], rule["expr"])
        for path in sorted(RULES.parent.glob(RULES.name))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def hurried(home: Path) -> str:
    """Write the rules without the intervals of their groups, and return where they are."""
    for path in RULES.parent.glob(RULES.name):
        made = yaml.safe_load(path.read_text(encoding="utf-8"))
        for group in made["groups"]:
            group.pop("interval", None)
        (home / path.name).write_text(yaml.safe_dump(made), encoding="utf-8")
    return str(home / RULES.name)


def sent(config: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((FLEET / config).read_text(encoding="utf-8"))["remote_write"]
    return found


def to(store: Engine, writes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return remote writes to a store on loopback, without waiting for a full batch."""
    url, soon = f"{store.url}/api/v1/write", {"batch_send_deadline": "200ms"}
    return [{**each, "url": url, "queue_config": {**each.get("queue_config", {}), **soon}} for each in writes]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Run both Prometheus versions with the rules over one fleet; the newer one forwards to the store."""
    home = tmp_path_factory.mktemp("fleet")
    older, newer = require_tool("prometheus"), require_newer("prometheus")
    with (
        simulated(HOSTS, GPUS, HOLDERS) as port,
        victoria_metrics(require_newer("victoria-metrics"), home / "store") as store,
    ):
        config = {**scrape(port, HOSTS, "1s", "4s"), "rule_files": [hurried(home)]}
        sending = {**config, "remote_write": to(store, [{"url": ""}])}
        with (
            prometheus(older, home / "older", config) as first,
            prometheus(newer, home / "newer", sending) as second,
        ):
            for engine in (first, second, store):
                count = partial(engine.value, f"max(count_over_time(up[{SPAN:.0f}s])) >= {SPAN - 1}")
                until(count, f"{SPAN} s of data at {engine.url}")
            yield {"older": first, "newer": second, "store": store}


def compared(labels: Labels) -> Labels:
    """Return labels without the name, which VictoriaMetrics keeps where Prometheus drops it."""
    return frozenset((name, value) for name, value in labels if name != "__name__")


@pytest.mark.thorough
def test_versions_and_store_answer_the_same(engines: dict[str, Engine]) -> None:
    """Every rule's expression gives the same series and values in the store as in its Prometheus."""
    now = time.time() - 3
    different = []
    answered = 0
    for name, expression in expressions():
        ours = {compared(key): value for key, value in engines["newer"].query(expression, now).items()}
        theirs = {compared(key): value for key, value in engines["store"].query(expression, now).items()}
        answered += bool(ours)
        # Over a range that is longer than this test, the store divides by the time of the samples.
        young = name.endswith(":rate4m")
        if ours.keys() != theirs.keys() or not all(
            young or math.isclose(value, theirs[key], rel_tol=0.05, abs_tol=1e-6)
            for key, value in ours.items()
        ):
            different.append((name, len(ours), len(theirs)))

    assert different == []
    assert answered > 15  # an empty result on both sides would prove nothing


@pytest.mark.thorough
def test_both_versions_evaluate_every_rule(engines: dict[str, Engine]) -> None:
    """Prometheus 2.42 and 3 load all rules and evaluate them without an error."""
    for version in VERSIONS:
        groups = engines[version].get("/api/v1/rules")["data"]["groups"]
        health = {
            rule["name"]: (rule["health"], rule.get("lastError"))
            for group in groups
            for rule in group["rules"]
        }
        assert len(health) == len({name for name, _ in expressions()})
        assert {name: why for name, why in health.items() if why[0] != "ok"} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("version", VERSIONS)
def test_agent_mode_sends_everything(version: str, tmp_path: Path) -> None:
    """A Prometheus in agent mode, with the shipped configuration's remote write, loses no series."""
    program = require_tool("prometheus") if version == "older" else require_newer("prometheus")
    flag = "--enable-feature=agent" if version == "older" else "--agent"
    with (
        simulated(1, GPUS, HOLDERS) as port,
        victoria_metrics(require_newer("victoria-metrics"), tmp_path / "store") as store,
    ):
        config = {**scrape(port, 1, "1s"), "remote_write": to(store, sent("prometheus-agent.yml"))}
        with prometheus(program, tmp_path / "agent", config, flag, agent=True):
            until(lambda: store.value("scrape_samples_scraped") > 0, "the agent's first samples")
            scraped = store.value("max_over_time(scrape_samples_scraped[1m])")
            until(
                lambda: store.value('count(last_over_time({job="vramledger"}[1m]))') >= scraped,
                "every series of a scrape in the store",
            )


@pytest.mark.thorough
def test_cluster_sends_a_fraction(engines: dict[str, Engine]) -> None:
    """A cluster forwards the series that people query for a fleet, and not those of single processes."""
    (write,) = sent("prometheus-cluster.yml")
    names = {dict(key)["__name__"]: value for key, value in engines["newer"].query(
        'count by (__name__) ({__name__=~"vramledger.*|up|ALERTS"})'
    ).items()}  # fmt: skip
    kept = set(names)
    for rule in write["write_relabel_configs"]:
        pattern = re.compile(rule["regex"])
        kept = {name for name in kept if bool(pattern.fullmatch(name)) == (rule["action"] == "keep")}

    assert {"up", "vramledger_up", "vramledger_device_memory_bytes", "vramledger_owner_memory_bytes"} <= kept
    assert not [name for name in kept if name.startswith("vramledger_process")]
    assert sum(names[name] for name in kept) < 0.5 * sum(names.values())


def instances(engine: Engine) -> list[str]:
    targets = engine.get("/api/v1/targets", state="active")["data"]["activeTargets"]
    return [target["labels"]["instance"] for target in targets]


@pytest.mark.thorough
def test_shards_divide_the_hosts(tmp_path: Path) -> None:
    """With the shipped configuration exactly one shard scrapes each host."""
    text = (FLEET / "prometheus-shard.yml").read_text(encoding="utf-8")
    targets = [f"10.0.{number // 250}.{number % 250}:10839" for number in range(200)]
    program = require_tool("prometheus")
    shards = yaml.safe_load(text)["scrape_configs"][0]["relabel_configs"][0]["modulus"]
    with ExitStack() as running:
        engines = []
        for shard in range(shards):
            (job,) = yaml.safe_load(text.replace("SHARD", str(shard)))["scrape_configs"]
            job.pop("file_sd_configs")
            config = {"scrape_configs": [{**job, "static_configs": [{"targets": targets}]}]}
            engines.append(running.enter_context(prometheus(program, tmp_path / str(shard), config)))
        seen = [name for engine in engines for name in until(partial(instances, engine), "its targets")]

    assert sorted(seen) == sorted(targets)


def test_pages_stay_within_the_budget() -> None:
    """A host of 8 GPUs with 64 holders of 64 owners stays below 1,500 series, as the README says."""
    (host,) = fleet(1)
    start = 1_790_000_000.0
    for step in range(20):
        page = gzip.decompress(host.page(start + 15 * step)).decode()
        assert sum(not line.startswith("#") for line in page.splitlines()) <= 1500


def test_table_of_the_readme_is_the_programs() -> None:
    """The README's table has the columns and sizes that ``make fleet`` measures, and its conditions."""
    _, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    table, mark, _ = rest.partition(END)
    sizes = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")][1:]

    assert mark
    assert table.startswith(HEADER)
    assert sizes == [*(f"{size:,}" for size in SIZES), f"{BEYOND:,} (extrapolated)"]
    assert f"scraped every {INTERVAL} s" in table
