"""``show``, ``check`` and ``end`` ask the running exporter: one question has one answer everywhere."""

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.exporter import QUICK, Exporter, command, environment, run, sampling, serving
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace
from tests.support.standin.library import GIB, StandIn
from tests.support.waiting import wait_until

NOT_ASKED = "by this command alone: what was before is not known."


class Crowd(NamedTuple):
    """An exporter that has watched holders of every kind, the state of each pid, and how to ask it."""

    exporter: Exporter
    states: dict[int, str]
    asking: dict[str, str]


@pytest.fixture(scope="module")
def crowd(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    """Run an exporter for the tests that end nobody, and for the last one, which ends the orphans."""
    require_host_pid_namespace()
    place = tmp_path_factory.mktemp("crowd")
    with StandIn(place, standin_library, devices=2) as standin, Stage() as stage:
        quiet, stopped = stage.start(), stage.start()
        launcher = stage.start(session=False)
        rank = {"OMPI_COMM_WORLD_RANK": "0"}
        orphans = [launcher.start(env=rank, tie="socket") for _ in range(5)]
        everyone = [quiet, stopped, *orphans]
        standin.device(0).set_processes([(each.pid, GIB) for each in everyone])
        with serving(*QUICK, "--idle-after=3s", driver=standin.env()) as exporter:
            exporter.until(lambda page: len(page.values("process_memory_bytes")) == 7, "the holders")
            launcher.end()
            stopped.stop()
            states = {quiet.pid: "idle", stopped.pid: "stopped"}
            states |= {each.pid: "orphaned" for each in orphans}
            exporter.until(lambda page: all(page.state(pid) == states[pid] for pid in states), "the states")
            yield Crowd(exporter, states, {**standin.env(), **exporter.found})


def by_pid(ledger: dict[str, Any]) -> dict[int, dict[str, object]]:
    """Return what a ledger says of each holding, without what the moment of the sample decides."""
    moving = {"why", "sm_utilization", "last_active", "quiet_since", "growth", "since"}
    return {
        each["pid"]: {name: value for name, value in each.items() if name not in moving}
        for device in ledger["devices"]
        for each in device["holdings"]
    }


def test_one_question_has_one_answer(crowd: Crowd) -> None:
    """Page, Prometheus, ``show``, ``show --why``, ``check`` and ``end`` name the same states and owners."""
    exporter, states, asking = crowd

    def agreed() -> tuple[dict[str, Any], dict[str, Any]] | None:
        page = json.loads(exporter.get("/api/v1/ledger")[1])
        shown = json.loads(run("show", "--json", driver=asking).stdout)
        return (page, shown) if by_pid(page) == by_pid(shown) else None

    # Again if need be: a new sample may come between the two.
    page, shown = wait_until(agreed, "the page and 'show' to say the same") or ({}, {})
    table = run("show", driver=asking).stdout
    of_each_state = {state: pid for pid, state in states.items()}
    evidence = {
        state: run("show", f"--why={pid}", driver=asking).stdout for state, pid in of_each_state.items()
    }
    check = run("check", "--wait=100ms", "--json", driver=asking)
    ends = {state: run("end", f"--state={state}", driver=asking) for state in ("idle", "orphaned")}

    assert shown["watched_since"] == page["watched_since"]
    assert {pid: holding["state"] for pid, holding in by_pid(page).items()} == states
    rows = re.findall(r"^ +(\d+) .* (active|idle|stopped|orphaned) ", table, re.MULTILINE)
    assert {int(pid): state for pid, state in rows} == states
    assert "by the exporter." in table
    for state, text in evidence.items():
        assert re.search(rf"^    state +{state}\b", text, re.MULTILINE)
    reasons = json.loads(check.stdout)["devices"][0]["reasons"]
    assert {each["pid"]: each["kind"] for each in reasons if each["pid"]} == states
    assert check.returncode == 1
    for state, done in ends.items():
        named = {int(pid) for pid in re.findall(r"would (?:not )?end pid (\d+)", done.stdout)}
        assert named == {pid for pid, its in states.items() if its == state}


def test_end_knows_for_how_long_somebody_is_idle(crowd: Crowd) -> None:
    """``end --state idle`` needs no wait beside an exporter; ``--idle-after`` selects by the time."""
    (idle,) = (pid for pid, state in crowd.states.items() if state == "idle")
    longer = run("end", "--state=idle", "--idle-after=1h", driver=crowd.asking)
    orphaned = run("end", "--state=orphaned", "--idle-after=1h", driver=crowd.asking)
    shorter = run("end", "--state=idle", "--idle-after=100ms", "--sample.interval=50ms", driver=crowd.asking)
    assert longer.stdout == "no holder is selected, there is nothing to end\n"
    assert orphaned.stdout.count("whether it works on the GPU is not known") == len(
        orphaned.stdout.splitlines()
    )
    assert "without an exporter" not in longer.stderr
    assert f"end pid {idle} player.py of user root: idle" in shorter.stdout
    assert "--idle-after is shorter than the exporter's 3 s" in shorter.stderr


def test_two_commands_at_once(crowd: Crowd) -> None:
    """Two ``end --yes`` end all five orphans, as the exporter saw their parent end, and nobody else."""
    words = ["end", "--state=orphaned", "--yes", "--grace=5s"]
    with ThreadPoolExecutor() as both:
        texts = [each.stdout for each in both.map(lambda _: run(*words, driver=crowd.asking), range(2))]
    for pid, state in crowd.states.items():
        if state == "orphaned":
            assert any(re.search(rf"^pid {pid} .*: ended by SIGTERM", each, re.MULTILINE) for each in texts)
        else:
            assert Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("beside", [True, False])
def test_end_says_what_it_waits_for(standin: StandIn, stage: Stage, *, beside: bool) -> None:
    """Where nobody can know yet who is idle, the command says so, and how long it waits."""
    require_host_pid_namespace()
    standin.device(0).set_processes([(stage.start().pid, GIB)])
    with sampling("--idle-after=1h", driver=standin.env()) as exporter:
        found = exporter.found if beside else {}
        arguments = ("end", "--state=idle", *([] if beside else ["--idle-after=1h"]))
        environ = environment({**standin.env(), **found})
        with subprocess.Popen(command(*arguments), env=environ, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            said = next(line for line in waiting.stderr if "Waiting until the holders were watched" in line)
            waiting.terminate()
    (seconds,) = re.findall(r"seconds=(\d+)", said)
    assert 3500 < int(seconds) <= 3600
    assert ("the exporter has just started" in said) is beside


def test_two_releases_at_once(standin: StandIn) -> None:
    """Of a release and a resume at the same time both are answered, and the exporter goes on."""
    with sampling(driver=standin.env()) as exporter:
        asking = {**standin.env(), **exporter.found}
        with ThreadPoolExecutor(4) as several:
            flags = ("--for=1h", "--resume", "--for=2h", "--for=1ms") * 2
            for done in several.map(lambda flag: run("release", flag, driver=asking), flags):
                assert done.returncode in (0, 1)
        assert run("release", "--resume", driver=asking).returncode == 0
        exporter.until(lambda page: page.up, "data")
        assert "level=error" not in exporter.log


def test_without_an_exporter_they_look_and_say_so(standin: StandIn, stage: Stage) -> None:
    """Where none answers, each command looks for itself, with two samples, and says what it cannot know."""
    require_host_pid_namespace()
    standin.device(0).set_processes([(stage.start().pid, GIB)])
    done = run("show", driver=standin.env())
    assert NOT_ASKED in done.stdout.splitlines()[-1]
    assert "no exporter answers at /nowhere" in done.stdout.splitlines()[-1]
    assert "watched for 0 s" not in done.stdout
    for arguments in (["check", "--wait=100ms"], ["end", "--state=zombie"]):
        done = run(*arguments, driver=standin.env())
        assert "Sampling without an exporter: what was before is not known" in done.stderr


def test_an_exporter_that_hangs_is_not_waited_for(standin: StandIn) -> None:
    """Beside an exporter that is stopped (SIGSTOP) a command looks for itself after a few seconds."""
    with sampling(driver=standin.env()) as exporter:
        exporter.process.send_signal(signal.SIGSTOP)
        try:
            done = run("show", driver={**standin.env(), **exporter.found})
        finally:
            exporter.process.send_signal(signal.SIGCONT)
        assert done.returncode == 0
        assert NOT_ASKED in done.stdout
        assert "does not answer" in done.stdout


def test_a_restart_in_the_middle_is_followed(standin: StandIn, tmp_path: Path) -> None:
    """``show --watch`` goes on with the exporter that replaces the one that was killed."""
    flag = f"--control.socket={tmp_path / 'control'}"
    with sampling(flag, driver=standin.env()) as first:
        words, pipe = command("show", "--watch", "--json", flag), subprocess.PIPE
        watching = subprocess.Popen(words, env=environment(standin.env()), stdout=pipe, stderr=pipe)
        assert watching.stdout is not None
        before = json.loads(watching.stdout.readline())
        first.kill()
    with serving(*QUICK, flag, driver=standin.env()) as second, watching:
        second.until(lambda page: page.up, "data")
        since = {before["watched_since"]}

        def followed() -> bool:
            since.add(json.loads(watching.stdout.readline())["watched_since"])  # type: ignore[union-attr]
            return len(since) > 1

        wait_until(followed, "a sample of the second exporter")
        ledger = json.loads(second.get("/api/v1/ledger")[1])
        assert ledger["watched_since"] == max(since)
        watching.kill()


@contextmanager
def answers(path: Path, kind: socket.SocketKind, answer: bytes) -> Iterator[None]:
    """Answer one request on a socket as another program would."""
    with socket.socket(socket.AF_UNIX, kind) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            with suppress(OSError), listening.accept()[0] as connection:  # closed before anybody connected
                connection.recv(4096)
                connection.send(answer)

        threading.Thread(target=serve, daemon=True).start()  # nobody connects to another kind of socket
        yield


def ok(body: bytes, length: int | None = None) -> bytes:
    """Return an answer, which is cut short where its length is more."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (length or len(body), body)


def head(**changes: object) -> bytes:
    """Return what precedes a snapshot of an exporter of another version."""
    usual = {"program": "0.0.1", "token": "a", "wait": 1.0, "idle_after": 600.0}
    return json.dumps({**usual, **changes}).encode()


@pytest.mark.repeats(kept=3)
@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        (socket.SOCK_SEQPACKET, b"", "is of another version"),
        (socket.SOCK_STREAM, ok(head() + b"\n{}"), "the exporter is vramledger 0.0.1"),
        (socket.SOCK_STREAM, ok(head(wait=-1)), "is of another version"),
        (socket.SOCK_STREAM, ok(b"\xff"), "is of another version"),
        (socket.SOCK_STREAM, ok(head(token="x" * 65)), "is of another version"),
        (socket.SOCK_STREAM, ok(head(), 10**12), "gave no answer"),
        (socket.SOCK_STREAM, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "is of another version"),
        (socket.SOCK_STREAM, b'{"version": 1, "ok": true}', "gave no answer"),
        (socket.SOCK_STREAM, b"", "gave no answer"),
    ],
)
def test_an_exporter_of_another_version(
    standin: StandIn, tmp_path: Path, kind: socket.SocketKind, answer: bytes, said: str
) -> None:
    """Beside an exporter of another version a command looks for itself, and says why."""
    path = tmp_path / "control"
    with answers(path, kind, answer):
        done = run("show", f"--control.socket={path}", driver=standin.env())
    assert (done.returncode, done.stderr) == (0, "")
    assert NOT_ASKED in done.stdout
    assert said in done.stdout.splitlines()[-1]


def test_a_lying_exporter_ends_nobody(
    standin: StandIn, stage: Stage, standin_library: Path, tmp_path: Path
) -> None:
    """A program that the driver does not list is not ended, although the exporter says that it holds."""
    require_host_pid_namespace()
    bystander = stage.start()
    standin.device(0).set_processes([(bystander.pid, GIB)])
    with serving(*QUICK, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.state(bystander.pid), "the holder")
        lying = {**standin.env(), **exporter.found}
        (tmp_path / "other").mkdir()
        with StandIn(tmp_path / "other", standin_library, devices=2) as honest:
            done = run("end", f"--pid={bystander.pid}", "--yes", driver={**lying, **honest.env()})
        assert bystander.running
    assert "the driver does not list it any more, and it has no GPU open" in done.stdout
    assert done.returncode == 1
