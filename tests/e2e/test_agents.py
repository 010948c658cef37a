"""Agents in real processes with the real exporter: the page that Prometheus gets."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_client import report, torch
from tests.support.exporter import QUICK, entries, no_driver, run, serving
from tests.support.players.stage import Player, Stage
from tests.support.requirements import require_namespaces
from tests.support.standin.library import GIB, StandIn
from tests.support.waiting import wait_until


@pytest.fixture
def path(directory: Path) -> Path:
    """Return where the exporter of a test listens."""
    return directory / "agent.sock"


@pytest.fixture
def agent(path: Path, stage: Stage) -> Callable[..., Player]:
    """Return a function that starts an agent, with the settings of :meth:`Stage.start`."""

    def start(**settings: Any) -> Player:  # noqa: ANN401 as there
        wait_until(path.exists, "the socket")
        return stage.start(("connect", str(path)), **settings)

    return start


def flags(path: Path) -> tuple[str, ...]:
    """Return the flags of an exporter that samples fast and listens at the path."""
    return (*QUICK, f"--agent.socket={path}")


def test_a_report_becomes_series(standin: StandIn, path: Path, agent: Callable[..., Player]) -> None:
    """An agent's figures are on the page with NVML's bytes of its process and device, and end with it."""
    with serving(*flags(path), driver=standin.env()) as exporter:
        program = agent()
        standin.device(1).set_processes([(program.pid, 2 * GIB)])
        program.order(
            "say",
            report(
                visible={"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": None},
                frameworks=[torch(0, GIB, allocated_peak=GIB // 2, ooms=2, categories={"gradients": 5})],
                errors={"jax": 0},
                last_oom={"time": 1e9, "framework": "torch", "requested": 7, "verdict": "leaking"},
                collector={"enabled": True, "collections": 4},
            ),
        )
        page = exporter.until(
            lambda page: page.value("torch_reserved_bytes", pid=program.pid) == GIB, "the report"
        )
        on = {"pid": program.pid, "uuid": standin.device(1).uuid, "gpu": 1}
        assert page.value("torch_allocated_bytes", **on) == GIB // 2
        assert page.value("framework_overhead_bytes", **on) == GIB
        assert page.value("process_needed_peak_bytes", **on) == GIB + GIB // 2
        assert page.value("torch_ooms_total", **on) == 2
        assert page.value("torch_category_bytes", category="gradients", **on) == 5
        assert page.value("agent_up", pid=program.pid, reason="") == 1
        assert page.value("agent_unmapped_devices", pid=program.pid) == 0
        assert page.value("python_collections_total", pid=program.pid) == 4
        assert page.value("framework_last_oom_timestamp_seconds", verdict="leaking") == 1e9
        assert page.value("agent_socket_up") == page.value("agent_connections") == 1
        program.order("say", report(2, frameworks=[torch()], errors={"torch": 1}))
        page = exporter.until(lambda page: page.value("agent_up", reason="degraded") == 0, "the failure")
        assert page.value("agent_errors_total", provider="torch") == 1
        policy = page.values("framework_policy_info", pid=program.pid, source="agent")
        assert [dict(key)["policy"] for key in policy] == ["caching"]

        program.end()
        page = exporter.until(lambda page: not page.values("agent_up"), "the end of the report")
        assert [name for name, _ in page.samples if name.startswith("vramledger_torch")] == []
        # The connection ends at once, and NVML goes on listing it: the next sample says that it has ended.
        exporter.until(lambda page: page.state(program.pid) in ("zombie", "dead", "unknown"), "its end")


def test_commands_learn_from_the_exporter(standin: StandIn, path: Path, agent: Callable[..., Player]) -> None:
    """``show`` and ``doctor``, which run their own samplers, get the agents' figures from the exporter."""
    with serving(*flags(path), driver=standin.env()) as exporter:
        program = agent()
        standin.device(0).set_processes([(program.pid, 2 * GIB)])
        visible = {"CUDA_VISIBLE_DEVICES": None}  # with this interval it is not silent while commands run
        program.order("say", report(frameworks=[torch(reserved=GIB)], visible=visible, interval=60.0))
        exporter.until(lambda page: page.values("agent_up"), "the report")
        at = f"--agent.socket={path}"
        why = run("show", "--why", str(program.pid), at, driver=standin.env()).stdout
        assert "torch        reserved 1.00 GiB, allocated 0.50 GiB" in why
        assert "agent          up" in why
        shown = json.loads(run("show", "--json", at, driver=standin.env()).stdout)
        (holding,) = shown["devices"][0]["holdings"]
        assert holding["agent"]["frameworks"][0]["reserved"] == GIB
        assert holding["policy_source"] == "agent"
        assert "1 agent(s)" in run("doctor", at, driver=standin.env()).stdout
    assert "ok    agents" not in run("doctor", at, driver=standin.env()).stdout
    assert "none is known" in run("show", "--why", str(program.pid), at, driver=standin.env()).stdout


def test_an_agent_in_another_pid_namespace(
    standin: StandIn, path: Path, agent: Callable[..., Player]
) -> None:
    """A container's agent has the host's pid, and its device numbers mean the container's devices."""
    require_namespaces()
    with serving(*flags(path), driver=standin.env()) as exporter:
        program = agent(wrapper=("unshare", "--pid", "--fork", "--kill-child"))
        assert "1" in re.findall(r"NSpid:.*\t(\d+)", Path(f"/proc/{program.pid}/status").read_text("ascii"))
        program.order("say", report(frameworks=[torch(0, GIB)], visible={"CUDA_VISIBLE_DEVICES": None}))
        standin.device(1).set_processes([(program.pid, 2 * GIB)])
        page = exporter.until(lambda page: page.values("torch_reserved_bytes"), "the report")
        assert page.value("torch_reserved_bytes", pid=program.pid, gpu=1) == GIB


def test_without_a_place_for_the_socket_everything_else_goes_on(standin: StandIn, tmp_path: Path) -> None:
    """If the agents' socket cannot be made, only the agents are missing, and one log line says so."""
    taken = tmp_path / "file"
    taken.write_text("keep me")
    for path in (tmp_path / "no" / "such" / "agent.sock", taken, tmp_path / ("x" * 200)):
        with serving(*QUICK, f"--agent.socket={path}", driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.up, "the data")
            assert page.value("agent_socket_up") == 0
        lines = [each for each in entries(exporter.ended.log) if each["msg"] == "No agents"]
        assert len(lines) == 1
        assert str(path) in lines[0]["err"]
    assert taken.read_text() == "keep me"


def test_without_a_driver_the_socket_is_still_told(
    tmp_path: Path, path: Path, agent: Callable[..., Player]
) -> None:
    """Before the driver is loaded agents can connect, and only the socket's state is told; off, neither."""
    with serving(*flags(path), "--no-collector.agent", driver=no_driver(tmp_path / "none")) as exporter:
        assert [name for name, _ in exporter.scrape().samples if "agent" in name] == []
        assert not path.exists()
    with serving(*flags(path), driver=no_driver(tmp_path / "none")) as exporter:
        agent().order("say", report(frameworks=[torch()]))
        page = exporter.until(lambda page: page.value("agent_connections") == 1, "the agent")
        assert page.value("agent_socket_up") == 1
        assert page.values("agent_up") == {}
