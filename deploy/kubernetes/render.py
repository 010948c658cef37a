"""Render the kustomize bases from the chart, so that the objects are described once: ``make deploy``.

The chart's version and the example's image tag become the package's. With ``--rules FILE`` it writes only the
PrometheusRule objects, to that file: ``make release`` publishes them, and the repository does not keep them.
It needs helm.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMESPACE = "vramledger"
IMAGE = "registry.invalid/vramledger"
"""The image in the bases. No registry can have this name, so nobody runs a stranger's image by mistake."""

OLDEST = "1.25.0"
"""The oldest Kubernetes that the bases are for. What they have for it is understood by every newer one."""

FOLDERS = {
    # By the folder of the bases: its templates, and the kind of its kustomization.
    "base": ("Kustomization", ["serviceaccount", "daemonset", "service"]),
    "prometheus-operator": ("Component", ["podmonitor"]),
    "network-policy": ("Component", ["networkpolicy"]),
    "pod-labels": ("", ["podlabels"]),  # its kustomization has patches, and is written by hand
}

HEADER = (
    "# Rendered from ../../chart by deploy/kubernetes/render.py; change the chart, then run: make deploy\n"
)


def main() -> None:
    """Write the files that the arguments ask for."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--into", type=Path, help="write the bases below this folder, change no version")
    arguments.add_argument("--rules", type=Path, metavar="FILE", help="write only the PrometheusRule objects")
    chosen = arguments.parse_args()
    if chosen.rules:
        chosen.rules.write_text(render("prometheusrule"), encoding="utf-8")
        return
    if not chosen.into:
        number()
    write_bases(chosen.into or HERE / "kustomize")


def write_bases(target: Path) -> None:
    """Write all folders of the kustomize bases into a folder."""
    for folder, (kind, templates) in FOLDERS.items():
        path = target / folder
        path.mkdir(parents=True, exist_ok=True)
        for template in templates:
            (path / f"{template}.yaml").write_text(HEADER + render(template), encoding="utf-8")
        resources = [f"{template}.yaml" for template in templates]
        if folder == "base":
            (path / "namespace.yaml").write_text(HEADER + namespace(), encoding="utf-8")
            resources.insert(0, "namespace.yaml")
        if not kind:
            continue
        api = "kustomize.config.k8s.io/v1" + ("beta1" if kind == "Kustomization" else "alpha1")
        listed = "".join(f"  - {name}\n" for name in resources)
        (path / "kustomization.yaml").write_text(
            f"{HEADER}apiVersion: {api}\nkind: {kind}\nresources:\n{listed}", encoding="utf-8"
        )


def number() -> None:
    """Write the packages' version into the chart, the example and the exporter's need of its agent."""
    package = HERE.parents[1] / "exporter" / "agent" / "vramledger_agent" / "__init__.py"
    (version,) = re.findall(r'^__version__ = "(.*)"$', package.read_text(encoding="utf-8"), re.MULTILINE)
    for path in (HERE / "chart" / "Chart.yaml", HERE / "kustomize" / "example" / "kustomization.yaml"):
        text = path.read_text(encoding="utf-8")
        new = re.sub(
            r"^(\s*(?:version|appVersion|newTag): ).*$", rf"\g<1>{version}", text, flags=re.MULTILINE
        )
        path.write_text(new, encoding="utf-8")
    project = HERE.parents[1] / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    new = re.sub(r'(?<="vramledger-agent==)[^"]*', version, text)
    project.write_text(new, encoding="utf-8")


def render(template: str) -> str:
    """Return one template of the chart with its part enabled."""
    command = ["helm", "template", "vramledger", str(HERE / "chart"), "--namespace", NAMESPACE]
    command += ["--kube-version", OLDEST, "--set", f"image.repository={IMAGE}"]
    for part in ("podMonitor", "prometheusRule", "networkPolicy"):
        command += ["--set", f"{part}.enabled=true"]
    if template == "podlabels":
        command += ["--set", "pods.labels={app.kubernetes.io/name}"]
    command += ["--show-only", f"templates/{template}.yaml"]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"helm: {answer.stderr.strip().splitlines()[-1]}")
    lines = answer.stdout.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("# Source:", "    helm.sh/chart")))


def namespace() -> str:
    """Return the namespace: access to the host needs the privileged profile of Pod Security Admission."""
    return (
        "apiVersion: v1\nkind: Namespace\nmetadata:\n"
        f"  name: {NAMESPACE}\n"
        "  labels:\n    pod-security.kubernetes.io/enforce: privileged\n"
    )


if __name__ == "__main__":
    main()
