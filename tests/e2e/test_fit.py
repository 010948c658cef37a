"""``vramledger fit``: what real processes need, by their agents and by the driver, and where that is free."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_client import report
from tests.support.exporter import QUICK, no_driver, run, serving
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace
from tests.support.standin.library import GIB, MIB, StandIn
from tests.support.waiting import wait_until

RECORDINGS = Path(__file__).parents[1] / "recordings"


def fit(*arguments: str, driver: dict[str, str]) -> tuple[int, dict[str, Any]]:
    done = run("fit", "--json", *arguments, driver=driver)
    assert done.returncode in (0, 1, 3), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_preallocation_shrinks_to_what_is_needed(standin: StandIn, stage: Stage, tmp_path: Path) -> None:
    """A TensorFlow that holds 22,885 MiB and used 181 needs 1,205 MiB, and gets the line of code for it."""
    require_host_pid_namespace()
    socket = tmp_path / "agent.sock"
    with serving(*QUICK, f"--agent.socket={socket}", driver=standin.env()) as exporter:
        wait_until(socket.exists, "the socket")
        program = stage.start(("connect", str(socket)))
        standin.device(0).set_processes([(program.pid, 22_885 * MIB)])
        standin.device(0).busy(program.pid, sm=0.2)
        device = {"ordinal": 0, "in_use": 100 * MIB, "in_use_peak": 181 * MIB}
        framework = {"framework": "tensorflow", "policy": "preallocate", "devices": [device]}
        program.order("say", report(frameworks=[framework]))
        exporter.until(lambda page: page.values("framework_in_use_peak_bytes"), "the report")
        asking = {**standin.env(), **exporter.found}
        status, said = fit(str(program.pid), "--for=300ms", driver=asking)
        text = run("fit", str(program.pid), "--for=100ms", driver=asking).stdout

    (need,) = said["needs"]
    assert status == 0
    assert need["needed"] == 1205 * MIB
    assert need["held"] == 22_885 * MIB
    (limit, growth) = need["devices"][0]["limits"]
    assert f"memory_limit={181 + 64})" in limit["text"]
    assert growth["text"] == "TF_FORCE_GPU_ALLOW_GROWTH=true"
    assert need["time_busy"]["samples"] >= 1
    assert [each["verdict"] for each in need["devices"]] == ["yes"] * len(need["devices"])
    assert need["devices"][0]["runs_here"]
    assert "exporter of this host" in said["origin"]
    for fact in ("1.18 GiB at its peak (inferred)", "memory_limit=245", "FITS", "runs here now"):
        assert fact in text


def test_without_agent_and_exporter_the_need_is_not_known(standin: StandIn, stage: Stage) -> None:
    """A short look at a program that may still load its data says what it holds, and not that it fits."""
    require_host_pid_namespace()
    program = stage.start()
    standin.device(0).set_processes([(program.pid, 3 * GIB)])
    status, said = fit(str(program.pid), "--for=100ms", *QUICK, driver=standin.env())
    (need,) = said["needs"]
    assert (status, said["fits"], need["needed"], need["held_peak"]) == (3, None, None, 3 * GIB)
    assert {each["verdict"] for each in need["devices"]} == {"perhaps"}
    assert "this command alone" in said["origin"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [(str(os.getpid()), f"pid {os.getpid()} holds no GPU memory"), ("/nowhere.json", "nowhere")],
    ids=["a process", "a file"],
)
def test_what_holds_nothing_is_an_error(standin: StandIn, asked: str, said: str) -> None:
    """A pid without GPU memory, and a file that is not there, are one line and 1, and no program's need."""
    done = run("fit", "--json", asked, "--for=100ms", *QUICK, driver=standin.env())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert said in done.stderr


def test_a_recording_of_a_real_gpu(tmp_path: Path) -> None:
    """A JAX that held 28 GiB needed 0.72; where no GPU is, the command cannot tell where it fits."""
    recording = str(RECORDINGS / "agents.jsonl.gz")
    status, said = fit(recording, "--pid=416", driver=no_driver(tmp_path))
    (need,) = said["needs"]
    assert (status, said["fits"]) == (3, None)
    assert 0.7 * GIB < need["needed"] < 0.75 * GIB < 28 * GIB < need["held"]
    assert need["grade"] == "proven"
    assert "no GPU to look at here" in said["devices_origin"]
    assert need["devices"][0]["limits"][0]["text"].startswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.0")


def test_a_saved_ledger_is_read_in_each_form(standin: StandIn, stage: Stage, tmp_path: Path) -> None:
    """What 'show --json' printed gives the same need in one line, in several, indented and compressed."""
    require_host_pid_namespace()
    program = stage.start()
    standin.device(0).set_processes([(program.pid, 3 * GIB)])
    shown = run("show", "--json", *QUICK, driver=standin.env()).stdout
    forms = {"line": shown, "lines": shown * 3, "indented": json.dumps(json.loads(shown), indent=1)}
    files = {name: content.encode() for name, content in forms.items()}
    files["compressed"] = gzip.compress(shown.encode())
    needs = []
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        _, said = fit(str(tmp_path / name), driver=no_driver(tmp_path))
        needs.append((said["pid"], said["needs"][0]["held_peak"], said["needs"][0]["grade"]))

    assert set(needs) == {(program.pid, 3 * GIB, "inferred")}
