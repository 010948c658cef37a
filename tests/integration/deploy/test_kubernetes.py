"""The chart and the kustomize bases, through the real helm and kustomize and Kubernetes' own schemas."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.requirements import require_newer, require_tool
from vramledger.cli import parser

REPOSITORY = Path(__file__).parents[3]
KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
ALL_PARTS = ("podMonitor", "prometheusRule", "dashboards", "networkPolicy")
OPERATOR = "monitoring.coreos.com/v1"


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm until it ends."""
    return subprocess.run(
        [require_newer("helm"), *arguments], check=False, capture_output=True, text=True, timeout=60
    )


def template(*values: str) -> list[dict[str, Any]]:
    """Return the objects that the chart makes from some values."""
    sets = [word for value in values for word in ("--set", value)]
    answer = helm("template", "vramledger", str(CHART), "--namespace", "gpus", *sets)
    assert answer.returncode == 0, answer.stderr
    return [part for part in yaml.safe_load_all(answer.stdout) if part]


def kustomized(folder: str) -> list[dict[str, Any]]:
    """Return the objects that the real kustomize makes from a folder, as ``kubectl apply -k`` would."""
    answer = subprocess.run(
        [require_newer("kustomize"), "build", KUBERNETES / "kustomize" / folder],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return list(yaml.safe_load_all(answer.stdout))


def render(*arguments: str | Path) -> None:
    """Run ``render.py`` with helm, as ``make deploy`` and ``make release`` do."""
    path = f"{require_newer('helm').parent}:/usr/bin:/bin"
    command = [sys.executable, KUBERNETES / "render.py", *arguments]
    subprocess.run(command, check=True, env={"PATH": path}, timeout=60)


def pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod that the DaemonSet among some objects starts."""
    (daemonset,) = (each for each in objects if each["kind"] == "DaemonSet")
    found: dict[str, Any] = daemonset["spec"]["template"]["spec"]
    return found


def validate(objects: list[dict[str, Any]]) -> None:
    """Check every object of Kubernetes itself against its published schema."""
    for each in objects:
        if each["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(each, "1.37", strict=True)


def test_chart_passes_helms_own_check() -> None:
    """``helm lint`` finds nothing to complain about, in strict mode."""
    answer = helm("lint", "--strict", str(CHART))

    assert answer.returncode == 0, answer.stdout


def test_chart_package_holds_what_the_chart_uses(tmp_path: Path) -> None:
    """The chart's package has the rules and the dashboards of the linked folders, and no other file."""
    answer = helm("package", str(CHART), "--destination", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        linked = {name for name in archive.getnames() if name.split("/")[1] in ("alerts", "dashboards")}

    assert linked == {
        f"vramledger/{path.relative_to(REPOSITORY)}"
        for pattern in ("alerts/*.rules.yml", "dashboards/*.json")
        for path in REPOSITORY.glob(pattern)
    }


@pytest.mark.parametrize(
    "values",
    [
        (),
        tuple(f"{part}.enabled=true" for part in ALL_PARTS),
        ("host.pid=false", "host.rootfs=false", "host.capabilities=false", "agent.enabled=false"),
        ("webConfig.existingSecret=web", "agent.enabled=false"),
        ("runtimeClassName=nvidia", f"image.digest=sha256:{'0' * 64}", "extraArgs={--idle-after=5m}"),
    ],
)
def test_objects_follow_the_published_schemas(values: tuple[str, ...]) -> None:
    """With every combination of switches, Kubernetes' schemas accept each object and each of its fields."""
    validate(template(*values))


def test_flags_exist() -> None:
    """The exporter accepts the arguments of the container."""
    (container,) = pod(template("extraArgs={--idle-after=5m}"))["containers"]

    parser().parse_args(container["args"])  # ends by SystemExit when it does not


def test_sees_the_host_and_takes_no_gpu() -> None:
    """The pod has the host's processes and four capabilities, and requests no GPU from the scheduler."""
    spec = pod(template())
    (container,) = spec["containers"]
    security = container["securityContext"]

    assert spec["hostPID"] is True
    assert spec["automountServiceAccountToken"] is False
    assert security["capabilities"] == {
        "drop": ["ALL"],
        "add": ["SYS_PTRACE", "DAC_READ_SEARCH", "SETUID", "SETGID"],
    }
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert "nvidia.com/gpu" not in json.dumps(container["resources"])
    assert next(mount for mount in container["volumeMounts"] if mount["name"] == "host")["readOnly"] is True


def test_without_the_hosts_rights_it_is_an_ordinary_user() -> None:
    """With every access to the host turned off, the pod has no privilege."""
    spec = pod(
        template("host.pid=false", "host.rootfs=false", "host.capabilities=false", "agent.enabled=false")
    )
    (container,) = spec["containers"]

    assert "hostPID" not in spec
    assert [volume for volume in spec["volumes"] if "hostPath" in volume] == []
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("image.digest=abc", "/image/digest"),
        ("service.port=99999", "/service/port"),
        ("extraArgs={idle}", "/extraArgs/0"),
        ("host.pid=maybe", "/host/pid"),
        ("hostpid=true", "'hostpid' not allowed"),
        ("podMonitor.interval=soon", "/podMonitor/interval"),
        ("agent.hostPath=run", "/agent/hostPath"),
        ("webConfig.key=a/b", "/webConfig/key"),
        ("webConfig.file=web.yml", "'file' not allowed"),
        ("podMonitor.scheme=ftp", "/podMonitor/scheme"),
    ],
)
def test_wrong_values_are_refused_by_name(value: str, named: str) -> None:
    """An invalid value stops helm with a message that names it."""
    answer = helm("template", "vramledger", str(CHART), "--set", value)

    assert answer.returncode != 0
    assert named in answer.stderr


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([], "http://localhost:8001/api/v1/namespaces/gpus/services/vramledger:metrics/proxy/runbooks/"),
        (["prometheusRule.runbooks=https://gpus.test/runbooks/{alert}"], "https://gpus.test/runbooks/"),
    ],
)
def test_links_of_alerts_lead_to_where_the_cluster_has_them(values: list[str], place: str) -> None:
    """Every alert links to the service through the API server, or to the address that the user gives."""
    made = template("prometheusRule.enabled=true", *values)
    alerts = [
        rule
        for each in made
        if each["kind"] == "PrometheusRule"
        for group in each["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]

    assert len(alerts) > 30
    assert [rule["annotations"]["runbook_url"] for rule in alerts] == [
        place + rule["alert"] for rule in alerts
    ]


@pytest.mark.parametrize("made_by", ["chart", "release"])
def test_rules_arrive_whole(tmp_path: Path, made_by: str) -> None:
    """Every rule of alerts/ is in a PrometheusRule, except for its link; Prometheus' own check reads it."""
    if made_by == "chart":
        objects = template("prometheusRule.enabled=true")
    else:
        render("--rules", tmp_path / "prometheusrule.yaml")
        objects = list(yaml.safe_load_all((tmp_path / "prometheusrule.yaml").read_text(encoding="utf-8")))
    made = [each for each in objects if each["kind"] == "PrometheusRule"]
    groups = [group for each in made for group in each["spec"]["groups"]]
    kept = [
        group
        for path in sorted((REPOSITORY / "alerts").glob("*.rules.yml"))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
    for group in [*groups, *kept]:
        for rule in group["rules"]:
            rule.get("annotations", {}).pop("runbook_url", None)

    assert groups
    assert sorted(groups, key=lambda group: group["name"]) == sorted(kept, key=lambda group: group["name"])
    subprocess.run([require_tool("promtool"), "check", "rules", file], check=True, capture_output=True)


@pytest.mark.parametrize("made_by", ["chart", "kustomize"])
def test_dashboards_arrive_whole(made_by: str) -> None:
    """Every dashboard is in a ConfigMap that Grafana's sidecar finds and that is small enough."""
    objects = template("dashboards.enabled=true") if made_by == "chart" else kustomized("example")
    made = [each for each in objects if each["kind"] == "ConfigMap"]
    given = {name: json.loads(text) for each in made for name, text in each["data"].items()}
    kept = {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in (REPOSITORY / "dashboards").glob("*.json")
    }

    assert kept
    assert given == kept
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in made)
    assert all(len(json.dumps(each)) < 2**20 for each in made)  # etcd's limit


def test_pod_monitor_keeps_our_labels() -> None:
    """Prometheus keeps the labels that say who holds the memory, and ``instance`` is the node's name."""
    (monitor,) = (each for each in template("podMonitor.enabled=true") if each["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = pod(template())["containers"]

    assert endpoint["honorLabels"] is True
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert {"targetLabel": "instance", "sourceLabels": ["__meta_kubernetes_pod_node_name"]} in endpoint[
        "relabelings"
    ]


def test_web_configuration_comes_from_a_secret() -> None:
    """A Secret is mounted whole, so that a renewed one is seen; the PodMonitor has the given settings."""
    objects = template(
        "webConfig.existingSecret=web", "podMonitor.enabled=true", "podMonitor.scheme=https",
        "podMonitor.tlsConfig.serverName=vramledger", "podMonitor.basicAuth.username.name=scrape",
    )  # fmt: skip
    (container,) = pod(objects)["containers"]
    arguments = parser().parse_args(container["args"])
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "web-config")
    (volume,) = (each for each in pod(objects)["volumes"] if each["name"] == "web-config")
    (monitor,) = (each for each in objects if each["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    assert volume["secret"] == {"secretName": "web"}
    assert arguments.web_config == Path(mount["mountPath"], "web.yml")
    assert "subPath" not in mount
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "vramledger"})
    assert endpoint["basicAuth"] == {"username": {"name": "scrape"}}


def test_bases_are_rendered_from_the_chart(tmp_path: Path) -> None:
    """The committed kustomize bases are what ``make deploy`` writes now."""
    render("--into", tmp_path)
    written = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*.yaml")}

    for file, text in written.items():
        assert (KUBERNETES / "kustomize" / file).read_text() == text, f"{file} is stale; run: make deploy"


@pytest.mark.parametrize("folder", ["base", "example"])
def test_kustomize_builds(folder: str) -> None:
    """The real kustomize combines the folders, and the result matches the schemas."""
    objects = kustomized(folder)

    assert {each["metadata"].get("namespace", "vramledger") for each in objects} == {"vramledger"}
    validate(objects)
