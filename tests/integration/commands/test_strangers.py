"""What commands print and keep of what others have written."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.exporter import environment, no_driver, run
from tests.support.requirements import require_root
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.model.reading import DeviceReading, Reading, encode
from vramledger.sampling.replay import encode_header
from vramledger_agent.commands.attach import await_answer, write_files
from vramledger_agent.printable import Control, printable, write_plain
from vramledger_agent.transport import receive

HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b31m\r\u202e\u2028done"
NAMED = "--x\x1b[2J\x9b31m\nvramledger: all is well"
CLEAR = "\x1b[H\x1b[2J"
SNAPSHOT = pickle.dumps({"segments": [], "device_traces": [], "allocator_settings": {}})


def controls(text: str) -> list[str]:
    """Return what of a text is neither printable nor a line feed."""
    return [char for char in text if not char.isprintable() and char != "\n"]


@settings(max_examples=examples(300))
@given(st.text() | st.lists(st.sampled_from([CLEAR, "\x1b[31m", "\x1b[3", "1m", "a\n", "\x07"])).map("".join))
def test_no_text_controls_a_terminal(text: str) -> None:
    """Only what is printable, line feeds and our own sequences reach the terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out := StringIO())
        write_plain(text)
        patch.setattr("sys.stdout", coloured := StringIO())
        write_plain(Control(CLEAR), text, Control("\x1b[31m"))
    assert controls(out.getvalue()) == []
    assert coloured.getvalue() == f"{CLEAR}{out.getvalue()}\x1b[31m"
    assert len(out.getvalue()) == len(text)
    assert "\n".join(map(printable, out.getvalue().split("\n"))) == out.getvalue()


@pytest.mark.parametrize("char", "\u3164\u115f\uffa0\u2800\u034f\ufe0f\u180b\U000e0101\u202e\u200b\u2028\xad")
def test_what_cannot_be_seen_is_replaced(char: str) -> None:
    """A name has as many signs as it shows; a blank and what joins or hides others are none."""
    assert printable(f"a{char}b") == "a?b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((word, word) for word in ("Zo\u00eb", "\u6a21\u578b", "\ud559\uc2b5", "e\u0302\u0301")),
        ("x" + "\u0311" * 63, "x\u0311\u0311" + "?" * 61),
        ("x" + "\u0311\u0302\u20dd" * 2 + "y\u0311", "x\u0311\u0302????y\u0311"),
    ],
)
def test_accents_cover_no_other_line(text: str, shown: str) -> None:
    """Letters of every script stay; what is more than two accents on one does not."""
    assert printable(text) == shown


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen where a command of our own user takes an exporter to be; its agent is a stranger's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "agent.sock"))
        listening.listen()
        listening.settimeout(20)
        yield listening


@pytest.mark.parametrize("refused", ["", "still writes the snapshot", "with holes"])
def test_a_snapshot_is_nobodys_to_change(tmp_path: Path, stranger: socket.socket, refused: str) -> None:
    """An agent that keeps the descriptor changes no file; one that could, or has holes, leaves none."""
    path = tmp_path / "kept.pickle"

    def answer(stack: ExitStack) -> int:
        with stranger.accept()[0] as client:
            client.settimeout(20)
            receive(client)
            _, (file,) = receive(client)
            os.write(file, SNAPSHOT)
            if refused == "with holes":
                os.ftruncate(file, 2**31)
            elif refused:
                stack.enter_context(mmap.mmap(file, len(SNAPSHOT)))
            said = {"version": 1, "ok": True, "events": [HOSTILE] * 9, "history": HOSTILE}
            client.send(json.dumps(said).encode())
            return file

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        answered = pool.submit(answer, stack)
        done = run("snapshot", "7", f"--agent.socket={tmp_path}/agent.sock", f"--output={path}", driver={})
        file = answered.result(20)
        try:
            if refused:
                assert (done.returncode, path.exists()) == (1, False)
                assert refused in done.stderr
                return
            assert done.returncode == 0, done.stderr
            with pytest.raises(PermissionError):
                os.pwrite(file, b"changed", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(file, 2**30)
            assert path.read_bytes() == SNAPSHOT
            assert path.stat().st_ino != os.fstat(file).st_ino
            assert controls(done.stdout + done.stderr) == []
        finally:
            os.close(file)


REFUSAL = json.dumps({"version": 1, "ok": False, "error": HOSTILE * 3}).encode()


@pytest.mark.parametrize(("answered", "said"), [(REFUSAL, "done"), (b"[" * 60000, "an invalid answer")])
def test_an_answer_controls_no_terminal(
    tmp_path: Path, stranger: socket.socket, answered: bytes, said: str
) -> None:
    """An agent's words are shown in one line, without what would control the terminal."""

    def answer() -> None:
        with stranger.accept()[0] as client, suppress(ConnectionError):
            receive(client)
            client.send(answered)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer)
        done = run("reclaim", "7", f"--agent.socket={tmp_path / 'agent.sock'}", driver={})
    assert (done.returncode, controls(done.stderr), done.stderr.count("\n")) == (1, [], 1)
    assert said in done.stderr


def test_the_script_of_attach_stays_roots() -> None:
    """The process' user may write the answer alone: the pid may by then be a program of root's."""
    require_root()
    arguments = Namespace(socket=None, allow_reclaim=False, allow_snapshot=False)
    code = """if True:
        import os, sys
        print(open("start.py").read().startswith("def begin"))
        for change in (lambda: open("start.py", "a"), lambda: os.unlink("start.py"), lambda: open("new", "w"),
                       lambda: os.rename("answer", "start.py"), lambda: os.chmod("start.py", 0o666)):
            try:
                change()
            except PermissionError:
                continue
            print("changed")
        open("answer", "w").write("ok\\n")
    """
    with (
        TemporaryDirectory(prefix="vl-") as name,
        write_files(Path(name), arguments, 12345, float("inf")) as answer,
    ):
        done = subprocess.run(
            ["/usr/bin/python3", "-c", code],
            user=12345, group=12345, extra_groups=[], cwd=name, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == "True\n"
        assert await_answer(answer, float("inf")) == "ok"


@pytest.mark.parametrize(
    "line", [{"version": 1, HOSTILE: HOSTILE}, {"version": HOSTILE, "kind": HOSTILE}, None],
    ids=["key", "value", "line"],
)  # fmt: skip
def test_a_recordings_texts_control_no_terminal(tmp_path: Path, line: dict[str, object] | None) -> None:
    """Keys and values of a recording, and what is none, are shown without control characters."""
    path = tmp_path / "recording.jsonl"
    path.write_text(f"{json.dumps(line) if line else HOSTILE}\n", encoding="utf-8")
    done = run("show", f"--source=replay:{path}", driver={})
    assert (done.returncode, controls(done.stdout + done.stderr)) == (1, [])


def test_a_recording_stays_marked_as_one(tmp_path: Path) -> None:
    """On a terminal, no name in a stranger's recording erases the line that says what is shown."""
    device = DeviceReading(0, f"GPU\x1b[31m\n{CLEAR}GPU 1", name=f"{CLEAR}\x1b[0mH200")
    path = tmp_path / "film.jsonl"
    path.write_bytes(encode_header() + encode(Reading(1.0, 2.0, devices=(device,))))
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "wb"):
        words = [sys.executable, "-m", "vramledger", "show", f"--source=replay:{path}"]
        subprocess.run(words, stdout=theirs, env=environment({}), timeout=60, check=True)
        shown = terminal.read(4096).decode()

    said = r"RECORDING \S+: this is not the data of this host\.\r\nGPU 0  .*H200  .*GPU 1\r\n"
    assert re.match(said, shown)
    assert "\x1b" not in shown


ENDLESS = b"\x80\x04})" + b"2\x86" * 60 + b"Ns."
"""A dictionary whose key is a pair of pairs of pairs: its hash has 2^60 parts."""


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_snapshot_that_takes_for_ever_is_given_up(tmp_path: Path, interrupted: bool) -> None:
    """A small file costs a limited time, and after ^C nothing reads on."""
    (tmp_path / "a.pickle").write_bytes(ENDLESS)
    code = f"""if True:
        from vramledger_agent.__main__ import main
        from vramledger_agent.torch_snapshots import safe_pickle
        safe_pickle._SECONDS = {60 if interrupted else 1}
        raise SystemExit(main())"""
    words = [sys.executable, "-c", code, "snapshot", "show", "a.pickle"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment({}), stderr=subprocess.PIPE, text=True
    ) as shown:
        process = psutil.Process(shown.pid)
        child = sure(wait_until(process.children, "the child"))[0]
        if interrupted:
            wait_until(lambda: child.cpu_times().user > 0.2, "the child reads")
            process.send_signal(signal.SIGINT)
        _, said = shown.communicate(timeout=60)

    assert shown.returncode != 0
    assert interrupted or "it is broken or hostile (SIGXCPU)" in said
    assert not child.is_running()


@pytest.mark.parametrize(
    "command",
    [
        "vramledger show FILE", "vramledger slurm FILE", "vramledger fit FILE",
        "vramledger serve --source=replay:FILE", "vramledger snapshot show FILE",
        "vramledger_agent snapshot diff FILE",
    ],
)  # fmt: skip
def test_a_files_name_controls_no_terminal(tmp_path: Path, command: str) -> None:
    """A stranger's name of a file, which root's shell finds by a pattern, neither controls nor forges."""
    (tmp_path / NAMED).touch()
    words = [word.replace("FILE", NAMED) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env=environment(no_driver(tmp_path / "driver")),
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode != 0
    assert controls(done.stdout + done.stderr) == []
    assert "[2J" in done.stderr, "the name is shown"
    assert "\nvramledger: all is well" not in done.stderr


@pytest.mark.parametrize("kind", ["RuntimeError", "StartupError"])
def test_a_traceback_controls_no_terminal(kind: str) -> None:
    """What a command does not expect is shown without control characters, and so is an error's origin."""
    code = f"""if True:
        import sys
        from vramledger_agent.cli import main
        from vramledger_agent.commands import snapshot
        from vramledger_agent.errors import StartupError

        def fail(_):
            raise {kind}({HOSTILE!r})

        snapshot.run = fail
        sys.exit(main(["snapshot", "7", "--log.level=debug"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, controls(done.stderr)) == (1, [])
    assert f"{kind}: " in done.stderr
