"""A fact about holders takes four files: a test adds one to a copy of the sources and removes it again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tests.integration.agent.test_new_framework import fingerprints
from tests.support.exporter import QUICK, serving
from tests.support.listening import PROJECT
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, StandIn
from vramledger.model.holder_facts import HOLDER_FACTS

COLLECTOR = Path("vramledger/readers/hosts/oom_scores.py")
DECLARATION = Path("vramledger/model/holder_facts.py")
METRIC = Path("vramledger/metrics/processes.py")
TEXT = Path("docs/metrics/processes.md")

COLLECTOR_TEXT = """
from pathlib import Path

from vramledger.model.holder_facts import OomScore
from vramledger.readers.collector import Collector, Context, Part
from vramledger.readers.hosts.host import Host


class OomScores(Collector):
    def __init__(self, root: str) -> None:
        self._root = root

    def read(self, context: Context) -> Part:
        return {"oom_scores": tuple(
            OomScore(row.pid, row.start, int(Path(self._root, str(row.pid), "oom_score_adj").read_text()))
            for row in context.rows
        )}


def make_collector(host: Host) -> OomScores:
    return OomScores(host.root)
"""

STRUCT = "@dataclass(frozen=True, slots=True, kw_only=True)\nclass KnownHolderFacts:"

TYPE = """class OomScore(NamedTuple):
    pid: int
    start: int
    adjustment: int


"""
READ = "    oom_scores: tuple[OomScore, ...] = ()\n"
KNOWN = "    oom_scores: Mapping[int, OomScore] = field(default_factory=dict)\n"
ROW = """    HolderFact(
        "oom_scores", OomScore, "oom-score", on=True, module="hosts.oom_scores",
        help="how willing the kernel is to end a holder",
    ),
"""
FAMILY = """OOM_SCORE = HolderFactFamily(
    PREFIX + "process_oom_score_adjustment", ("pid",),
    "The adjustment of the score by which the kernel ends a process when memory is full.", "oom-score",
    source="`/proc/PID/oom_score_adj`", absent="when it is not readable",
    fact="oom_scores", read=lambda score: score.adjustment,
)

"""
SECTION = """## `vramledger_process_oom_score_adjustment`

It is about the host's memory, not the GPU's.

Holders that the kernel ends first:

```promql
vramledger_process_oom_score_adjustment > 500
```

"""

EDITS: dict[Path, tuple[tuple[str, str], ...]] = {
    DECLARATION: (
        ("class ReadHolderFacts(", TYPE),
        (f"\n\n{STRUCT}", READ),
        ("\n\nclass HolderFact(", KNOWN),
        ('    HolderFact(\n        "kv_caches",', ROW),
    ),
    METRIC: (
        ("FAMILIES = (\n    *HOLDING_FAMILIES,\n    PROCESS_START", FAMILY),
        ("    PROCESSES_DROPPED,\n)\n", "    OOM_SCORE,\n"),
        ("    HOLDING,\n", "    HolderFactFamily,\n"),
    ),
    TEXT: (("## `vramledger_process_orphan_working`\n", SECTION),),
}
"""For each file the text before which something is inserted, and what."""


def write_documents(root: Path) -> None:
    """Generate the pages of the metrics, as ``make generate`` does, in the copy."""
    environ = {"PYTHONPATH": f"{root}:{root / 'agent'}", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, str(root / "docs/src/generate.py")], env=environ, check=True)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the exporter, without bytecode."""
    copy = tmp_path / "exporter"
    shutil.copytree(PROJECT / "exporter", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


def test_a_fact_about_holders_takes_four_files(sources: Path, standin: StandIn, stage: Stage) -> None:
    """A collector, a declaration, a metric and its text give flag, figures and health, and fail alone."""
    before = fingerprints(sources)
    saved = {path: (sources / path).read_text(encoding="utf-8") for path in EDITS}
    (sources / COLLECTOR).write_text(COLLECTOR_TEXT, encoding="utf-8")
    for path, edits in EDITS.items():
        text = saved[path]
        for place, added in edits:
            assert text.count(place) == 1, (path, place)
            text = text.replace(place, added + place)
        (sources / path).write_text(text, encoding="utf-8")
    write_documents(sources)

    after = fingerprints(sources)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed - {Path("docs/METRICS.md")} == {COLLECTOR, DECLARATION, METRIC, TEXT}

    holder = stage.start()
    standin.device(0).set_processes([(holder.pid, GIB)])
    driver = {**standin.env(), "PYTHONPATH": str(sources)}
    score = int(Path(f"/proc/{holder.pid}/oom_score_adj").read_text(encoding="ascii"))
    with serving(*QUICK, driver=driver) as exporter:
        page = exporter.until(lambda page: page.values("process_oom_score_adjustment"), "the figure")
        assert page.value("process_oom_score_adjustment", pid=holder.pid) == score
        assert page.value("collector_success", collector="oom-score") == 1
    with serving(*QUICK, "--no-collector.oom-score", driver=driver) as exporter:
        page = exporter.until(lambda page: page.values("process_memory_bytes"), "the holder")
        assert page.values("process_oom_score_adjustment") == {}

    (sources / COLLECTOR).unlink()
    for path, text in saved.items():
        (sources / path).write_text(text, encoding="utf-8")
    write_documents(sources)
    assert fingerprints(sources) == before


def test_facts_about_holders_are_numbers() -> None:
    """A recording is masked, and nothing masks these facts: a text needs its own field in the reading."""
    for fact in HOLDER_FACTS:
        hints = get_type_hints(fact.kind)
        assert list(hints)[:2] == ["pid", "start"]
        kinds = {each for hint in hints.values() for each in (get_args(hint) or (hint,))}
        assert kinds <= {int, float, bool, type(None)}, fact.field
