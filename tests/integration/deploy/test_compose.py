"""The Compose file, read by the real Docker Compose, and the configuration that it mounts."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.dashboards import database
from tests.support.dashboards.figures import query_of
from tests.support.dashboards.files import substitute_variables
from tests.support.requirements import require_newer, require_tool
from vramledger.cli import parser

COMPOSE = Path(__file__).parents[3] / "deploy" / "compose"


def config(profile: str) -> dict[str, Any]:
    answer = subprocess.run(
        [require_newer("docker-compose"), "--profile", profile, "config", "--format", "json"],
        check=True, capture_output=True, text=True, cwd=COMPOSE, timeout=60,
    )  # fmt: skip
    made: dict[str, Any] = json.loads(answer.stdout)
    return made


@pytest.mark.parametrize(("profile", "exporters"), [("gpu", {"exporter"}), ("demo", {"demo"})])
def test_profiles(profile: str, exporters: set[str]) -> None:
    """Each profile starts its exporters, with flags that they accept, and the three other programs."""
    services = config(profile)["services"]
    past = {"past"} if profile == "demo" else set()
    assert set(services) == exporters | past | {"prometheus", "alertmanager", "grafana"}
    for name in exporters:
        parser().parse_args(services[name]["command"])


@pytest.mark.parametrize("profile", ["gpu", "demo"])
def test_everything_mounted_exists(profile: str) -> None:
    """The mounted files of the repository exist."""
    services = config(profile)["services"]
    repository = COMPOSE.parents[1]
    volumes = [volume for service in services.values() for volume in service.get("volumes", ())]
    mounted = [Path(each["source"]) for each in volumes if each["type"] == "bind"]
    ours = [path for path in mounted if path.is_relative_to(repository)]
    assert ours
    assert [path for path in ours if not path.exists()] == []


@pytest.mark.parametrize("profile", ["gpu", "demo"])
def test_alerts_link_to_where_the_exporter_can_be_reached(profile: str) -> None:
    """The label ``instance``, from which links to runbooks are made, is the exporter's published address."""
    made = yaml.safe_load((COMPOSE / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    scraped = next(each for each in made["scrape_configs"] if each["job_name"] == "vramledger")
    (relabelling,) = scraped["relabel_configs"]
    published = [
        (service["networks"]["default"]["aliases"], f"localhost:{port['published']}")
        for service in config(profile)["services"].values()
        for port in service.get("ports", ())
        if port["target"] == 10839
    ]
    assert relabelling["target_label"] == "instance"
    assert published == [(scraped["dns_sd_configs"][0]["names"], relabelling["replacement"])]


def test_prometheus_configuration() -> None:
    """Prometheus' own check accepts the configuration, and the rules are where it looks for them."""
    subprocess.run(
        [require_tool("promtool"), "check", "config", "--syntax-only", COMPOSE / "prometheus/prometheus.yml"],
        check=True, capture_output=True,
    )  # fmt: skip
    made = yaml.safe_load((COMPOSE / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    (pattern,) = made["rule_files"]
    assert list((COMPOSE.parents[1] / "alerts").glob(pattern.rpartition("/")[2]))


@pytest.mark.parametrize("profile", ["gpu", "demo"])
def test_nobody_is_let_in_by_default(profile: str) -> None:
    """Only this machine reaches the ports, nobody knows a password of Grafana, or stops Prometheus."""
    services = config(profile)["services"]
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == ""
    assert "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION=true" in services["grafana"]["entrypoint"][-1]
    assert not [each for each in services["prometheus"]["command"] if "lifecycle" in each or "admin" in each]


def test_the_demo_has_a_past(tmp_path: Path) -> None:
    """Before its first start the demo's Prometheus gets what *Changed* compares with, and not again."""
    data = tmp_path / "data"
    data.mkdir()
    tools = {**os.environ, "PATH": f"{require_tool('promtool').parent}{os.pathsep}{os.environ['PATH']}"}
    script = ["/bin/sh", str(COMPOSE / "prometheus/past.sh"), str(data)]
    subprocess.run(script, check=True, env=tools, timeout=120)
    with database.empty_prometheus(require_tool("prometheus"), tmp_path) as engine:
        now = time.time()

        def figures(expr: str, days: float) -> dict[str, float]:
            moment = str(now - days * 86400)
            answer = engine.get("/api/v1/query", query=substitute_variables(expr), time=moment)
            assert answer is not None
            found = answer["data"]["result"]
            return {each["metric"].get("owner", ""): float(each["value"][1]) for each in found}

        week = figures(query_of("fleet", "Changed, up to 4 min old", "C").replace(" offset $__range", ""), 7)
        watched = figures("count(vramledger_node:devices_watched:count)", 1)
    before = sorted(path.name for path in data.iterdir())
    subprocess.run(script, check=True, env=tools, timeout=120)

    assert {"48213", "dana", "erin", "vllm.service"} <= week.keys()
    assert all(figure > 2**30 for figure in week.values())
    assert watched == {"": 1.0}
    assert sorted(path.name for path in data.iterdir()) == before
