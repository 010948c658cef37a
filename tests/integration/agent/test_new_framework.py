"""A framework is declared in one place: a test adds one to a copy of the sources, runs it, and removes it."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from framework_files import WRITERS
from tests.support.exporter import LOOPBACK, QUICK, serving
from tests.support.listening import PROJECT, STARTUP, environment, start
from tests.support.standin.library import GIB, StandIn
from tests.support.sure import sure
from vramledger_agent.protocol.frameworks import FRAMEWORKS

ADDED = PROJECT / "tests" / "support" / "frameworks" / "added"
AGENT = Path("agent/vramledger_agent")
DECLARATION = AGENT / "protocol/frameworks.py"
PROVIDER = AGENT / "frameworks/paddle.py"

CODE = "import paddle.device.cuda, colorsys, sys; sys.stdin.read()"
"""A program that uses the framework, and imports something afterwards, as all programs do."""

OWN_CODE = ("frameworks/*.py", "torch/*.py", "torch_snapshots/*.py")
"""The files that read one framework and may name it."""


def fingerprints(root: Path) -> dict[Path, str]:
    """Return a digest of every source file below a directory."""
    return {
        path.relative_to(root): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def write_what_follows(root: Path) -> None:
    """Run the generators of these files, as ``make generate`` does, in the copy."""
    for program in ("framework_files.py", "docs/src/generate.py"):
        environ = {"PYTHONPATH": f"{root}:{root / 'agent'}", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([sys.executable, str(root / program)], env=environ, check=True)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the exporter and agent, without bytecode."""
    copy = tmp_path / "exporter"
    shutil.copytree(PROJECT / "exporter", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


def add_paddle(root: Path) -> None:
    """Add PaddlePaddle to the frameworks that have an agent: its declaration and its provider."""
    told = (ADDED / "declaration.py").read_text(encoding="utf-8")
    found = sure(re.search(r"# --- from here on\n(.*)    # --- up to here", told, re.DOTALL))
    text = (root / DECLARATION).read_text(encoding="utf-8")
    present = r'    Framework\(\n        "paddle",\n.*?\n    \),\n'
    text, times = re.subn(present, found[1], text, flags=re.DOTALL)
    assert times == 1
    (root / DECLARATION).write_text(text, encoding="utf-8")
    shutil.copy(ADDED / "provider.py", root / PROVIDER)


def test_a_framework_comes_and_goes_with_its_declaration(
    sources: Path, place: Path, standin: StandIn
) -> None:
    """A declaration and a provider are enough for start-up file, report, metrics, JSON and schema."""
    import jsonschema  # noqa: PLC0415 not in every process that collects the tests

    before = fingerprints(sources)
    saved = {DECLARATION: (sources / DECLARATION).read_text(encoding="utf-8")}
    add_paddle(sources)
    write_what_follows(sources)
    after = fingerprints(sources)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    written = {path.relative_to(PROJECT / "exporter") for path in WRITERS}
    assert changed == {DECLARATION, PROVIDER, Path("docs/metrics/agents.md")} | written
    flags = (*QUICK, LOOPBACK, f"--agent.socket={place / 'agent.sock'}")
    driver = {**standin.env(), "PYTHONPATH": f"{sources}:{sources / 'agent'}"}
    with serving(*flags, driver=driver) as exporter:
        startup = sources / AGENT / "startup"
        environ = environment(place, ADDED / "standin", CUDA_VISIBLE_DEVICES="0")
        environ["PYTHONPATH"] = environ["PYTHONPATH"].replace(str(STARTUP), str(startup))
        program = start(CODE, environ)
        standin.device(0).set_processes([(program.pid, 4 * GIB)])
        page = exporter.until(lambda page: page.values("framework_pool_bytes"), "the report")
        document = json.loads(exporter.get("/api/v1/ledger")[1])
        schema = json.loads(exporter.get("/api/v1/schema/ledger")[1])
        program.communicate()
    told = {"framework": "paddle", "pid": program.pid, "gpu": 0}
    for figure, size in {"pool": 3 * GIB, "in_use": GIB, "in_use_peak": 2 * GIB, "limit": None}.items():
        assert page.value(f"framework_{figure}_bytes", **told) == size
    assert page.value("framework_overhead_bytes", pid=program.pid) == GIB
    assert page.value("framework_policy_info", framework="paddle", policy="growth", source="agent") == 1
    jsonschema.validate(document, schema)
    (entry,) = document["devices"][0]["holdings"][0]["agent"]["frameworks"]
    assert (entry["title"], entry["pool"], entry["limit"]) == ("PaddlePaddle", 3 * GIB, None)
    (sources / PROVIDER).unlink()
    for path, text in saved.items():
        (sources / path).write_text(text, encoding="utf-8")
    write_what_follows(sources)
    assert fingerprints(sources) == before


def test_what_follows_is_written() -> None:
    """The start-up file matches the declarations; otherwise run ``make generate``."""
    for path, write in WRITERS.items():
        text = path.read_text(encoding="utf-8")
        assert write(text) == text, path


def words(path: Path) -> set[str]:
    """Return the string literals of a Python file, or all words of another file."""
    if path.suffix != ".py":
        return set(re.findall(r"[\w.]*\w", path.read_text(encoding="utf-8")))
    with path.open("rb") as file:
        tokens = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.STRING]
    return {token.strip("rbf\"'") for token in tokens}


def test_nobody_else_lists_frameworks() -> None:
    """No source of exporter, agent, page, rules or dashboards names two frameworks; the declaration does."""
    names = {name for each in FRAMEWORKS for name in (each.name, each.title)} - {"cuda", "CUDA"}
    written = {path.relative_to(PROJECT) for path in WRITERS}
    places = ("exporter/vramledger", "exporter/agent", "dashboards/src", "alerts/src")
    listing = {}
    for place in places:
        for path in sorted((PROJECT / place).rglob("*")):
            own = any(path.relative_to(PROJECT / place).match(pattern) for pattern in OWN_CODE)
            if path.suffix not in (".py", ".js", ".yml") or own:  # not the runbooks, which are prose
                continue
            found = names & words(path)
            if len(found) > 1:
                listing[path.relative_to(PROJECT)] = found
    assert set(listing) - written == {Path("exporter") / DECLARATION}
