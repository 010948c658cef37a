"""Holders that end during a sample, are hidden, or are not readable: none is called dead that is not."""

import json
import os
import signal
import subprocess

import pytest

from tests.support.exporter import QUICK, command, environment, run, serving
from tests.support.players.stage import Stage
from tests.support.requirements import (
    do_without,
    require_host_pid_namespace,
    require_namespaces,
    require_root,
    require_tool,
)
from tests.support.standin.library import GIB, StandIn

NOBODY = 65534
NO_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--")
"""Makes root an ordinary user who still owns root's files: the interpreter may be where only root looks."""

_MOUNT = 'mount -t proc -o hidepid=2,gid=54321 proc /proc && exec "$@"'
HIDEPID = ("unshare", "--mount", "sh", "-c", _MOUNT, "sh")


def require_hidepid() -> None:
    """Continue only where we may mount a proc that hides other users' processes."""
    require_root()
    require_tool("setpriv")
    if subprocess.run([*HIDEPID, "true"], check=False, capture_output=True).returncode != 0:
        do_without("this machine does not let us mount a proc file system")


def ended(stage: Stage) -> int:
    """Return the pid of a process that has ended and was reaped."""
    player = stage.start()
    player.end()
    return player.pid


@pytest.mark.parametrize("listed", [False, True])
def test_a_holder_that_ends_while_we_look(standin: StandIn, stage: Stage, *, listed: bool) -> None:
    """A process that ends between NVML's answer and ours is dead only if NVML still lists it."""
    require_host_pid_namespace()
    holder = stage.start()
    standin.device(0).set_processes([(holder.pid, GIB)])
    standin.hang("nvmlDeviceGetMemoryInfo_v2", 1)  # delays the sample between the two
    words, environ = command("show", "--json", "--sample.timeout=30s"), environment(standin.env())
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE) as show:
        standin.wait_for_call("nvmlDeviceGetMPSComputeRunningProcesses_v3")
        holder.end()
        if not listed:
            standin.device(0).set_processes()
        standin.release()
        document = json.loads(show.communicate(timeout=30)[0])

    holdings = [(each["pid"], each["state"]) for each in document["devices"][0]["holdings"]]
    memory = document["devices"][0]["memory"]
    assert holdings == ([(holder.pid, "dead")] if listed else [])
    assert memory["used"] == memory["states"]["dead"] == (GIB if listed else 0)


def test_a_pid_without_a_process_is_dead_until_it_is_let_go(standin: StandIn, stage: Stage) -> None:
    """Bytes that the driver keeps for an ended process are dead; a live process beside it is not."""
    require_host_pid_namespace()
    first, second = stage.start(), stage.start()
    standin.device(0).set_processes([(first.pid, 3 * GIB), (second.pid, GIB)])
    with serving(*QUICK, driver=standin.env()) as exporter:
        page = exporter.until(lambda page: page.up, "the data")
        assert page.state(first.pid) == page.state(second.pid) == "active"
        first.signal(signal.SIGKILL)
        exporter.until(lambda page: page.state(first.pid) == "zombie", "the unreaped holder to be a zombie")
        first.end()
        page = exporter.until(lambda page: page.state(first.pid) == "dead", "the leak to be seen")
        assert (page.ledger(0)["dead"], page.ledger(0)["active"]) == (3 * GIB, GIB)
        assert page.value("device_holders", gpu=0, state="dead") == 1
        assert page.value("process_start_time_seconds", pid=first.pid) is not None, (
            "who it was is still known"
        )
        assert page.labels("process_info", "pid") == {str(first.pid), str(second.pid)}, "a join loses no dead"
        assert page.value("collector_success", collector="process") == 1, "that it is gone is a result"

        standin.device(0).set_processes([(second.pid, GIB)])
        page = exporter.until(lambda page: page.state(first.pid) is None, "the driver to have let go")
        assert "dead" not in page.ledger(0)


def test_an_ordinary_user_sees_the_states_of_others(standin: StandIn, stage: Stage) -> None:
    """Without privileges there are fewer facts about other users' processes, but their states are right."""
    require_root()
    require_tool("setpriv")
    others, stopped = stage.start(user=NOBODY), stage.start(user=NOBODY)
    stopped.stop()
    standin.device(0).set_processes([(others.pid, GIB), (stopped.pid, 2 * GIB)])
    with serving(*QUICK, driver=standin.env(), wrapper=NO_CAPABILITIES) as exporter:
        page = exporter.until(lambda page: page.state(stopped.pid) == "stopped", "the state that lasts")
        assert page.state(others.pid) == "active"
        assert page.labels("process_info", "command") == {"player.py"}
        assert page.labels("process_info", "user") == {"nobody"}

    found = run("doctor", driver=standin.env(), wrapper=NO_CAPABILITIES)
    assert found.returncode == 1
    assert "LACK  privileges: without CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE" in found.stdout
    assert "LACK  holders: 2 holder(s) whose environ" in found.stdout
    assert found.stdout.count("remedy: ") >= found.stdout.count("LACK  ") > 1


def test_behind_hidepid_others_are_unknown(standin: StandIn, stage: Stage) -> None:
    """A hidden process is unknown, a process that does not exist is dead, and the ledger balances."""
    require_hidepid()
    require_host_pid_namespace()
    hidden, gone, ours = stage.start(user=NOBODY), ended(stage), stage.start(wrapper=NO_CAPABILITIES)
    standin.device(0).set_processes([(hidden.pid, GIB), (gone, 2 * GIB), (ours.pid, 3 * GIB)])
    wrapper = (*HIDEPID, *NO_CAPABILITIES)
    with serving(*QUICK, driver=standin.env(), wrapper=wrapper) as exporter:
        page = exporter.until(lambda page: page.state(gone) == "dead", "the state that lasts")
        assert (page.state(hidden.pid), page.state(ours.pid)) == ("unknown", "active")
        ledger = page.ledger(0)
        assert [ledger[state] for state in ("unknown", "dead", "active")] == [GIB, 2 * GIB, 3 * GIB]
        assert page.value("collector_success", collector="process") == 0

    found = run("doctor", driver=standin.env(), wrapper=wrapper)
    assert found.returncode == 1
    assert "LACK  /proc: mounted with hidepid" in found.stdout
    assert "LACK  holders: 1 process(es) that NVML lists and /proc hides" in found.stdout


def test_outside_the_hosts_pid_namespace_nobody_is_dead(standin: StandIn, stage: Stage) -> None:
    """In its own PID namespace the exporter reports that, and calls every holder unknown and none dead."""
    require_namespaces()
    here, gone = stage.start().pid, ended(stage)
    standin.device(0).set_processes([(here, GIB), (gone, 2 * GIB)])
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    wrapper = ["unshare", *user, "--pid", "--fork", "--mount-proc"]
    with serving(*QUICK, driver=standin.env(), wrapper=wrapper, forks=True) as exporter:
        page = exporter.until(lambda page: page.up, "the data")
        assert page.value("host_pid_namespace") == 0
        assert (page.state(here), page.state(gone)) == ("unknown", "unknown")
        assert page.ledger(0)["unknown"] == 3 * GIB
        assert exporter.stop().code == 0, "pid 1 of a container ends on SIGTERM too"

    found = run("doctor", driver=standin.env(), wrapper=wrapper)
    assert found.returncode == 1
    assert "LACK  PID namespace" in found.stdout
    assert "hostPID: true" in found.stdout
    shown = run("show", driver=standin.env(), wrapper=wrapper)
    assert shown.returncode == 0
    assert shown.stdout.startswith("Not in the host's PID namespace")
