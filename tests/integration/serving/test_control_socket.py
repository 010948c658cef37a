"""The control socket: its file, its messages, and what strangers put into it."""

import array
import asyncio
import json
import os
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import msgspec
import pytest

from tests.support.blocking_files import BlockingFiles, blocking_files
from tests.support.control_client import read_answer, request_bytes
from tests.support.lingering import Lingerer, lingering
from tests.support.requirements import require_namespaces, require_root
from tests.support.stranger import USER, as_user, listening_as, strange
from tests.support.waiting import wait_until
from vramledger.agent_server import disposal
from vramledger.agent_server.unix_socket import _make_directory
from vramledger.errors import StartupError
from vramledger.serving import control_messages, control_socket
from vramledger.serving.control_client import NoExporterError, request_past, request_release, request_snapshot
from vramledger.serving.control_messages import (
    ControlError,
    PastHead,
    PastQuestion,
    Released,
    ReleaseRequest,
    SnapshotHead,
    SnapshotRequest,
    read,
    read_question,
)
from vramledger.serving.control_socket import Caller, ControlHandlers, serve_control
from vramledger_agent import client as agent_client
from vramledger_agent.client import UntrustedListenerError, check_listener, exporters_user, is_trusted

Blocking: TypeAlias = "Lingerer | BlockingFiles"
Attack = Callable[[socket.socket, Blocking], None]
Two = tuple[int, int]

LONG = 20
"""Seconds: longer than an exporter may be held up here."""

SOON = 5.0
SPAN = {"from": 1.5, "to": 2.5}
POLLRDHUP = 0x2000
LARGE = bytes(range(256)) * 4096


async def release(seconds: float | None) -> Released:
    return Released(seconds)


async def document() -> bytes:
    return b'{"devices": []}\n'


async def large(request: SnapshotRequest, _: Caller) -> tuple[SnapshotHead, bytes]:
    return SnapshotHead("1.2.3", f"after {request.after}", 2.5, 600.0), LARGE


async def past(question: PastQuestion, _: Caller) -> tuple[PastHead, bytes]:
    return PastHead("1.2.3", {"asked": True}), json.dumps(msgspec.to_builtins(question)).encode()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


HANDLERS = ControlHandlers(release, document, large, past, lambda: True)


@asynccontextmanager
async def serving(path: Path, **changes: Any) -> AsyncIterator[Path]:  # noqa: ANN401 any handler
    async with serve_control(path, HANDLERS._replace(**changes), required=True):
        yield path


def test_the_socket_is_ready_open_to_all_and_removed(tmp_path: Path) -> None:
    """Every user may connect with every umask, it answers immediately, and leaves no file behind."""
    path = tmp_path / "run" / "control.sock"

    async def serve() -> object:
        async with serving(path):
            assert (path.stat().st_mode & 0o777, list(path.parent.iterdir())) == (0o666, [path])
            return await request_release(path, 7.0)

    with umask(0o077):
        assert asyncio.run(serve()) == 7.0
        assert os.umask(0o077) == 0o077
    assert list(path.parent.iterdir()) == []


async def test_a_snapshot_of_any_size_arrives_whole(tmp_path: Path) -> None:
    """A snapshot that is larger than every buffer arrives whole, with what the exporter says of it."""
    async with serving(tmp_path / "control.sock") as path:
        head, text = await request_snapshot(path, "7&uid=0")
    assert (head, text) == (SnapshotHead("1.2.3", "after 7&uid=0", 2.5, 600.0), LARGE)


@pytest.mark.parametrize(
    "question",
    [{"ask": "at", "at": 1764108000.25}, *({"ask": each, **SPAN} for each in ("since", "readings"))],
)
async def test_a_question_about_the_past_arrives(tmp_path: Path, question: dict[str, Any]) -> None:
    """The storage gets exactly the question of a command."""
    async with serving(tmp_path / "control.sock") as path:
        program, head, content = await request_past(path, question)
    assert (program, head, json.loads(content)) == ("1.2.3", {"asked": True}, question)


async def test_curl_gets_the_ledger(tmp_path: Path) -> None:
    """Any program that speaks HTTP gets the ledger as JSON."""
    async with serving(tmp_path / "control.sock") as path:
        command = ["curl", "-sS", "--unix-socket", str(path), "http://localhost/api/v1/ledger"]
        said = await asyncio.to_thread(subprocess.check_output, command, timeout=30)
    assert json.loads(said) == {"devices": []}


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """A dead exporter's socket is replaced, also of the version before; a live one and a file stay."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    async with serving(path):
        with pytest.raises(StartupError, match="another exporter answers there; choose another path"):
            async with serving(path):
                pass
        assert await request_release(path, 7.0) == 7.0
        async with serve_control(path, HANDLERS, required=False):
            pass
        assert path.exists(), "who goes on without a socket removes nobody else's"
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(StartupError, match=f"control socket {path}: it is not a socket; move it away"):
        async with serving(path):
            pass
    assert path.read_text() == "precious"


async def test_a_long_path_is_no_longer_for_us(tmp_path: Path) -> None:
    """Every path that the kernel accepts (107 bytes) works, because the temporary name is short."""
    async with serving(Path(f"{tmp_path}/{'x' * (106 - len(str(tmp_path)))}")) as path:
        assert await request_release(path, 7.0) == 7.0


@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o1777, 0), (0o775, 12345), (0o755, 12345)])
async def test_no_socket_is_made_where_others_may_write(control: Path, mode: int, owner: int) -> None:
    """In a directory of another user, or that others may write, also a sticky one, there is no socket."""
    os.chown(control.parent, owner, 12345)
    control.parent.chmod(mode)
    with pytest.raises(StartupError, match=f"others may write in {control.parent}; use a directory of root"):
        async with serving(control):
            pass
    assert not list(control.parent.iterdir())


@pytest.mark.parametrize(
    ("mode", "owner", "by_link", "refused"),
    [
        (0o755, 0, False, False), (0o1777, 0, False, False), (0o777, 0, False, True),
        (0o755, 12345, False, True), (0o1777, 12345, False, True), (0o755, 12345, True, True),
    ],
)  # fmt: skip
def test_nobody_above_can_replace_the_directory(mode: int, owner: int, by_link: bool, refused: bool) -> None:
    """Each directory that the path leads through is root's or ours; a sticky one protects what is in it."""
    require_root()
    with TemporaryDirectory(prefix="vl-") as name:
        above, place = Path(name, "above"), Path(name, "run") if by_link else Path(name, "above", "run")
        above.mkdir()
        place.mkdir()
        if by_link:
            Path(above, "run").symlink_to(place)
        os.chown(above, owner, owner)
        above.chmod(mode)

        async def serve() -> None:
            async with serving(above / "run" / "control.sock"):
                pass

        with pytest.raises(StartupError, match=f"rename what is in {above}") if refused else nullcontext():
            asyncio.run(serve())
        assert not list(place.iterdir())


async def test_the_user_that_we_become_may_own_the_directory(tmp_path: Path) -> None:
    """An exporter that starts as root listens in the directory that it has given to its later user."""
    require_root()
    os.chown(tmp_path, 12345, 12345)
    path = tmp_path / "control.sock"
    async with serve_control(path, HANDLERS, required=True, owner=12345):
        assert await request_release(path, 7.0) == 7.0


async def test_a_file_of_another_is_not_opened_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes the temporary name while the socket is made changes no other file's mode."""
    secret, bind = tmp_path / "secret", socket.socket.bind
    secret.write_text("", encoding="ascii")
    secret.chmod(0o600)

    def bind_and_swap(self: socket.socket, address: str) -> None:
        bind(self, address)
        Path(address).rename(tmp_path / "aside")
        Path(address).symlink_to(secret)

    monkeypatch.setattr(socket.socket, "bind", bind_and_swap)
    async with serving(tmp_path / "control.sock"):
        pass
    assert secret.stat().st_mode & 0o777 == 0o600


def send_in_a_request(connection: socket.socket, lingerer: Blocking) -> None:
    lingerer.send(connection, request_bytes("GET", "/snapshot"))


def send_behind_a_request(connection: socket.socket, lingerer: Blocking) -> None:
    """Send half a request, and a descriptor with its rest."""
    connection.send(b"GET /snapshot HTTP/1.1\r\n")
    lingerer.send(connection, b"\r\n")


def send_urgently(connection: socket.socket, lingerer: Blocking) -> None:
    """Send a descriptor with an urgent byte before the request, which a usual look does not see."""
    assert isinstance(lingerer, Lingerer)
    with lingerer._make() as sender:
        rights = array.array("i", [sender.fileno()])
        connection.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_OOB)
    connection.send(request_bytes("GET", "/snapshot"))


def send_and_go(connection: socket.socket, lingerer: Blocking) -> None:
    """Send descriptors behind a whole request, and go without having read the answer."""
    connection.send(request_bytes("GET", "/snapshot"))
    with suppress(OSError):
        for _ in range(10):
            lingerer.send(connection, b"x")
    connection.close()


@pytest.mark.repeats(kept=3)
@pytest.mark.parametrize("kind", ["socket", "file"])
@pytest.mark.parametrize("attack", [send_in_a_request, send_behind_a_request, send_urgently, send_and_go])
async def test_passed_descriptors_do_nothing(tmp_path: Path, attack: Attack, kind: str) -> None:
    """A descriptor whose closing takes long delays nobody, however it comes, and is never received."""
    if kind == "file" and (attack is send_urgently or os.geteuid()):
        pytest.skip("one way to send it urgently is enough; a file system needs root")
    place = tmp_path / "fuse"
    place.mkdir()
    blocking = lingering(LONG) if kind == "socket" else blocking_files(place)
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 numbers
    async with serving(tmp_path / "control.sock") as path:
        with blocking as lingerer:
            attackers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
            for each in attackers:
                each.connect(str(path))
                attack(each, lingerer)
            for _ in range(4):
                assert await asyncio.wait_for(request_release(path, 7.0), SOON) == 7.0
                await asyncio.wait_for(asyncio.sleep(0.5), SOON)
            refused = []
            for each in attackers:
                if each.fileno() >= 0:
                    each.settimeout(SOON)
                    with suppress(ConnectionResetError):
                        refused.append(read_answer(await asyncio.to_thread(each.recv, 65536)).error)
                    each.close()
            await asyncio.wait_for(asyncio.sleep(1.5), SOON)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2  # noqa: PTH208 numbers
    assert set(refused) <= {"a request has no descriptors"}


async def test_many_mounts_of_a_stranger_delay_nobody(control: Path) -> None:
    """A user whose list of mounts takes seconds to read connects again and again; others are answered."""
    with strange("mounts", "5000", str(control)):
        async with serving(control):
            for _ in range(5):
                begun = time.monotonic()
                assert await request_release(control, 7.0) == 7.0
                assert time.monotonic() - begun < 1.0
                await asyncio.sleep(0.2)


def test_no_list_of_mounts_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is among the first mounts; a process for which it is not counts as one of a container."""
    monkeypatch.setattr(agent_client, "PROC", tmp_path)
    for pid, before in (("self", 0), ("7", 9), ("8", 1000)):
        place = tmp_path / pid
        place.mkdir()
        (place / "uid_map").write_text("0 0 1")
        (place / "status").write_text("NSpid:\t7\n")
        (place / "mountinfo").write_text("5 1 0:5 / /x rw\n" * before + "4 1 0:4 / / rw\n")
        os.truncate(place / "mountinfo", 2**32)
    assert [agent_client.is_outside_containers(pid) for pid in (7, 8)] == [True, False]


@pytest.fixture
def control() -> Iterator[Path]:
    """Return the path of a socket to which other users may connect."""
    require_root()
    with TemporaryDirectory(prefix="control-", dir="/run") as name:
        Path(name).chmod(0o755)
        yield Path(name) / "control.sock"


async def test_who_does_not_read_holds_little_memory(tmp_path: Path) -> None:
    """Of an answer that nobody reads only a few pieces are kept for its client, and only for seconds."""
    text = bytes(64 * 2**20)

    async def huge(*_: object) -> tuple[SnapshotHead, bytes]:
        return SnapshotHead("1", "t", 1.0, 1.0), text

    async with serving(tmp_path / "control.sock", snapshot=huge) as path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
            client.send(request_bytes("GET", "/snapshot"))
            before = _resident()
            await asyncio.sleep(1.0)
            assert _resident() - before < 16 * 2**20


async def test_a_request_comes_in_a_few_pieces(tmp_path: Path) -> None:
    """Who sends a request byte by byte is soon refused, and does not wake the exporter for each one."""
    async with serving(tmp_path / "control.sock") as path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))
            for piece in (b"GET / HTTP/1.1\r\nX: ", *[b"x"] * (control_socket._MAX_PIECES - 1)):  # noqa: SLF001
                client.send(piece)
                await asyncio.to_thread(wait_until, lambda: disposal._is_read(client), "it")  # noqa: SLF001
            answer = read_answer(await asyncio.to_thread(client.recv, 65536))
    assert answer.error == "a request has at most 8192 bytes, in 32 pieces"


async def test_who_leaves_answers_unread_has_no_place_for_more(
    control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent and not read stays our memory, so its place stays taken; whoever reads has it back."""
    monkeypatch.setattr(control_messages, "REQUEST_SECONDS", 0.1)

    def ask() -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with as_user(USER):
            client.connect(str(control))
        client.send(request_bytes("GET", "/snapshot"))
        return client

    async def ended(client: socket.socket) -> None:
        poll = select.poll()
        poll.register(client, POLLRDHUP)
        assert await asyncio.to_thread(poll.poll, SOON * 1000)

    with ExitStack() as opened:
        async with serving(control):
            kept = [opened.enter_context(ask()) for _ in range(control_socket.MAX_CONNECTIONS_PER_USER)]
            for each in kept:
                await ended(each)
            await ended(refused := opened.enter_context(ask()))
            assert refused.recv(65536) == b"", "not even a word"
            kept[0].close()
            await ended(answered := opened.enter_context(ask()))
            assert answered.recv(15) == b"HTTP/1.1 200 OK"


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_an_answer_that_nobody_waits_for_is_not_computed(tmp_path: Path) -> None:
    """When its client goes, a question is given up; a release is finished."""
    begun, ended, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> tuple[SnapshotHead, bytes]:
        begun.set()
        try:
            await asyncio.sleep(LONG)
        finally:
            ended.set()
        raise AssertionError

    async def slow_release(_: float | None) -> Released:
        begun.set()
        await asyncio.sleep(0.5)
        finished.set()
        return Released(None)

    async with serving(tmp_path / "control.sock", snapshot=slow, release=slow_release) as path:
        for request, done in ((("GET", "/snapshot"), ended), (("POST", "/resume"), finished)):
            begun.clear()
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(str(path))
                client.send(request_bytes(*request))
                await asyncio.wait_for(begun.wait(), SOON)
            await asyncio.wait_for(done.wait(), SOON)


def test_who_listens_must_be_trusted(tmp_path: Path) -> None:
    """A command trusts nothing that another user's process says, and sends it nothing."""
    require_root()
    path = tmp_path / "control.sock"
    with listening_as(12345, path, socket.SOCK_STREAM) as listening:
        with pytest.raises(NoExporterError, match="belongs to user 12345, neither to root nor to you"):
            asyncio.run(request_snapshot(path))
        with listening.accept()[0] as accepted:
            assert accepted.recv(100) == b""


LISTENING = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    os.setuid(int(sys.argv[2]))
    listening.listen()
    print(flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("user", "owner", "mode", "link", "trusted"),
    [
        (0, 0, 0o755, "usual", True), (12345, 12345, 0o755, "usual", True), (0, 0, 0o777, "usual", False),
        (0, 12345, 0o755, "usual", False), (0, 0, 0o755, "volume", False),
        (12345, 12345, 0o755, "volume", False), (0, 0, 0o755, "proc/self/root", False),
    ],
)  # fmt: skip
def test_a_containers_user_is_no_exporter(  # noqa: PLR0913, PLR0917 what a container may choose
    monkeypatch: pytest.MonkeyPatch, user: int, owner: int, mode: int, link: str, trusted: bool
) -> None:
    """A user of a container is trusted only in the usual directory, and where that is its own."""
    require_root()
    require_namespaces()
    with TemporaryDirectory(prefix="listener-", dir="/run") as name:
        Path(name).chmod(0o755)
        usual = Path(name, "usual")
        place = Path(name, "volume") if link == "volume" else usual
        monkeypatch.setattr(agent_client, "_USUAL", usual)
        for each in {usual, place}:
            each.mkdir()
            each.chmod(mode)
            os.chown(each, owner, owner)
        path = place / "control.sock"
        seen = Path("/", link, str(path).lstrip("/")) if link.startswith("proc") else path
        command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", LISTENING]
        with (
            subprocess.Popen(
                [*command, str(path), str(user)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as process,
            socket.socket(socket.AF_UNIX) as client,
        ):
            try:
                assert process.stdout is not None
                process.stdout.readline()
                client.connect(str(seen))
                if trusted:
                    check_listener(client, seen)
                else:
                    with pytest.raises(UntrustedListenerError, match=r"is in a container|belongs to user"):
                        check_listener(client, seen)
                assert is_trusted(seen, socket.SOCK_STREAM) == trusted, "what doctor may propose"
            finally:
                process.kill()


def test_no_directory_is_ever_open_to_all(tmp_path: Path) -> None:
    """What is made for the socket belongs to us alone from its first moment, whatever the umask is."""
    with umask(0):
        _make_directory(tmp_path / "a" / "b", parents=True)
    for each in (tmp_path / "a", tmp_path / "a/b"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("modes", "owners", "found"),
    [((0o755, 0o755), (0, 12345), 12345), ((0o777, 0o755), (0, 12345), None),
     ((0o755, 0o775), (0, 12345), None), ((0o755, 0o755), (12345, 12345), None)],
)  # fmt: skip
def test_the_usual_directory_names_a_user(control: Path, modes: Two, owners: Two, found: int | None) -> None:
    """The owner of the exporter's directory is trusted if only root can have made it for them."""
    above, place = control.with_name("run"), control.with_name("run") / "vramledger"
    place.mkdir(parents=True)
    for each, mode, owner in zip((above, place), modes, owners, strict=True):
        os.chown(each, owner, owner)
        each.chmod(mode)
    assert exporters_user(place) == found


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"\xff", b"[" * 4000, b"{}", b'{"seconds": 0}', b'{"seconds": 2592001}'),
        *(b'{"seconds": true}', b'{"seconds": NaN}', b'{"seconds": 1e999}', b'{"seconds": 1, "more": 1}'),
    ],
)
def test_what_is_no_request_is_refused_in_one_sentence(line: bytes) -> None:
    """Garbage, an unknown word and an invalid time are errors of the one who asks."""
    with pytest.raises(ControlError, match=r"that is not a message of this version of vramledger: .+"):
        read(line, ReleaseRequest)


@pytest.mark.parametrize(
    "asked", [{"ask": "\udcff"}, {"ask": "at", "at": "\udcff"}, {"\udcff": "1", "ask": "at"}]
)
def test_a_question_that_is_no_text_is_refused(asked: dict[str, str]) -> None:
    """A byte that is not UTF-8 is a lone surrogate in a path's parameters."""
    with pytest.raises(ControlError, match="not a message of this version"):
        read_question(asked)
