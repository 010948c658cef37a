"""An agent and an exporter of different versions, each installed from wheels into an environment of its own.

The other version is this one, changed as installed: the one before and the next one at the same time.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.exporter import QUICK, serving
from tests.support.listening import FAKE, environment
from tests.support.packages import built, install_both
from tests.support.standin.library import GIB, StandIn
from vramledger_agent import __version__

AGENT = "vramledger_agent"
OTHER = "9.9.9"
CHANGES = {
    f"{AGENT}/__init__.py": (f'__version__ = "{__version__}"', f'__version__ = "{OTHER}"'),
    # Without the request 'reclaim', and with another.
    f"{AGENT}/protocol/messages.py": ('("reclaim", "snapshot")', '("snapshot", "weather")'),
    f"{AGENT}/commands/parser.py": ('"--allow-reclaim"', '"--allow-weather"'),
    f"{AGENT}/requests.py": ('"reclaim": (', '"weather": ('),
    "vramledger/commands/reclaim.py": ('args.pid, "reclaim"', 'args.pid, "weather"'),
    # Without the collector, and with other entries and another framework.
    f"{AGENT}/session.py": (
        '"collector": collector_entry(),\n            "frameworks": [',
        '"moon": {"phase": 0.5}, "frameworks": [{"framework": "flux", "devices": {"of": 1}}] + [',
        "    found: dict[str, object] = {}\n",
        '    found: dict[str, object] = {"sunny": True, "rain": {"mm": [1]}}\n',
    ),
    # Messages of a kind that nobody knows, before each report and on its connection.
    f"{AGENT}/transport.py": (
        "self._socket.send(message, ",
        'self._socket.send(b\'{"version": 1, "news": []}\'); self._socket.send(message, ',
    ),
}
"""For each file, a text and what is there in the other version, and so on."""

PROGRAM = """
import sys, torch
kept = torch.Tensor(8)
sys.stdin.read()
"""


class Versions(NamedTuple):
    """The Python of each environment: of this version, and of the other."""

    this: Path
    other: Path


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    made = Versions(*(install_both(tmp_path_factory.mktemp("home"), built(tmp_path_factory)) for _ in "12"))
    (packages,) = made.other.parents[1].glob("lib/python3.*/site-packages")
    for file, texts in CHANGES.items():
        text = (packages / file).read_text(encoding="utf-8")
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            assert old in text, f"{file} has no {old}"
            text = text.replace(old, new)
        (packages / file).write_text(text, encoding="utf-8")
        # What pip has compiled may be as old to the second, and of a text as long.
        shutil.rmtree((packages / file).parent / "__pycache__", ignore_errors=True)
    return made


@pytest.mark.parametrize(("agent", "exporter"), [("other", "this"), ("this", "other")])
def test_another_version_costs_only_what_is_not_known(
    agent: str, exporter: str, versions: Versions, place: Path, standin: StandIn
) -> None:
    """Figures arrive from another version's agent, also after messages that one side does not know."""
    inside, outside = getattr(versions, agent), getattr(versions, exporter)
    flags = (*QUICK, f"--agent.socket={place / 'agent.sock'}")
    with serving(*flags, driver=standin.env(), python=str(outside)) as running:
        run = [inside.with_name("vramledger-agent"), "run", "--"]
        environ = environment(
            place, CUDA_VISIBLE_DEVICES="0", PYTHONPATH=str(FAKE), VRAMLEDGER_AGENT_CONSENT="reclaim,weather"
        )
        pipe = subprocess.PIPE
        program = subprocess.Popen([*run, inside, "-c", PROGRAM], env=environ, stdin=pipe, text=True)
        standin.device(0).set_processes([(program.pid, 4 * GIB)])
        told = {"framework": "torch", "pid": program.pid, "gpu": 0}
        page = running.until(lambda page: page.values("framework_pool_bytes", **told), "the report")
        before = page.value("framework_pool_bytes", **told)
        assert page.labels("agent_info", "version") == {__version__ if agent == "this" else OTHER}
        answers = [
            subprocess.run(
                [python.with_name("vramledger"), "reclaim", str(program.pid), "--for=1s",
                 f"--agent.socket={place / 'agent.sock'}"],
                check=False, capture_output=True, text=True, env=environ,
            )
            for python in versions
        ]  # fmt: skip
        at = page.time
        page = running.until(lambda page: page.time > at + 1, "further samples")
        program.communicate("")
    rejected = {reason: value for reason, value in page.values("agent_rejected_total").items() if value}
    for answer in answers:
        assert "does not know this request" in answer.stderr
        assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)
    assert page.value("framework_pool_bytes", **told) == before is not None
    assert rejected == {}
    assert program.returncode == 0
