"""What ties real processes to each other, as the collector reads it."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.integration.accounting.test_states_real import Watcher
from tests.support import stranger
from tests.support.blocking_files import blocking_files
from tests.support.players.parts import rank as rank_variables
from tests.support.players.stage import Player, PlayerError, Stage, parent_of, status
from tests.support.requirements import do_without, require_root
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.model.holder_facts import Ties
from vramledger.model.snapshot import State
from vramledger.readers.collector import Context
from vramledger.readers.hosts import sockets, tie_search
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.sockets import unix_sockets
from vramledger.readers.hosts.tie_search import Watched, _protocol, find_ties
from vramledger.readers.hosts.ties import LOOK_INTERVAL, TiesReader

HOST = Host(Path("/proc"))


def found(*holders: Player) -> dict[int, Ties]:
    rows, _ = HOST.rows([each.pid for each in holders])
    watched = [Watched(row, facts, row.ppid) for row in rows if (facts := HOST.facts(row)) is not None]
    return {each.pid: each for each in find_ties("/proc", watched, host_namespace=True)}


def reading(*holders: Player) -> Context:
    """Return the context of a sample that lists these players for the first time."""
    rows, _ = HOST.rows([each.pid for each in holders])
    return Context(parts={"rows": rows, "facts": tuple(filter(None, map(HOST.facts, rows)))})


def end(launcher: Player, child: Player) -> None:
    """End a player, and wait until another process has adopted its child."""
    launcher.end()
    wait_until(lambda: parent_of(child.pid) != launcher.pid, "nobody adopts the child")


def rank(launcher: Player) -> Player:
    return launcher.start(env={"OMPI_COMM_WORLD_RANK": "0"}, tie="socket")


def test_a_child_of_a_live_program_has_no_ties(stage: Stage) -> None:
    """Nobody looks at its pipes: its launcher lives."""
    assert found(rank(stage.start())) == {}


def test_severed_and_live_ends_are_told_apart(stage: Stage) -> None:
    """The end to the launcher is dead, that to another program is not, and its own output says nothing.

    When the other program has ended too, that says nothing either: nobody said that it is the launcher.
    """
    store = stage.start()
    launcher = stage.start(session=False)
    holder = rank(launcher)
    holder.order("call", store.order("serve"))
    launcher.end()
    with_store = found(holder)[holder.pid]
    store.end()
    alone = found(holder)[holder.pid]
    assert (with_store.adopted, with_store.worker, with_store.severed, with_store.live) == (True, True, 1, 1)
    assert (alone.severed, alone.live) == (1, 0)
    assert (with_store.abandoned, alone.abandoned) == (False, True)


@pytest.mark.parametrize("by_agent", [False, True])
def test_the_store_of_the_first_rank_is_no_launcher(stage: Stage, *, by_agent: bool) -> None:
    """Only where torchrun says that it has the store itself, the end of the store is that of the launcher."""
    launcher, store = stage.start(session=False), stage.start()
    port = store.order("serve")
    env = {**rank_variables(1, port), "TORCHELASTIC_USE_AGENT_STORE": str(by_agent)}
    holder = launcher.start(env=env, session=True)
    holder.order("call", port)
    end(launcher, holder)
    store.end()
    assert found(holder)[holder.pid].severed == by_agent


@pytest.mark.parametrize("told", [False, True])
def test_a_task_of_slurm_outlives_the_first_of_its_step(stage: Stage, *, told: bool) -> None:
    """All tasks of a step are in the group of the first; slurmstepd tells each its pid."""
    step = stage.start(("reap",))
    first = step.start(("lead_group",))
    wrapper = ("sh", "-c", 'export SLURM_TASK_PID=$$; exec "$@"', "sh") if told else ()
    task = step.start(("join_group", first.pid), env={"PMIX_RANK": "1"}, wrapper=wrapper)
    first.end()
    wait_until(lambda: status(first.pid) == "gone", "the end of the first task")
    assert found(task) == {} if told else found(task)[task.pid].adopted


def left_behind(stage: Stage, user: int = 0) -> Player:
    """Return a spawned worker whose program is killed."""
    launcher = stage.start(session=False)
    (worker,) = launcher.fork_workers("spawn", 1)
    if user:
        worker.order("be_user", user)
    end(launcher, worker)
    return worker


def test_who_takes_datagrams_can_be_reached(stage: Stage) -> None:
    """A worker that listens by UDP, and one that is connected to a live program by it, may be wanted."""
    server, client, other = left_behind(stage), left_behind(stage), stage.start()
    assert all(each.abandoned for each in found(server, client).values())
    server.order("listen_for_datagrams")
    client.order("call_by_datagrams", other.order("listen_for_datagrams"))
    after = found(server, client)
    assert (after[server.pid].listening, after[client.pid].live) == (True, 1)
    assert not any(each.abandoned for each in after.values())


@pytest.mark.parametrize("by_worker", [False, True])
def test_a_connection_that_is_half_closed_lives(stage: Stage, *, by_worker: bool) -> None:
    """Who has said all may still be told something, and wait for an answer."""
    worker, other = left_behind(stage), stage.start()
    worker.order("call", other.order("serve"))
    (worker if by_worker else other).order("half_close")
    wait_until(lambda: found(worker)[worker.pid].live == 1, "the connection")
    assert not found(worker)[worker.pid].abandoned


def test_a_socket_of_another_protocol_is_a_doubt(stage: Stage) -> None:
    """Nobody reads the table of its connections."""
    worker = left_behind(stage)
    try:
        worker.order("make_socket", "AF_VSOCK")
    except PlayerError:
        do_without("this kernel has no virtual machine's sockets")
    ties = found(worker)[worker.pid]
    assert ties.severed > 0
    assert (ties.unread, ties.abandoned) == (1, False)


def test_a_socket_that_called_nobody_says_nothing(stage: Stage) -> None:
    """It is in no table, as one that was reset is."""
    launcher = stage.start(session=False)
    holder = launcher.start(env={"OMPI_COMM_WORLD_RANK": "0"})
    holder.order("make_socket")
    end(launcher, holder)
    ties = found(holder)[holder.pid]
    assert (ties.adopted, ties.worker, ties.severed) == (True, True, 0)


def test_a_program_whose_main_thread_has_ended_may_want_its_workers(stage: Stage) -> None:
    """Its other threads have its pipes; that to the fork server, which is killed, is dead."""
    program = stage.start(session=False)
    (worker,) = program.fork_workers("forkserver", 1)
    server = sure(worker.process.parent())
    program.order("end_main_thread")
    wait_until(lambda: status(program.pid) == psutil.STATUS_ZOMBIE, "the end of the main thread")
    server.kill()
    wait_until(lambda: parent_of(worker.pid) != server.pid, "nobody adopts the worker")
    ties = found(worker)[worker.pid]
    assert (ties.severed, ties.live, ties.abandoned) == (1, 2, False)


@pytest.mark.parametrize("holds", [False, True])
def test_a_program_without_its_session_may_want_its_workers(stage: Stage, *, holds: bool) -> None:
    """Who lost his session by a logout runs on purpose, whether he holds memory too or not."""
    leader = stage.start()
    program = leader.start(session=False)
    end(leader, program)
    between = program.start(session=False)
    holder = rank(between)
    between.end()
    holder.order("call", program.order("serve"))
    ties = found(holder, *[program] * holds)[holder.pid]
    assert (ties.adopted, ties.worker, ties.severed, ties.live) == (True, True, 1, 1)
    assert not ties.abandoned


def test_the_kernel_says_which_unix_sockets_are_connected(stage: Stage) -> None:
    """A player's connection to its stage, whole messages to a name, is left out as that of an agent."""
    launcher = stage.start()
    players = launcher, rank(launcher)
    links = {link.readlink() for each in players for link in Path(f"/proc/{each.pid}/fd").iterdir()}
    new = [end for inode, end in unix_sockets().items() if Path(f"socket:[{inode}]") in links]
    assert any(end.peer and not end.severed for end in new)
    assert not any(end.severed for end in new)


def test_the_collector_looks_between_samples(stage: Stage) -> None:
    """No sample waits for a look; a parent that ends is looked at soon, and who has ended is forgotten."""
    now = [0.0]
    reader = TiesReader(HOST, clock=lambda: now[0])
    launcher = stage.start(session=False)
    holder = rank(launcher)
    assert reader.read(reading(holder)) == {"ties": ()}
    launcher.end()
    told: list[Ties] = []

    def look() -> bool:
        now[0] += LOOK_INTERVAL
        told[:] = reader.read(reading(holder))["ties"]
        return bool(told)

    wait_until(look, "the end of a look")
    assert told[0].abandoned
    assert sure(reader.health)[0]
    assert list(reader.errors()) == []
    holder.end()
    assert reader.read(Context()) == {"ties": ()}


def test_a_look_that_fails_is_told_and_taken_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the collector's, and the next look goes on."""
    now = [0.0]
    reader = TiesReader(HOST, clock=lambda: now[0])
    holder = stage.start()
    with monkeypatch.context() as broken:
        broken.setattr("vramledger.readers.hosts.ties.find_ties", lambda *_, **__: 1 / 0)
        reader.read(reading(holder))
        wait_until(lambda: reader.read(reading(holder)) and any(reader.errors()), "the error")

    def well() -> bool:
        now[0] += LOOK_INTERVAL
        reader.read(reading(holder))
        return reader.health is not None and not any(reader.errors())

    wait_until(well, "a look that ends")


@contextmanager
def frozen(*players: Player) -> Iterator[None]:
    """Freeze players, as the pause of a container does."""
    require_root()
    place, frozen, thawed = Path("/sys/fs/cgroup/freezer/vramledger-test"), "FROZEN", "THAWED"
    state = told = place / "freezer.state"
    if not place.parent.exists():
        place, frozen, thawed = Path("/sys/fs/cgroup/vramledger-test"), "1", "0"
        state, told = place / "cgroup.freeze", place / "cgroup.events"
    try:
        place.mkdir()
    except OSError:
        do_without("this machine does not let us make cgroups")
    try:
        for each in players:
            (place / "cgroup.procs").write_text(str(each.pid), encoding="ascii")
        state.write_text(frozen)
        wait_until(lambda: told.read_text().strip().endswith(("FROZEN", "frozen 1")), "the frost")
        yield
    finally:
        state.write_text(thawed)
        for each in players:
            with suppress(OSError):
                (place.parent / "cgroup.procs").write_text(str(each.pid), encoding="ascii")
        place.rmdir()


def test_a_paused_container_is_stopped(stage: Stage) -> None:
    """Its cgroup is frozen; the other holder goes on."""
    paused, other = stage.start(), stage.start()
    with frozen(paused):
        first, second = Watcher([paused.pid, other.pid]).look()
    assert (first.state, second.state) == (State.STOPPED, State.ACTIVE)
    assert first.why == "its cgroup is frozen, as that of a paused container is"
    assert [each.state for each in Watcher([paused.pid]).look()] == [State.ACTIVE]


@pytest.mark.parametrize(
    ("user", "within"), [(stranger.USER, ()), (0, ("unshare", "--pid", "--fork", "--kill-child"))]
)
def test_many_descriptors_hide_nobody_elses_orphans(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, user: int, within: tuple[str, ...]
) -> None:
    """What ties those of a user, or of a container's root, who has more than are read, is in doubt alone."""
    require_root()
    monkeypatch.setattr(tie_search, "MOST_LINKS", 30_000)
    hog = partial(stranger.strange, "descriptors", "18000", user=user, within=within)
    with hog(), hog():
        ties = found(left_behind(stage), left_behind(stage, user))
    others, own = ties.values()
    assert (others.unread, others.abandoned) == (0, True)
    assert (own.unread, own.abandoned) == ((1, False) if user else (0, True))


def test_too_many_sockets_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with very many sockets takes none of our memory, and what ties others is in doubt."""
    monkeypatch.setattr(sockets, "MOST_SOCKETS", 300)
    kept = [socket.socket(socket.AF_UNIX) for _ in range(400)]
    try:
        with pytest.raises(OSError, match="there are more than 300 Unix sockets"):
            unix_sockets()
    finally:
        for each in kept:
            each.close()


def test_a_file_in_the_place_of_a_socket_is_not_asked(tmp_path: Path) -> None:
    """Who changes a socket for a file that never answers, just before it is looked at, stops no look."""
    require_root()
    with ThreadPoolExecutor(1) as pool, socket.socket() as plain, blocking_files(tmp_path) as files:
        swapped = files.open()
        try:
            assert pool.submit(_protocol, f"/proc/self/fd/{swapped}").result(10) == b""
        finally:
            os.close(swapped)
        assert _protocol(f"/proc/self/fd/{plain.fileno()}") == b"TCP\0"
