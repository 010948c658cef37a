"""Try the chart and the bases on a real API server: ``python -m tests.lab.kubernetes_trial``.

It needs the programs ``etcd`` and ``kube-apiserver`` on PATH, which no package brings, and helm and kustomize
from ``.ci/provision/newer``. It applies every object with the server's strict validation, gives a pod of the
DaemonSet its token, marks a node with it as ``vramledger taint`` does, reads the labels of pods with it as
``--pods.labels`` does, and tries what each token must not do.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.ports import free_port
from tests.support.requirements import NEWER, PROJECT
from vramledger.config import PodConfig
from vramledger.kubernetes.command import KubernetesNode, Taint
from vramledger.kubernetes.node_marks import CONDITION, NodeMarks, Recorded
from vramledger.kubernetes.pod_labels import PodApi

KUBERNETES = PROJECT / "deploy" / "kubernetes"
KEY = "vramledger/leftover"
ADMINISTRATOR = "administrator"
"""The token of the administrator of a server that lives for a minute."""

START = 120.0
OPERATOR = "monitoring.coreos.com/v1"
SWITCHES: tuple[list[str], ...] = (
    [],
    ["nodeTaint.enabled=true", "networkPolicy.enabled=true", "dashboards.enabled=true"],
    ["driver.from=host", "openshift.enabled=true", "priorityQuota.enabled=true"],
    ["driver.from=volume", "driver.migMonitor=true"],
    [
        "driver.from=cdi",
        "host.pid=false",
        "host.rootfs=false",
        "host.capabilities=false",
        "agent.enabled=false",
    ],
    ["pods.labels={team,app.kubernetes.io/name}", "networkPolicy.enabled=true", "storage.enabled=true"],
)
TAINTING, LABELLED = 1, 5
"""The places in :data:`SWITCHES` of the loop that taints, and of the labels of pods."""


class Server:
    """A client of the API server, as an administrator or with a token."""

    def __init__(self, port: int, authority: Path) -> None:
        self.port = port
        self._trust = ssl.create_default_context(cafile=authority)

    def send(
        self, method: str, path: str, body: object = None, *, token: str = ADMINISTRATOR, kind: str = "json"
    ) -> tuple[int, dict[str, Any]]:
        """Send a request; return the status and the object."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}", data=data, method=method,
            headers={"Authorization": f"Bearer {token}", "Content-Type": f"application/{kind}"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, context=self._trust) as answer:  # noqa: S310
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def apply(self, each: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Apply an object as ``kubectl apply --server-side --validate=strict`` does."""
        kinds = {
            "NetworkPolicy": "networkpolicies",
            "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
        }
        plural = kinds.get(each["kind"], f"{each['kind'].lower()}s")
        version = each["apiVersion"]
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        space = each["metadata"].get("namespace")
        place = f"{root}/namespaces/{space}" if space else root
        path = f"{place}/{plural}/{each['metadata']['name']}"
        options = "fieldManager=trial&force=true&fieldValidation=Strict"
        return self.send("PATCH", f"{path}?{options}", each, kind="apply-patch+yaml")


@contextmanager
def servers(home: Path) -> Iterator[Server]:
    """Run etcd and the API server."""
    programs = [shutil.which(name) for name in ("etcd", "kube-apiserver")]
    if None in programs:
        sys.exit("etcd and kube-apiserver are not on PATH")
    etcd, api = map(str, programs)
    store, peers, port = free_port(), free_port(), free_port()
    subprocess.run(["openssl", "genrsa", "-out", home / "sa.key", "2048"], check=True, capture_output=True)
    (home / "tokens.csv").write_text('administrator,admin,1,"system:masters"\n', encoding="ascii")
    commands: list[list[str]] = [
        [etcd, f"--data-dir={home}/etcd", f"--listen-client-urls=http://127.0.0.1:{store}",
         f"--advertise-client-urls=http://127.0.0.1:{store}", f"--listen-peer-urls=http://127.0.0.1:{peers}"],
        [api, f"--etcd-servers=http://127.0.0.1:{store}", f"--secure-port={port}", "--bind-address=127.0.0.1",
         f"--cert-dir={home}/certs", "--service-account-issuer=https://kubernetes.default.svc",
         f"--service-account-key-file={home}/sa.key", f"--service-account-signing-key-file={home}/sa.key",
         "--authorization-mode=RBAC", f"--token-auth-file={home}/tokens.csv", "--allow-privileged",
         "--service-cluster-ip-range=10.0.0.0/24"],
    ]  # fmt: skip
    with ExitStack() as stack:
        log = stack.enter_context((home / "log").open("wb"))
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(process.terminate)
        deadline = time.monotonic() + START
        while True:
            try:
                server = Server(port, home / "certs" / "apiserver.crt")
                if server.send("GET", "/api/v1/namespaces/default")[0] == 200:
                    break
            except OSError:
                pass
            if time.monotonic() > deadline:
                sys.exit(
                    f"the API server did not start:\n{(home / 'log').read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.5)
        yield server


def rendered(space: str, sets: list[str]) -> list[dict[str, Any]]:
    """Return the objects of the chart for the newest version that it knows."""
    words = [
        word for each in ("image.repository=registry.test/vramledger", *sets) for word in ("--set", each)
    ]
    command: list[str | Path] = [
        NEWER / "helm",
        "template",
        "vramledger",
        KUBERNETES / "chart",
        "-n",
        space,
        *words,
    ]
    answer = subprocess.run([*command, "--kube-version", "1.35"], check=True, capture_output=True, text=True)
    return [each for each in yaml.safe_load_all(answer.stdout) if each]


class Trial:
    """Says of each step whether it went as it must."""

    def __init__(self) -> None:
        self.failed = 0

    def expect(self, what: str, status: int, answer: dict[str, Any], wanted: tuple[int, ...]) -> None:
        """Print a step."""
        good = status in wanted
        self.failed += not good
        more = "" if status < 400 and good else f": {answer.get('message', '')[:200]}"
        print(f"{'ok  ' if good else 'FAIL'} {status} {what}{more}")


def try_objects(server: Server, trial: Trial) -> None:
    """Apply what the chart and the bases give."""
    for number, sets in enumerate(SWITCHES):
        space = f"gpus-{number}"
        server.send("POST", "/api/v1/namespaces", {"metadata": {"name": space}})
        for each in rendered(space, list(sets)):
            trial.expect(f"chart {sets}: {each['kind']}", *server.apply(each), (200, 201))
    built = subprocess.run(
        [NEWER / "kustomize", "build", KUBERNETES / "kustomize" / "example"], check=True, capture_output=True
    )
    for each in yaml.safe_load_all(built.stdout):
        if each["apiVersion"] != OPERATOR:
            trial.expect(f"kustomize: {each['kind']}", *server.apply(each), (200, 201))


def make_pod(server: Server, trial: Trial, node: str, number: int) -> str:
    """Make a node, a pod on it of the DaemonSet with these switches, and return the pod's token."""
    space = f"gpus-{number}"
    server.send("POST", "/api/v1/nodes", {"metadata": {"name": node}})
    objects = rendered(space, list(SWITCHES[number]))
    (daemonset,) = (each for each in objects if each["kind"] == "DaemonSet")
    spec = {**daemonset["spec"]["template"]["spec"], "nodeName": node}
    spec.pop("priorityClassName", None)
    pod = {"metadata": {"name": f"vramledger-{node}", "namespace": space}, "spec": spec}
    status, made = server.send("POST", f"/api/v1/namespaces/{space}/pods", pod)
    trial.expect(f"a pod of the DaemonSet on {node}", status, made, (201,))
    bound = {
        "kind": "Pod",
        "apiVersion": "v1",
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
    }
    request = {"spec": {"audiences": [], "boundObjectRef": bound}}
    path = f"/api/v1/namespaces/{space}/serviceaccounts/vramledger/token"
    status, token = server.send("POST", path, request)
    trial.expect("its token", status, token, (201,))
    return str(token["status"]["token"])


def write_account(home: Path, name: str, token: str) -> Path:
    """Return a folder with a token and the authority, as a pod has one."""
    account = home / name
    account.mkdir()
    (account / "token").write_text(token, encoding="ascii")
    shutil.copy(home / "certs" / "apiserver.crt", account / "ca.crt")
    return account


def try_marks(server: Server, trial: Trial, home: Path) -> None:
    """Mark a node with the token of its pod, and try what the token must not do."""
    token = make_pod(server, trial, "gpu-1", TAINTING)
    server.send("POST", "/api/v1/nodes", {"metadata": {"name": "gpu-2"}})
    other = {"spec": {"taints": [{"key": "other", "effect": "NoSchedule"}]}}
    server.send("PATCH", "/api/v1/nodes/gpu-1", other, kind="merge-patch+json")
    account = write_account(home, "tainting", token)
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
    node = KubernetesNode("gpu-1", Taint(KEY, "NoSchedule"), environ, account)

    async def mark() -> tuple[NodeMarks, NodeMarks]:
        # A policy is in force some moments after it was made, and so is a role.
        present = await node.read()
        text = Recorded("boot", frozenset({(7, 8)})).to_text()
        await node.write(NodeMarks(tainted=True, annotation=text, status="True", message="left"), present)
        tainted = await node.read()
        await node.write(NodeMarks(tainted=False, status="False", message="clean"), tainted)
        return tainted, await node.read()

    tainted, freed = asyncio.run(mark())
    good = (tainted.tainted, tainted.status, freed) == (True, "True", NodeMarks(False, "", "False", "clean"))
    trial.expect("the node is tainted and freed", 200 if good else 500, {"message": str(freed)}, (200,))
    _, found = server.send("GET", "/api/v1/nodes/gpu-1")
    kept = {"key": "other", "effect": "NoSchedule"} in found["spec"]["taints"]
    trial.expect("the other taint stays", 200 if kept else 500, found, (200,))
    own = {"key": KEY, "effect": "NoSchedule"}
    ready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    more = {"status": {"capacity": {"nvidia.com/gpu": "9"}}}
    ours = {"status": {"conditions": [{"type": CONDITION, "status": "True"}]}}
    tries = [
        ("taint another node", "gpu-2", "merge-patch", {"spec": {"taints": [own]}}),
        ("remove the other taint", "gpu-1", "merge-patch", {"spec": {"taints": [own]}}),
        ("add a taint of another key", "gpu-1", "merge-patch",
         {"spec": {"taints": [*found["spec"]["taints"], {"key": "mine", "effect": "NoExecute"}]}}),
        ("change a label", "gpu-1", "merge-patch", {"metadata": {"labels": {"role": "x"}}}),
        ("change another annotation", "gpu-1", "merge-patch", {"metadata": {"annotations": {"x": "y"}}}),
        ("cordon the node", "gpu-1", "merge-patch", {"spec": {"unschedulable": True}}),
        ("call the node not ready", "gpu-1/status", "strategic-merge-patch", ready),
        ("change the capacity", "gpu-1/status", "merge-patch", more),
        ("set our condition on another node", "gpu-2/status", "strategic-merge-patch", ours),
    ]  # fmt: skip
    for what, path, kind, change in tries:
        done = server.send("PATCH", f"/api/v1/nodes/{path}", change, token=token, kind=f"{kind}+json")
        trial.expect(f"refused: {what}", *done, (403, 422))
    for what, method, path in [
        ("read secrets", "GET", "/api/v1/secrets"),
        ("list pods", "GET", "/api/v1/pods"),
        ("delete the node", "DELETE", "/api/v1/nodes/gpu-1"),
    ]:
        trial.expect(f"refused: {what}", *server.send(method, path, token=token), (403,))


def try_labels(server: Server, trial: Trial, home: Path) -> None:
    """Read the labels of a node's pods with the token of its pod, and try what the token must not do."""
    token = make_pod(server, trial, "gpu-3", LABELLED)
    server.send("POST", "/api/v1/nodes", {"metadata": {"name": "gpu-4"}})
    for name, node in (("train-0", "gpu-3"), ("train-1", "gpu-4")):
        body = {
            "metadata": {"name": name, "labels": {"team": "vision", "customer": "x"}},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "registry.test/train"}],
                     "automountServiceAccountToken": False},
        }  # fmt: skip
        server.send("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
        made = server.send("POST", "/api/v1/namespaces/default/pods", body)
        trial.expect(f"a pod on {node}", *made, (201,))
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
    config = PodConfig(
        ("app.kubernetes.io/name", "team"), "gpu-3", None, write_account(home, "labels", token)
    )
    found = dict(PodApi(config, environ).read())
    wanted = {("default", "train-0"): {"team": "vision"}, (f"gpus-{LABELLED}", "vramledger-gpu-3"): {}}
    trial.expect("the allowed labels of this node's pods", 200 if found == wanted else 500,
                 {"message": str(found)}, (200,))  # fmt: skip
    trial.expect("that a pod may read a node's pods", *reviewed(server, "get", "pods"), (200,))
    trial.expect("refused: nodes/proxy", *reviewed(server, "get", "proxy"), (403,))
    for what, method, path in [
        ("read secrets", "GET", "/api/v1/secrets"),
        ("read nodes", "GET", "/api/v1/nodes/gpu-3"),
        ("delete a pod", "DELETE", "/api/v1/namespaces/default/pods/train-0"),
        ("make a pod", "POST", "/api/v1/namespaces/default/pods"),
    ]:
        trial.expect(f"refused: {what}", *server.send(method, path, token=token), (403,))


def reviewed(server: Server, verb: str, part: str) -> tuple[int, dict[str, Any]]:
    """Ask as a kubelet does whether the pod may use a part of its node; 200 or 403."""
    body = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:gpus-{LABELLED}:vramledger",
            "resourceAttributes": {"verb": verb, "resource": "nodes", "subresource": part, "name": "gpu-3"},
        },
    }  # fmt: skip
    _, answer = server.send("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return (200 if answer["status"]["allowed"] else 403), answer


def main() -> int:
    """Run all steps; the exit status is 1 when one did not go as it must."""
    trial = Trial()
    with tempfile.TemporaryDirectory(prefix="kubernetes-") as scratch, servers(Path(scratch)) as server:
        try_objects(server, trial)
        try_marks(server, trial, Path(scratch))
        try_labels(server, trial, Path(scratch))
    print(f"{trial.failed} steps failed")
    return 1 if trial.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
