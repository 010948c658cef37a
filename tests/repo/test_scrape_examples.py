"""Every document that scrapes the exporter keeps the labels that it gives."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOB = re.compile(r"job_name: *[\"']?vramledger\b")
ENDPOINTS = re.compile(r"^( *)(?:podMetricsEndpoints|endpoints):$", re.MULTILINE)


def documents() -> Iterator[Path]:
    """Yield the files for people: what is tracked, without the tests and what the web page serves."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if Path(name).suffix in {".md", ".yml", ".yaml", ".tpl"} and not name.startswith("tests/"):
            yield ROOT / name


# Both READMEs, those of deploy, of compose and of the fleet; the chart's monitor and kustomize's.
SCRAPING = [path for path in documents() if JOB.search(path.read_text(encoding="utf-8"))]
MONITORS = [path for path in documents() if ENDPOINTS.search(path.read_text(encoding="utf-8"))]

assert len(SCRAPING) >= 7
assert len(MONITORS) >= 2


def jobs(text: str) -> Iterator[dict[str, object]]:
    """Yield the scrape jobs of vramledger in a configuration, or in the blocks of a document."""
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) or [text]
    for block in blocks:
        if JOB.search(block):
            found = yaml.safe_load(block)["scrape_configs"]
            yield from (job for job in found if job["job_name"] == "vramledger")


@pytest.mark.parametrize("path", SCRAPING, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_scrape_job_keeps_the_labels(path: Path) -> None:
    """A label of the target, as Kubernetes' discovery sets it, does not replace the owner's."""
    found = list(jobs(path.read_text(encoding="utf-8")))
    assert found
    assert all(job.get("honor_labels") is True for job in found)


@pytest.mark.parametrize("path", MONITORS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_monitor_keeps_the_labels(path: Path) -> None:
    """Prometheus Operator adds namespace, pod and container to every target."""
    text = path.read_text(encoding="utf-8")
    endpoints = len(re.findall(r"^ *- port:", text[text.index("ndpoints:") :], re.MULTILINE))
    assert text.count("honorLabels: true") == endpoints > 0
