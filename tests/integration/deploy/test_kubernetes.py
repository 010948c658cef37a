"""The chart and the kustomize bases, through the real helm and kustomize and Kubernetes' own schemas."""

import json
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.requirements import require_newer, require_tool
from vramledger.cli import parser
from vramledger.config import SERVICE_ACCOUNT, ListenAddress

REPOSITORY = Path(__file__).parents[3]
KUBERNETES = REPOSITORY / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
ALL_PARTS = ("podMonitor", "prometheusRule", "dashboards", "networkPolicy", "nodeTaint")
OPERATOR = "monitoring.coreos.com/v1"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The rules and the dashboards are 1 MB: the one in C reads them 25 times as fast."""

REPOSITORY_OF_IMAGE = "image.repository=registry.test/vramledger"
VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
"""Of Kubernetes: from the oldest that the chart claims to the newest whose schemas are installed."""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [require_newer("helm"), *arguments], check=False, capture_output=True, text=True, timeout=60
    )


def template(*values: str, version: str = VERSIONS[-1]) -> list[dict[str, Any]]:
    """Return the objects that the chart makes from some values, for a version of Kubernetes."""
    sets = [word for value in (REPOSITORY_OF_IMAGE, *values) for word in ("--set", value)]
    answer = helm("template", "vramledger", str(CHART), "-n", "gpus", "--kube-version", version, *sets)
    assert answer.returncode == 0, answer.stderr
    return [part for part in yaml.load_all(answer.stdout, LOADER) if part]


def kustomized(folder: str | Path) -> list[dict[str, Any]]:
    answer = subprocess.run(
        [require_newer("kustomize"), "build", KUBERNETES / "kustomize" / folder],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return list(yaml.load_all(answer.stdout, LOADER))


def render(*arguments: str | Path) -> None:
    """Run ``render.py`` with helm, as ``make deploy`` and ``make release`` do."""
    path = f"{require_newer('helm').parent}:/usr/bin:/bin"
    command = [sys.executable, KUBERNETES / "render.py", *arguments]
    subprocess.run(command, check=True, env={"PATH": path}, timeout=60)


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == kind)
    return found


def named(parts: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = (each for each in parts if each["name"] == name)
    return found


def template_of_pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the DaemonSet among some objects starts, with its metadata."""
    found: dict[str, Any] = only(objects, "DaemonSet")["spec"]["template"]
    return found


def pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod that the DaemonSet among some objects starts."""
    found: dict[str, Any] = template_of_pod(objects)["spec"]
    return found


def rules_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = (each for each in objects if each["kind"] == "PrometheusRule")
    return [rule for each in made for group in each["spec"]["groups"] for rule in group["rules"]]


def validate(objects: list[dict[str, Any]], version: str) -> None:
    """Check every object of Kubernetes itself against its published schema, which is read once."""
    import kubernetes_validate  # noqa: PLC0415 not in every process that collects the tests

    read = kubernetes_validate.utils.schema_contents
    kubernetes_validate.utils.schema_contents = read if hasattr(read, "cache_info") else cache(read)
    for each in objects:
        # The dashboards are the largest part, and one schema of a ConfigMap is like another.
        if each["apiVersion"] != OPERATOR and each["kind"] != "ConfigMap":
            kubernetes_validate.validate(each, version, strict=True)


def test_chart_passes_helms_own_check() -> None:
    """``helm lint`` finds nothing to complain about, in strict mode."""
    answer = helm("lint", "--strict", str(CHART))
    assert answer.returncode == 0, answer.stdout


def test_chart_package_holds_what_the_chart_uses(tmp_path: Path) -> None:
    """The chart's package has its own files, the licence, and of the linked folders rules and dashboards."""
    answer = helm("package", str(CHART), "--destination", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        names = set(archive.getnames())
        licence = archive.extractfile("vramledger/LICENSE")
        assert licence is not None
        assert licence.read() == (REPOSITORY / "LICENSE").read_bytes()
    linked = {
        f"vramledger/{path.relative_to(REPOSITORY)}"
        for pattern in ("alerts/*.rules.yml", "dashboards/*.json")
        for path in REPOSITORY.glob(pattern)
    }
    own = {"Chart.yaml", "values.yaml", "values.schema.json", "README.md", "LICENSE", ".helmignore"}
    own |= {f"templates/{path.name}" for path in (CHART / "templates").iterdir()}

    assert linked
    assert names == linked | {f"vramledger/{name}" for name in own}


SWITCHES = [
    (),
    tuple(f"{part}.enabled=true" for part in ALL_PARTS),
    ("host.pid=false", "host.rootfs=false", "host.capabilities=false", "agent.enabled=false"),
    ("webConfig.existingSecret=web", "agent.enabled=false"),
    ("runtimeClassName=nvidia", f"image.digest=sha256:{'0' * 64}", "extraArgs={--idle-after=5m}"),
    ("driver.from=volume", "driver.migMonitor=true", "podLabels.team=gpu", "nameOverride=vram"),
    ("pods.labels={team,app.kubernetes.io/name}", "networkPolicy.enabled=true"),
    ("pods.labels={team}", "nodeTaint.enabled=true", "host.capabilities=false"),
    ("driver.from=cdi", "podAnnotations.note=x", "priorityQuota.enabled=true"),
    ("driver.from=host", "openshift.enabled=true", "nodeTaint.exporter.existingSecret=ca"),
]

EDGES = ("1.25", "1.29", "1.30", "1.37")
"""The oldest and the newest version, and those between which the profile of AppArmor got its field."""

ENDS = (EDGES[0], EDGES[-1])


@pytest.mark.parametrize(
    "version", [pytest.param(each, marks=() if each in ENDS else pytest.mark.thorough) for each in VERSIONS]
)
def test_objects_follow_the_published_schemas(version: str) -> None:
    """Every Kubernetes from 1.25 on accepts each object and field; the program accepts each flag."""
    for values in SWITCHES:
        validate(objects := template(*values, version=version), version)
        for container in pod(objects)["containers"]:
            filled = [
                each.replace("$(NODE_NAME)", "n").replace("$(NODE_IP)", "::1") for each in container["args"]
            ]
            parser().parse_args(filled)  # ends by SystemExit when a flag does not exist


def test_every_version_that_has_schemas_is_checked() -> None:
    """The versions begin with the oldest that the chart claims, and end with the newest that has schemas."""
    import kubernetes_validate  # noqa: PLC0415 as above

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    schemas = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    known = {path.name.split(".0-")[0].removeprefix("v") for path in schemas.iterdir()}
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"
    assert set(VERSIONS) == {each for each in known if int(each.split(".")[1]) >= 25}


@pytest.mark.parametrize("version", EDGES)
def test_apparmor_lets_it_read_other_programs_in_every_version(version: str) -> None:
    """Its profile is off: by the field where there is one, else by the annotation that the kubelet reads."""
    made = template_of_pod(template(version=version))
    security = made["spec"]["containers"][0]["securityContext"]
    annotation = "container.apparmor.security.beta.kubernetes.io/vramledger"
    assert (
        security.get("appArmorProfile") == {"type": "Unconfined"}
        if version in ("1.30", "1.37")
        else made["metadata"]["annotations"] == {annotation: "unconfined"}
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "image.repository is not set"), (["--set", "image.repository=REGISTRY/x"], "in place of REGISTRY")],
)
def test_an_image_without_a_registry_is_refused(given: list[str], said: str) -> None:
    """The name alone would be a stranger's image, and the documents' ``REGISTRY`` is a placeholder."""
    answer = helm("template", "vramledger", str(CHART), *given)
    assert answer.returncode != 0
    assert said in answer.stderr


@pytest.mark.parametrize("folder", ["base", "example"])
def test_the_image_of_the_bases_exists_nowhere(folder: str) -> None:
    """Who forgets to set the image in kustomize gets a pull that fails, and no stranger's program."""
    (container,) = pod(kustomized(folder))["containers"]
    assert container["image"].startswith("registry.invalid/vramledger:")


@pytest.mark.parametrize(
    ("source", "visible", "mounts", "annotations"),
    [
        ("env", "all", [], {}),
        ("volume", "/var/run/nvidia-container-devices", ["/var/run/nvidia-container-devices/all"], {}),
        ("cdi", "void", [], {"cdi.k8s.io/vramledger": "nvidia.com/gpu=all"}),
        ("host", "void", ["/usr/local/nvidia"], {}),
    ],
)
def test_the_driver_comes_by_one_way(
    source: str, visible: str, mounts: list[str], annotations: dict[str, str]
) -> None:
    """``driver.from`` chooses how the container gets the GPUs, and only ``host`` makes it privileged."""
    made = template_of_pod(template(f"driver.from={source}"))
    (container,) = made["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    security = container["securityContext"]
    assert env["NVIDIA_VISIBLE_DEVICES"] == visible
    places = [each["mountPath"] for each in container["volumeMounts"]]
    assert [each for each in places if "nvidia" in each] == mounts
    assert made["metadata"].get("annotations", {}) == annotations
    rights = (security.get("privileged", False), security.get("allowPrivilegeEscalation"))
    assert rights == ((True, None) if source == "host" else (False, False))


def test_mig_instances_need_one_more_capability() -> None:
    """``driver.migMonitor`` asks the toolkit for all instances, for which it requires SYS_ADMIN."""
    (container,) = pod(template("driver.migMonitor=true"))["containers"]
    assert {"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"} in container["env"]
    assert "SYS_ADMIN" in container["securityContext"]["capabilities"]["add"]


def test_names_and_labels_can_be_changed() -> None:
    """Another name reaches every object and selector; further labels and annotations reach the pods."""
    parts = (f"{part}.enabled=true" for part in ALL_PARTS)
    objects = template("nameOverride=vram", "podLabels.team=gpu", "podAnnotations.note=x", *parts)
    made = template_of_pod(objects)["metadata"]
    selector = only(objects, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert {each["metadata"]["labels"]["app.kubernetes.io/name"] for each in objects} == {"vram"}
    assert selector.items() <= made["labels"].items()
    assert (made["labels"]["team"], made["annotations"]["note"]) == ("gpu", "x")


def test_only_the_loop_that_taints_can_reach_the_cluster() -> None:
    """Its container alone has a token, which may read and change nodes; it has no other right."""
    objects = template("nodeTaint.enabled=true", "networkPolicy.enabled=true")
    spec = pod(objects)
    exporter, loop = spec["containers"]
    role, policy = only(objects, "ClusterRole"), only(objects, "NetworkPolicy")

    assert spec["automountServiceAccountToken"] is False
    assert "token" not in {each["name"] for each in exporter["volumeMounts"]}
    assert "token" in {each["name"] for each in loop["volumeMounts"]}
    assert loop["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert loop["securityContext"]["runAsNonRoot"] is True
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "patch"}
    assert {name for rule in role["rules"] for name in rule["resources"]} == {"nodes", "nodes/status"}
    ports = [{"protocol": "TCP", "port": port} for port in (443, 6443)]
    assert policy["spec"]["egress"] == [{"ports": ports}]


def test_without_the_loop_nothing_reaches_the_cluster() -> None:
    """By default there is no role, no token and no way out."""
    objects = template("networkPolicy.enabled=true")
    assert not {"ClusterRole", "ValidatingAdmissionPolicy"} & {each["kind"] for each in objects}
    assert len(pod(objects)["containers"]) == 1
    assert only(objects, "NetworkPolicy")["spec"]["egress"] == []


def test_labels_of_pods_need_a_token_that_only_reads() -> None:
    """With ``pods.labels`` the exporter's root has a token, which may read pods and nothing else."""
    objects = template("pods.labels={team,app.kubernetes.io/name}", "networkPolicy.enabled=true")
    (container,) = pod(objects)["containers"]
    role, binding = only(objects, "ClusterRole"), only(objects, "ClusterRoleBinding")
    token = named(pod(objects)["volumes"], "pods-token")

    rights = [(rule["resources"], rule["verbs"]) for rule in role["rules"]]
    assert rights == [(["nodes/pods"], ["get"]), (["pods"], ["list"])]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == pod(objects)["serviceAccountName"]
    assert pod(objects)["automountServiceAccountToken"] is False
    assert token["projected"]["defaultMode"] == 0o400
    mount = named(container["volumeMounts"], "pods-token")
    assert (mount["mountPath"], mount["readOnly"]) == (str(SERVICE_ACCOUNT), True)
    (egress,) = only(objects, "NetworkPolicy")["spec"]["egress"]
    assert [each["port"] for each in egress["ports"]] == [10250, 443, 6443]
    filled = "\n".join(container["args"]).replace("$(NODE_NAME)", "gpu-7").replace("$(NODE_IP)", "fd00::7")
    arguments = parser().parse_args(filled.split("\n"))
    assert arguments.pods_labels == ("app.kubernetes.io/name", "team")
    assert arguments.pods_kubelet == ListenAddress("fd00::7", 10250)
    assert {"NODE_NAME", "NODE_IP"} <= {each["name"] for each in container["env"]}


def test_the_component_for_labels_is_what_the_chart_makes(tmp_path: Path) -> None:
    """The kustomize component makes the pod that the chart makes."""
    shutil.copytree(KUBERNETES / "kustomize", tmp_path / "kustomize")
    mine = tmp_path / "kustomize" / "mine"
    mine.mkdir()
    parts = {"resources": ["../base"], "components": ["../pod-labels"]}
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(parts), encoding="utf-8")
    made = pod(kustomized(mine))
    charted = pod(template("pods.labels={app.kubernetes.io/name}", version=VERSIONS[0]))
    for each in (made, charted):
        (container,) = each["containers"]
        container.pop("image")
        container["args"].sort()
        for parts in (container["env"], container["volumeMounts"], each["volumes"]):
            parts.sort(key=itemgetter("name"))
    assert made == charted


def test_sees_the_host_and_takes_no_gpu() -> None:
    """The pod has the host's processes and four capabilities, and requests no GPU from the scheduler."""
    spec = pod(template())
    (container,) = spec["containers"]
    security = container["securityContext"]
    assert spec["hostPID"] is True
    assert spec["automountServiceAccountToken"] is False
    added = ["SYS_PTRACE", "DAC_READ_SEARCH", "SETUID", "SETGID"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": added}
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert "nvidia.com/gpu" not in json.dumps(container["resources"])
    assert named(container["volumeMounts"], "host")["readOnly"] is True


def test_without_the_hosts_rights_it_is_an_ordinary_user() -> None:
    """With every access to the host turned off, the pod has no privilege."""
    spec = pod(template(*SWITCHES[2]))
    (container,) = spec["containers"]
    assert "hostPID" not in spec
    assert [volume for volume in spec["volumes"] if "hostPath" in volume] == []
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


WRONG = (
    *(("image.digest=abc", "/image/digest"), ("service.port=99999", "/service/port")),
    *(("extraArgs={idle}", "/extraArgs/0"), ("host.pid=maybe", "/host/pid")),
    *(("hostpid=true", "'hostpid' not allowed"), ("driver.from=magic", "/driver/from")),
    *(("driver.cdiDevice=all", "/driver/cdiDevice"), ("pods.labels[0]=te am", "/pods/labels/0")),
    *(("pods.labels[1]=*", "/pods/labels/1"), ("nodeTaint.effect=NoExecute", "/nodeTaint/effect")),
    *(("nodeTaint.key=leftover", "/nodeTaint/key"), ("nodeTaint.after=soon", "/nodeTaint/after")),
    ("networkPolicy.apiServerPorts={}", "/networkPolicy/apiServerPorts"),
    ("podLabels.app\\.kubernetes\\.io/name=x", "invalid propertyName"),
    *(("podMonitor.interval=soon", "/podMonitor/interval"), ("agent.hostPath=run", "/agent/hostPath")),
    *(("webConfig.key=a/b", "/webConfig/key"), ("webConfig.file=web.yml", "'file' not allowed")),
    ("podMonitor.scheme=ftp", "/podMonitor/scheme"),
)


def test_wrong_values_are_refused_by_name() -> None:
    """Invalid values stop helm with a message that names each."""
    answer = helm("template", "vramledger", str(CHART), *(f"--set={value}" for value, _ in WRONG))
    assert answer.returncode != 0
    assert [named for _, named in WRONG if named not in answer.stderr] == []


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([], "http://localhost:8001/api/v1/namespaces/gpus/services/vramledger:metrics/proxy/runbooks/"),
        (["prometheusRule.runbooks=https://gpus.test/runbooks/{alert}"], "https://gpus.test/runbooks/"),
    ],
)
def test_links_of_alerts_lead_to_where_the_cluster_has_them(values: list[str], place: str) -> None:
    """Every alert links to the service through the API server, or to the address that the user gives."""
    alerts = [rule for rule in rules_of(template("prometheusRule.enabled=true", *values)) if "alert" in rule]
    assert len(alerts) > 30
    assert [rule for rule in alerts if rule["annotations"]["runbook_url"] != place + rule["alert"]] == []


@pytest.mark.parametrize("place", ["", "https://gpu.example.org/{instance}/"])
def test_alerts_link_to_the_past_where_pages_have_an_address(place: str) -> None:
    """The chart's alerts have no link to a page until prometheusRule.pages says where pages are."""
    rules = rules_of(template("prometheusRule.enabled=true", f"prometheusRule.pages={place}"))
    links = [rule["annotations"]["page_url"] for rule in rules if "page_url" in rule.get("annotations", {})]
    assert bool(links) == bool(place)
    assert all("https://gpu.example.org/{{ $labels.instance }}/#at={{ with query" in each for each in links)


POD = (
    "$(kubectl get pod -n {0} -o name -l app.kubernetes.io/name={1}"
    " --field-selector spec.nodeName={{{{ $labels.instance }}}})"
)
IN_A_CLUSTER = {
    "sudo vramledger": f"kubectl exec -n {{0}} -c vramledger {POD} -- vramledger",
    "sudo journalctl -u vramledger -n 50": f"kubectl logs --tail=50 -n {{0}} -c vramledger {POD}",
    "sudo systemctl restart vramledger": f"kubectl delete -n {{0}} {POD}",
    'Slurm: scontrol update nodename={{ $labels.instance | reReplaceAll ":.*" "" }} state=drain reason=gpu': (
        "kubectl cordon {{{{ $labels.instance }}}}"
    ),
}
"""What the chart's texts say in place of those for a host, in a namespace and for a name."""


def as_on_a_host(groups: list[dict[str, Any]], *place: str) -> list[dict[str, Any]]:
    """Return groups of rules whose texts say what they say on a host."""
    text = json.dumps(groups)
    for host, cluster in IN_A_CLUSTER.items():
        assert cluster.format(*place) in text
        text = text.replace(cluster.format(*place), json.dumps(host)[1:-1])
    told: list[dict[str, Any]] = json.loads(text)
    return told


def drop_links(*several: list[dict[str, Any]]) -> None:
    """Remove the links from groups of rules: they depend on the place."""
    for rule in (rule for groups in several for group in groups for rule in group["rules"]):
        for link in ("runbook_url", "page_url"):
            rule.get("annotations", {}).pop(link, None)


def rules_of_chart(tmp_path: Path, rules: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "mine.rules.yml"
    file.write_text(rules)
    values = ("--set", REPOSITORY_OF_IMAGE, "--set", "prometheusRule.enabled=true")
    return helm(
        "template", "vramledger", str(CHART), "-n", "gpus", *values,
        "--set-file", f"prometheusRule.rules={file}",
    )  # fmt: skip


OWN = "runbooks: https://wiki.test/{alert}\npages: https://p.test/{instance}/\ngrafana: https://g.test\n"


@pytest.mark.parametrize("own", ["", OWN])
def test_rules_with_other_thresholds_are_given_to_the_chart(tmp_path: Path, own: str) -> None:
    """The chart applies what ``vramledger rules`` writes, and fills in what nobody has set for it."""
    command = [sys.executable, "-m", "vramledger", "rules", "--thresholds", "-"]
    thresholds = f"defaults: {{hoarded_idle: 7777s}}\nalert_prefix: Acme\n{own}"
    told = subprocess.run(command, check=True, capture_output=True, text=True, input=thresholds).stdout
    made = rules_of_chart(tmp_path, told)
    assert made.returncode == 0, made.stderr
    rules = only(list(yaml.load_all(made.stdout, LOADER)), "PrometheusRule")
    given = yaml.load(told, LOADER)["groups"]  # noqa: S506 the C version of the safe one
    groups = as_on_a_host(rules["spec"]["groups"], "gpus", "vramledger")
    if not own:
        drop_links(groups, given)

    assert groups == given
    assert ("https://wiki.test/AcmeGpuMemoryDead" in made.stdout) == bool(own)
    assert ("/vramledger:metrics/proxy/runbooks/AcmeGpuMemoryDead" in made.stdout) != bool(own)


@pytest.mark.parametrize("rules", ["defaults: {hoarded_idle: 2h}", "a: ["])
def test_what_is_not_rules_is_refused(tmp_path: Path, rules: str) -> None:
    """Helm stops, and says what the value is for."""
    made = rules_of_chart(tmp_path, rules)
    assert made.returncode != 0
    assert "prometheusRule.rules: it has no groups; give the file that 'vramledger rules" in made.stderr


@pytest.mark.parametrize("made_by", ["chart", "release"])
def test_rules_arrive_whole(tmp_path: Path, made_by: str) -> None:
    """Every rule of alerts/ is in a PrometheusRule, except for its link; Prometheus' own check reads it."""
    if made_by == "chart":
        objects = template("prometheusRule.enabled=true")
    else:
        render("--rules", tmp_path / "prometheusrule.yaml")
        objects = list(yaml.load_all((tmp_path / "prometheusrule.yaml").read_bytes(), LOADER))
    made = [each for each in objects if each["kind"] == "PrometheusRule"]
    groups = [group for each in made for group in each["spec"]["groups"]]
    groups = as_on_a_host(groups, "gpus" if made_by == "chart" else "vramledger", "vramledger")
    kept = [
        group
        for path in sorted((REPOSITORY / "alerts").glob("*.rules.yml"))
        for group in yaml.load(path.read_bytes(), LOADER)["groups"]  # noqa: S506 it is the safe one
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": groups}), encoding="utf-8")
    drop_links(groups, kept)

    assert groups
    assert sorted(groups, key=itemgetter("name")) == sorted(kept, key=itemgetter("name"))
    subprocess.run([require_tool("promtool"), "check", "rules", file], check=True, capture_output=True)


@pytest.mark.parametrize("made_by", ["chart", "kustomize"])
def test_dashboards_arrive_whole(made_by: str) -> None:
    """Every dashboard is in a ConfigMap that Grafana's sidecar finds and that is small enough."""
    objects = template("dashboards.enabled=true") if made_by == "chart" else kustomized("example")
    made = [each for each in objects if each["kind"] == "ConfigMap"]
    given = {name: json.loads(text) for each in made for name, text in each["data"].items()}
    kept = {path.name: json.loads(path.read_bytes()) for path in (REPOSITORY / "dashboards").glob("*.json")}
    assert kept
    assert given == kept
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in made)
    assert all(len(json.dumps(each)) < 2**20 for each in made)  # etcd's limit


def test_pod_monitor_keeps_our_labels() -> None:
    """Prometheus keeps the labels that say who holds the memory, and ``instance`` is the node's name."""
    objects = template("podMonitor.enabled=true")
    (endpoint,) = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    (container,) = pod(objects)["containers"]
    assert endpoint["honorLabels"] is True
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    by_node = {"targetLabel": "instance", "sourceLabels": ["__meta_kubernetes_pod_node_name"]}
    assert by_node in endpoint["relabelings"]


def test_web_configuration_comes_from_a_secret() -> None:
    """A Secret is mounted whole, so that a renewed one is seen; the PodMonitor has the given settings."""
    objects = template(
        "webConfig.existingSecret=web", "podMonitor.enabled=true", "podMonitor.scheme=https",
        "podMonitor.tlsConfig.serverName=vramledger", "podMonitor.basicAuth.username.name=scrape",
    )  # fmt: skip
    (container,) = pod(objects)["containers"]
    arguments = parser().parse_args(container["args"])
    mount = named(container["volumeMounts"], "web-config")
    (endpoint,) = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]

    assert named(pod(objects)["volumes"], "web-config")["secret"] == {"secretName": "web"}
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
    """The real kustomize combines the folders, and the schemas of every version accept the result."""
    objects = kustomized(folder)
    assert {each["metadata"].get("namespace", "vramledger") for each in objects} == {"vramledger"}
    for version in VERSIONS:
        validate(objects, version)


def test_the_example_can_be_copied(tmp_path: Path) -> None:
    """A copy beside the example, as its first line says, builds with an image of the user's."""
    tree = tmp_path / "deploy" / "kubernetes" / "kustomize"
    shutil.copytree(KUBERNETES / "kustomize", tree)
    shutil.copytree(REPOSITORY / "dashboards", tmp_path / "dashboards")
    shutil.copytree(tree / "example", tree / "mine")
    file = tree / "mine" / "kustomization.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("newName: registry.invalid", "newName: registry.test"), encoding="utf-8")
    objects = kustomized(tree / "mine")
    assert pod(objects)["containers"][0]["image"].startswith("registry.test/vramledger:")
    assert pod(objects)["runtimeClassName"] == "nvidia"
    assert only(objects, "PodMonitor")["metadata"]["labels"]["release"] == "kube-prometheus-stack"
