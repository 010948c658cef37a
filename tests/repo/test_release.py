"""The conditions of a release: one version everywhere, a change log in its form, a wheel that runs."""

import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from datetime import date
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.exporter import no_driver
from tests.support.fleet.engines import until
from tests.support.packages import built
from tests.support.ports import free_port
from tests.support.requirements import do_without, require_tool
from tests.support.waiting import PATIENCE
from vramledger import __version__

ROOT = Path(__file__).parents[2]


def test_every_version_is_the_packages() -> None:
    """Chart and example have the version of the package; ``make deploy`` writes it there."""
    kubernetes = ROOT / "deploy" / "kubernetes"
    chart = yaml.safe_load((kubernetes / "chart" / "Chart.yaml").read_text(encoding="utf-8"))
    example = yaml.safe_load(
        (kubernetes / "kustomize/example/kustomization.yaml").read_text(encoding="utf-8")
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    assert {image["newTag"] for image in example["images"]} == {__version__}


def test_change_log_has_its_form() -> None:
    """Headings are versions with their dates, the newest first; entries have the kind and the area."""
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("#")]
    released = [re.fullmatch(r"## (\d+)\.(\d+)\.(\d+) / (\d{4}-\d\d-\d\d)", line) for line in headings]
    if headings[0] == "## Unreleased":
        released.pop(0)
    versions = [tuple(map(int, match.groups()[:3])) for match in released if match]
    dates = [date.fromisoformat(match[4]) for match in released if match]

    assert None not in released
    assert versions == sorted(set(versions), reverse=True)
    assert dates == sorted(dates, reverse=True)
    entry = re.compile(r"## |\* \[(CHANGE|FEATURE|ENHANCEMENT|BUGFIX)\] [\w, ]+: \S|  \S")
    assert [line for line in lines if line and not entry.match(line)] == []


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment, with only its dependencies, as pipx and uvx do."""
    home = tmp_path_factory.mktemp("fresh")
    wheels = list(built(tmp_path_factory).glob("*.whl"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    # Without bytecode, as uvx installs: the program makes what it needs of it.
    pip = [sys.executable, "-m", "pip", "--python", str(home / "venv"), "install", "--quiet", "--no-compile"]
    pip += map(str, wheels)
    done = subprocess.run(pip, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        do_without(f"pip cannot install what the wheel needs ({done.stderr.strip()[-200:]})")
    return home / "venv"


def alone(directory: Path) -> dict[str, str]:
    """Return an environment in which no file of the checkout can be found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, **no_driver(directory / "none")}


def fetched(url: str, part: str) -> str:
    """Return a page with this part; empty while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:  # noqa: S310 loopback
            text: str = answer.read().decode()
    except OSError:
        return ""
    return text if part in text else ""


@pytest.mark.thorough
def test_wheel_runs_in_a_fresh_environment(environment: Path, tmp_path: Path) -> None:
    """A program that pipx or uvx starts has its version, page, demo and manual."""
    program = environment / "bin" / "vramledger"
    env = alone(tmp_path)
    said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, env=env)
    where = f"127.0.0.1:{free_port()}"
    serve = [str(program), "serve", "--source=auto", f"--web.listen-address={where}", "--no-collector.agent"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(serve, stderr=log, env=env, cwd=tmp_path) as process,
    ):
        try:
            page = until(lambda: fetched(f"http://{where}/", "<title>"), "the page", PATIENCE)
            until(
                lambda: fetched(f"http://{where}/metrics", "vramledger_device_memory_bytes{"),
                "data",
                PATIENCE,
            )
        finally:
            process.terminate()
    code = process.returncode

    rules = subprocess.run([program, "rules"], check=True, capture_output=True, text=True, env=env)

    assert __version__ in said.stdout
    assert "GpuMemoryHoarded" in rules.stdout
    assert "vramledger" in page
    assert code == 0
    assert (environment / "share/man/man1/vramledger.1").exists()


def locked(name: str) -> dict[str, list[str]]:
    """Return the packages of a lock file of the image, each with its hashes."""
    text = (ROOT / "deploy/docker" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines()]
    return {line[0]: [part for part in line if part.startswith("--hash=sha256:")] for line in lines if line}


def test_the_image_installs_locked_packages_only() -> None:
    """Each package of the image has a version that pyproject.toml allows, and hashes; none is missing."""
    packages = locked("requirements.txt")
    versions = {name.partition("==")[0]: Version(name.partition("==")[2]) for name in packages}
    assert all(packages.values())
    assert all(locked("build-requirements.txt").values())
    for text in requires("vramledger") or []:
        wanted = Requirement(text)
        if wanted.name == "vramledger-agent":
            continue  # built beside it
        assert versions[wanted.name.lower()] in wanted.specifier, f"{text}; run: make lock"
    hatchling = re.findall(r'^    "(hatchling==[^"]*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(hatchling) < set(locked("build-requirements.txt"))


@pytest.mark.thorough
def test_nothing_is_released_while_nobody_is_named(tmp_path: Path) -> None:
    """A release names what is missing: address, maintainers, the way to report; filled in, it goes on."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)

    def refused() -> str:
        make = [sys.executable, "deploy/release/make.py", "dist"]
        # Without helm the first step after this one fails, so nothing more is built here.
        env = {**os.environ, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(make, check=False, cwd=clone, capture_output=True, text=True, env=env)
        assert done.returncode != 0
        return done.stderr

    def fill(name: str, before: str, after: str) -> None:
        path = clone / name
        text = path.read_text(encoding="utf-8")
        assert before in text
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
        commit = ["commit", "--quiet", "-am", name]
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *commit], check=True, cwd=clone
        )

    said, project = refused(), "pyproject.toml"
    missing = (f"{project}: [project.urls]", f"{project}: maint", "Chart.yaml: home", "SECURITY.md:")
    assert [name for name in missing if name not in said] == []
    scripts = "[project.scripts]"
    fill(project, scripts, f'[project.urls]\nSource = "https://localhost/v"\n\n{scripts}')
    assert "pyproject.toml: [project.urls]" in refused()
    others = 'Issues = "https://localhost/i"\nChangelog = "https://localhost/c"\n'
    fill(project, scripts, f"{others}\n{scripts}")
    fill(project, 'license = "', 'maintainers = [{ name = "m", email = "m@localhost" }]\nlicense = "')
    assert "pyproject.toml" not in refused()
    fill("deploy/kubernetes/chart/Chart.yaml", "type:", "home: h\nsources: []\nmaintainers: []\ntype:")
    assert "Chart.yaml" not in refused()
    assert "SECURITY.md" in refused()
    fill("SECURITY.md", "# Security\n", "# Security\n\nWrite to <mailto:security@localhost>.\n")
    assert "fill in first" not in refused()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_release_is_made_by_one_command_and_proves_its_origin(tmp_path: Path) -> None:
    """Two builds of one commit give the same packages; digests, signature, origin and contents are true."""
    require_tool("ssh-keygen")
    clone, key = tmp_path / "clone", tmp_path / "key"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    make = [sys.executable, "deploy/release/make.py", "dist", f"--sign={key}", "--builder=urn:test"]
    make.append("--rehearsal")
    tools = {**os.environ, "PATH": f"{ROOT}/.cache/newer/bin:{os.environ['PATH']}"}
    built = []
    for _ in range(2):
        subprocess.run(make, check=True, cwd=clone, env=tools, capture_output=True)
        built.append({each.name: each.read_bytes() for each in (clone / "dist").iterdir()})
    first, files = built
    stem = f"vramledger-{__version__}"

    agent = f"vramledger_agent-{__version__}"
    assert {name.replace(stem, "*").replace(agent, "agent") for name in files} == {
        *("*-py3-none-any.whl", "*.tar.gz", "*-requirements.txt", "*.cdx.json", "*.provenance.json", "*.tgz"),
        *("agent-py3-none-any.whl", "agent.tar.gz", "prometheusrule.yaml", "SHA256SUMS", "SHA256SUMS.sig"),
    }
    packages = [f"{each}{end}" for each in (stem, agent) for end in ("-py3-none-any.whl", ".tar.gz")]
    for name in (*packages, f"{stem}.cdx.json"):
        assert first[name] == files[name], name

    subjects = json.loads(files[f"{stem}.provenance.json"])["subject"]
    digests = {each["name"]: each["digest"]["sha256"] for each in subjects}
    assert digests[f"{stem}.tgz"] == hashlib.sha256(files[f"{stem}.tgz"]).hexdigest()
    inside = {(each["name"], each["version"]) for each in json.loads(files[f"{stem}.cdx.json"])["components"]}
    assert inside == {tuple(name.split("==")) for name in locked("requirements.txt")}

    signers = tmp_path / "signers"
    signers.write_text(f'releases namespaces="vramledger-release" {key.with_suffix(".pub").read_text()}')
    verify: list[str | Path] = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "releases"]
    verify += ["-n", "vramledger-release", "-s", clone / "dist/SHA256SUMS.sig"]
    sums = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(verify, check=False, input=files["SHA256SUMS"], capture_output=True).returncode == 0
    assert subprocess.run(verify, check=False, input=b"x", capture_output=True).returncode != 0
    assert subprocess.run(sums, check=False, cwd=clone / "dist").returncode == 0
    (clone / "dist/prometheusrule.yaml").write_text("changed")
    assert subprocess.run(sums, check=False, cwd=clone / "dist", capture_output=True).returncode != 0

    (clone / "README.md").write_text("changed")
    done = subprocess.run(make, check=False, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 1
    assert "not committed" in done.stderr
