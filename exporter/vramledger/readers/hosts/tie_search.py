"""Find what ties a holder to those who may still want it, where who started it may have ended.

Parentage alone says nothing about purpose: a start script, a daemon and an upgrade in place end the parent of
healthy work. So for each suspect all processes are searched for the other ends of its pipes and sockets. What
a program is called decides nothing here.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

from vramledger.model.holder_facts import Ties
from vramledger.model.reading import ProcessFacts, ProcessRow
from vramledger.readers.hosts.facts import (
    ENVIRON_CAP,
    FILE_CAP,
    find_memory_directory,
    read_file,
    split_arguments,
    status_fields,
    worker_variables,
)
from vramledger.readers.hosts.program_names import worker_evidence
from vramledger.readers.hosts.sockets import (
    SocketEnd,
    ports_the_kernel_chooses,
    tcp_sockets,
    udp_sockets,
    unix_sockets,
)
from vramledger.readers.hosts.stat import is_over, names_in, read_row
from vramledger.readers.owners.cgroups import hierarchy_paths

MOST_LINKS = 1_000_000
"""Descriptors that a look reads, of each user as many; about who has more it has doubts. 1.6 µs each."""

_LINKS_AT_ONCE = 1024
_User = tuple[int, int]
"""Who has a share: a uid, and if it is the root of a container the inode of its PID namespace."""

_HOST_ROOT = (0, 0)
_T = TypeVar("_T")
_Key = TypeVar("_Key")

STRONG_SIGNS = frozenset(
    "multiprocessing title jupyter TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK"
    " RAY_RAYLET_PID".split()
)
"""Only a launcher sets these; LOCAL_RANK, for example, people also set by hand."""

_COMMAND_SIGNS = frozenset("multiprocessing title jupyter".split())
"""Those in the command line, which a program that is started does not inherit, and a forked child does."""

_NAMED_LAUNCHER = {"RAY_RAYLET_PID": b"RAY_RAYLET_PID", "jupyter": b"JPY_PARENT_PID"}
"""The variable of the launcher's pid by the worker's sign: a worker's own children inherit it."""

_LAUNCHER_PORT = re.compile(
    rb"(?:^|\0)(?:PMI_PORT|PMIX_SERVER_URI\w*|OMPI_MCA_orte_\w*uri)=[^\0]*:(\d{1,5})(?=\0|$)"
)
"""The variables by which a launcher tells its ranks where to find it: MPICH, Open MPI."""

_STORE_PORT = re.compile(rb"(?:^|\0)MASTER_PORT=(\d{1,5})(?=\0|$)")
_AGENT_STORE = b"\0TORCHELASTIC_USE_AGENT_STORE=True\0"
"""torchrun has the store itself; otherwise the first rank has it, which may end before the others."""

_TASK = re.compile(rb"(?:^|\0)SLURM_TASK_PID=(\d{1,10})(?=\0|$)")
"""The variable by which slurmstepd tells the pid to the task that it starts."""

_LAUNCHER_SOCKET = re.compile(rb"(?:^|\0)PMI_FD=(\d{1,10})(?=\0|$)")
"""The variable with the descriptor that leads from a rank to its launcher."""

_WRAPPERS_MAX = 8
_STANDARD_STREAMS = ("0", "1", "2")


class Watched(NamedTuple):
    """A holder: its row, what is known of it, and its parent when it was first seen."""

    row: ProcessRow
    facts: ProcessFacts
    first_parent: int


class _Suspect(NamedTuple):
    """A holder whose launcher may have ended."""

    row: ProcessRow  # its own
    top: ProcessRow  # it, or the wrapper around it whose parent is another one than its launcher
    adopted: bool  # another process than its parent has certainly started it
    reaped: bool  # its parent is the init of a container, which may have started it
    worker: bool  # it is a worker by signs of its own
    # they are in its command line alone: it may be a daemon that a worker forked twice
    may_be_daemon: bool = False
    # its launcher may hold it by a pipe. Only ``multiprocessing`` and what builds on it does; a pipe of
    # another worker may have led to a helper of its own that has ended, and so may a socket of which no
    # variable says that it leads to the launcher
    by_pipe: bool = False
    by_socket: bool = False  # its launcher holds it by a Unix socket without saying by which, as Ray does


class _End(NamedTuple):
    """A pipe or a socket that a process has open: its descriptor and name, whether it reads and writes."""

    number: str
    name: str
    reads: bool
    writes: bool

    @property
    def is_pipe(self) -> bool:
        return self.name.startswith("pipe:")


class _Search:
    """A look at all processes, each read when asked for; all of them only if there is a suspect."""

    def __init__(self, root: str, *, host_namespace: bool) -> None:
        self.root = root
        self.host_namespace = host_namespace
        self._rows: dict[int, ProcessRow | None] = {}
        self._environments: dict[int, bytes] = {}
        self._frozen: dict[tuple[str, ...], bool] = {}
        # how many of them, or of their sockets, could not be read
        self.unread = 0 if host_namespace else 1  # the other end may be outside of what we see
        self._cut: set[_User] = set()  # those who have more descriptors than are read
        self._numbers: dict[int, tuple[int, ...]] = {}

    def row(self, pid: int) -> ProcessRow | None:
        if pid not in self._rows:
            self._rows[pid] = read_row(self.root, pid)
        return self._rows[pid]

    @cached_property
    def rows(self) -> dict[int, ProcessRow]:
        pids = (int(name) for name in os.listdir(self.root) if name.isdigit())  # noqa: PTH208 3 x faster
        return {pid: row for pid in pids if (row := self.row(pid)) is not None}

    @cached_property
    def children(self) -> dict[int, list[ProcessRow]]:
        return _by(self.rows.values(), lambda row: row.ppid)

    @cached_property
    def groups(self) -> dict[int, list[ProcessRow]]:
        return _by(self.rows.values(), lambda row: row.pgrp)

    def is_frozen(self, cgroup: tuple[str, ...]) -> bool:
        """Tell whether a cgroup is frozen, by itself or by one above it; False where that is not readable."""
        if cgroup not in self._frozen:
            self._frozen[cgroup] = any(
                said in read_file(f"{root}/sys/fs/cgroup/{file}", FILE_CAP, [])
                for file, said in _frozen_files(cgroup)
                for root in (f"{self.root}/1/root", "")  # the host's, if we may look there, and our own
            )
        return self._frozen[cgroup]

    def has_ended(self, pid: int) -> bool:
        row = self.row(pid)
        return row is None or is_over(row)

    def numbers(self, pid: int) -> tuple[int, ...]:
        """Return the pid of a process in each PID namespace, outermost first."""
        if pid not in self._numbers:
            status = status_fields(read_file(f"{self.root}/{pid}/status", FILE_CAP, []))
            self._numbers[pid] = tuple(int(word) for word in status.get(b"NSpid", b"").split()) or (pid,)
        return self._numbers[pid]

    def suspect(self, holder: Watched, holders: Collection[int]) -> _Suspect | None:
        """Return a holder as a suspect, None if its launcher certainly lives, or nothing is known."""
        row, facts = holder.row, holder.facts
        if len(facts.nspid) > 1 and facts.nspid[-1] == 1:
            return None  # the kernel ends all of a container with its init
        self._numbers.setdefault(row.pid, facts.nspid or (row.pid,))
        signs = _own_if_started(row, facts.signs)
        top = self._topmost(row, signs, holders)
        parent = self.row(top.ppid)
        adopted = row.ppid != holder.first_parent
        if parent is None or len(self.numbers(parent.pid)) < len(self.numbers(top.pid)):
            foreign = _Suspect(row, top, adopted, reaped=False, worker=bool(signs))
            return _with_ways(foreign, signs) if adopted else None
        init = self.numbers(parent.pid)[-1] == 1
        by_host = init and parent.pid == 1 and self.host_namespace
        own = _own_if_rank(top, signs - self._passed_on(parent.pid, signs, by_host=by_host))
        worker = bool(own)
        service = top == row and (facts.service_main or facts.may_be_service_main)
        adopted = adopted or self._is_adopted(top, parent) or (by_host and worker and not service)
        adopted = adopted or self._named_launcher_ended(row.pid, own)
        if not adopted and not (init and worker and not service):
            return None
        # A daemon that forked twice is in the session of its dead first child.
        twice = (
            row.session == row.pgrp != row.pid and not signs - _COMMAND_SIGNS and self.has_ended(row.session)
        )
        suspect = _Suspect(row, top, adopted, init and not by_host, worker, may_be_daemon=twice)
        return _with_ways(suspect, own)

    def _topmost(self, row: ProcessRow, signs: frozenset[str], holders: Collection[int]) -> ProcessRow:
        """Return the outermost process that is left behind with a worker if its launcher ends.

        A wrapper around it has the same variables, and holds nothing. Whose command line says worker has no
        wrapper, but a worker may have started it: a fork server, which lives as long as its workers.
        """
        top = row
        for _ in range(_WRAPPERS_MAX if signs else 0):
            parent = self.row(top.ppid)
            if parent is None or self._is_adopted(top, parent):
                break
            if self.numbers(parent.pid)[-1] == 1 or parent.session != row.session:
                break
            if signs & _COMMAND_SIGNS:
                inside = bool(_COMMAND_SIGNS.intersection(self._command_signs(parent.pid)))
            else:
                inside = parent.pid not in holders and signs <= self._variables(parent.pid, frozenset())
            if not inside:
                break
            top = parent
        return top

    def _passed_on(self, pid: int, signs: frozenset[str], *, by_host: bool) -> frozenset[str]:
        """Return which of the signs a parent may have passed on: all of a container's, if not readable."""
        return self._variables(pid, frozenset() if by_host else signs - _COMMAND_SIGNS)

    def _variables(self, pid: int, unreadable: frozenset[str]) -> frozenset[str]:
        denied: list[str] = []
        environment = b"\0" + read_file(f"{self.root}/{pid}/environ", ENVIRON_CAP, denied)
        if denied or not 1 < len(environment) <= ENVIRON_CAP:
            return unreadable
        return frozenset(worker_variables(environment))

    def _named_launcher_ended(self, pid: int, signs: Collection[str]) -> bool:
        """Tell whether a worker's own variable names its launcher, whose pid nobody has in this namespace."""
        variables = [variable for sign, variable in _NAMED_LAUNCHER.items() if sign in signs]
        if not variables:
            return False
        if self._is_slurm_task(pid):
            return False  # the variable may be of the host from which the task was started
        environment = self._environment(pid)
        wanted = rb"(?:^|\0)(?:%s)=(\d{1,10})(?=\0|$)" % b"|".join(variables)
        named = {int(found) for found in re.findall(wanted, environment)}
        if len(named) != 1:
            return False
        depth = len(self.numbers(pid))
        return not any(
            self.numbers(each)[-1] in named
            and len(self.numbers(each)) == depth
            and self._share_pids(pid, each)
            for each in self.rows
        )

    def _share_pids(self, pid: int, other: int) -> bool:
        """Tell whether two processes may share a PID namespace: other containers have the same pids."""
        try:
            one, two = (os.stat(f"{self.root}/{each}/ns/pid").st_ino for each in (pid, other))  # noqa: PTH116
        except OSError:
            return True
        return one == two

    def ways_to_launcher(self, pid: int) -> tuple[set[int], set[str]]:
        """Return the ports, and the descriptors, by which its launcher lets a rank find it."""
        environment = self._environment(pid)
        ports = _LAUNCHER_PORT.findall(environment)
        if _AGENT_STORE in b"\0" + environment + b"\0":
            ports += _STORE_PORT.findall(environment)
        return {int(port) for port in ports}, {
            number.decode() for number in _LAUNCHER_SOCKET.findall(environment)
        }

    def _environment(self, pid: int) -> bytes:
        if pid not in self._environments:
            row = self.row(pid)
            directory = f"{self.root}/{pid}" if row is None else find_memory_directory(self.root, row)
            self._environments[pid] = read_file(f"{directory}/environ", ENVIRON_CAP, [])
        return self._environments[pid]

    def _is_slurm_task(self, pid: int) -> bool:
        return not {int(found) for found in _TASK.findall(self._environment(pid))}.isdisjoint(
            self.numbers(pid)
        )

    def _is_adopted(self, row: ProcessRow, parent: ProcessRow) -> bool:
        """Tell whether a process cannot be the child of its parent: a child begins in its session and group.

        Who leads a session or a group may have made it. A group without its leader, outside of its parent's,
        may be the rest of a pipeline at a prompt, which has a terminal.
        """
        if row.session not in (0, row.pid, parent.session):
            return True
        if row.pgrp in (0, row.pid, row.session, parent.pgrp) or row.tty or not self.has_ended(row.pgrp):
            return False
        # slurmstepd puts all tasks of a step into the group of the first, which may end before them.
        return not self._is_slurm_task(row.pid)

    def fellows(self, suspect: _Suspect) -> set[int]:
        """Return who was left behind together with a suspect: by the same dead session or group."""
        top, parent = suspect.top, self.row(suspect.top.ppid)
        dead = {each for each in (top.session, top.pgrp) if self.has_ended(each)}
        return {
            row.pid
            for row in self.children.get(top.ppid, ())
            if row.pid not in (top.pid, suspect.row.pid)
            and not is_over(row)
            and (
                not dead.isdisjoint((row.session, row.pgrp))
                or (row.pgrp == top.pgrp and parent is not None and self._is_adopted(row, parent))
            )
        }

    def is_worker(self, pid: int) -> bool:
        """Tell whether a process is a worker by its own strong signs.

        Only then its launcher has ended too. Another program that lost its session may run on purpose, after
        ``nohup`` and a logout, and what it has started may want the holder.
        """
        signs = {*self._variables(pid, frozenset()), *self._command_signs(pid)}
        row = self.rows[pid]
        return bool(_own_if_rank(row, _own_if_started(row, signs)))

    def _command_signs(self, pid: int) -> Iterable[str]:
        return worker_evidence(split_arguments(read_file(f"{self.root}/{pid}/cmdline", FILE_CAP, [])))

    def family(self, heads: Iterable[int]) -> set[int]:
        found, left = set[int](), list(heads)
        while left:
            pid = left.pop()
            if pid not in found:
                found.add(pid)
                left += (row.pid for row in self.children.get(pid, ()))
        return found

    def mates(self, row: ProcessRow) -> set[int]:
        """Return the other processes of a group, without those above."""
        above = set[int]()
        parent: ProcessRow | None = row
        while parent is not None and parent.pid not in above:
            above.add(parent.pid)
            parent = self.row(parent.ppid)
        group = self.groups.get(row.pgrp, ())
        return {each.pid for each in group if not is_over(each)} - above

    def ends(self, pids: Iterable[int], wanted: Collection[str] | None = None) -> Iterator[tuple[int, _End]]:
        """Yield pids and their pipes and sockets, all or those wanted; note who could not be read.

        The users take turns: who has very many descriptors hides no others.
        """
        users = _by(pids, lambda pid: self._users(pid)[0])
        turns = deque((user, self._links(theirs, wanted)) for user, theirs in users.items())
        most = MOST_LINKS if wanted is not None else MOST_LINKS // 10  # all are kept
        while turns and most > 0:
            user, links = turns.popleft()
            piece = list(islice(links, _LINKS_AT_ONCE))
            yield from filter(None, piece)
            most -= len(piece)
            if len(piece) == _LINKS_AT_ONCE:
                turns.append((user, links))
        self._cut.update(user for user, _ in turns)

    def _links(
        self, pids: Iterable[int], wanted: Collection[str] | None
    ) -> Iterator[tuple[int, _End] | None]:
        """Yield pids and ends, and None before each process and each descriptor: it is counted."""
        for pid in pids:
            yield None
            row = self.row(pid)
            directory = f"{self.root}/{pid}" if row is None else find_memory_directory(self.root, row)
            try:
                for number in names_in(f"{directory}/fd"):
                    yield None
                    path = f"{directory}/fd/{number}"
                    try:
                        name = os.readlink(path)  # noqa: PTH115 as above
                        if name in wanted if wanted is not None else name.startswith(("pipe:[", "socket:[")):
                            mode = os.lstat(path).st_mode
                            yield pid, _End(number, name, bool(mode & 0o400), bool(mode & 0o200))
                    except FileNotFoundError:
                        continue  # closed meanwhile
            except FileNotFoundError:
                continue  # ended meanwhile
            except OSError:
                self.unread += not self._needs_no_look(pid)

    def unread_for(self, pid: int) -> int:
        """Return in how many places that were not read a process may have its other ends.

        No other user's pipe gets into the programs of a user, but root's: root may have started both.
        """
        return self.unread + len(self._cut & {*self._users(pid), _HOST_ROOT})

    def _users(self, pid: int) -> tuple[_User, _User]:
        """Return the user of a process, and the root of its container or host."""
        status = status_fields(read_file(f"{self.root}/{pid}/status", FILE_CAP, []))
        inside = len(status.get(b"NSpid", b"").split()) > 1
        root = 0, (inside and _namespace(f"{self.root}/{pid}", "pid")) or 0
        uid = int((status.get(b"Uid", b"").split() or (b"0",))[0])
        return ((uid, 0) if uid else root), root

    def _needs_no_look(self, pid: int) -> bool:
        """Tell whether a process that we may not read can certainly have no other end.

        A process that has ended has none, nor has a thread of the kernel, nor the host's init.
        """
        row = self.row(pid)
        kernel = row is not None and row.pgrp == 0 and row.session == 0
        return row is None or is_over(row) or kernel or (pid == 1 and self.host_namespace)


def _frozen_files(cgroup: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the files that say whether a cgroup is frozen, below the root of cgroups, and their words."""
    for controllers, path in hierarchy_paths(cgroup):
        if not controllers:
            yield f"{path}/cgroup.events", b"frozen 1"
            yield f"unified{path}/cgroup.events", b"frozen 1"
        elif "freezer" in controllers.split(","):
            yield f"freezer{path}/freezer.state", b"FROZEN"


def _by(items: Iterable[_T], key: Callable[[_T], _Key]) -> dict[_Key, list[_T]]:
    found: dict[_Key, list[_T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _with_ways(suspect: _Suspect, signs: Collection[str]) -> _Suspect:
    """Add by what a launcher of workers with such signs holds them."""
    by_socket = "RAY_RAYLET_PID" in signs
    return suspect._replace(by_pipe=not {"multiprocessing", "title"}.isdisjoint(signs), by_socket=by_socket)


def _own_if_rank(row: ProcessRow, signs: frozenset[str]) -> frozenset[str]:
    """Return the signs that a process does not have of a rank: torchrun makes each rank lead a session."""
    return signs if row.pid == row.session else signs - {"TORCHELASTIC_RUN_ID"}


def _own_if_started(row: ProcessRow, signs: Iterable[str]) -> frozenset[str]:
    """Return the strong signs that a process does not have of whoever forked it.

    ``multiprocessing`` makes no worker the leader of a session or a group; a daemon that a worker forks is.
    """
    strong = STRONG_SIGNS.intersection(signs)
    return strong - {"multiprocessing"} if row.pid in (row.session, row.pgrp) else strong


def find_ties(root: str, holders: Iterable[Watched], *, host_namespace: bool) -> tuple[Ties, ...]:
    """Return what ties the suspects among the holders; ``host_namespace``: we are in the host's."""
    search, holders = _Search(root, host_namespace=host_namespace), tuple(holders)
    pids = {each.row.pid for each in holders}
    suspects = [suspect for each in holders if (suspect := search.suspect(each, pids)) is not None]
    frozen = [each for each in holders if search.is_frozen(each.facts.cgroup or ())]
    if not suspects:
        return tuple(_only_frozen(each) for each in frozen)
    fellows = {each: search.fellows(each) for each in suspects}
    workers = {each.top.pid for each in suspects if each.worker}
    workers.update(pid for found in fellows.values() for pid in found if search.is_worker(pid))
    left = search.family(workers), search.family(workers | {each.top.pid for each in suspects})
    ends: dict[int, list[_End]] = {each.row.pid: [] for each in suspects}
    for pid, end in search.ends(list(ends)):
        ends[pid].append(end)
    connections = _socket_ends(search, suspects)
    names = {end.name for found in ends.values() for end in found}
    peers = {connections[name].peer_name for name in names if name in connections and connections[name].peer}
    pipes = {name for name in names if name.startswith("pipe:")}
    found = _Found(search, suspects, *left, connections, _other_ends(search, pipes | peers))
    ties = {each.row.pid: _ties(found, each, fellows[each], ends[each.row.pid]) for each in suspects}
    for holder in frozen:
        known = ties.get(holder.row.pid)
        ties[holder.row.pid] = _only_frozen(holder) if known is None else known._replace(frozen=True)
    return tuple(ties.values())


def _only_frozen(holder: Watched) -> Ties:
    return Ties(holder.row.pid, holder.row.start, adopted=False, worker=False, frozen=True)


def _socket_ends(search: _Search, suspects: Iterable[_Suspect]) -> dict[str, SocketEnd]:
    ports, found = ports_the_kernel_chooses(search.root), dict[int, SocketEnd]()
    read: set[int | None] = set()
    try:
        found.update(unix_sockets())
    except OSError:
        search.unread += 1
    for each in suspects:
        directory = find_memory_directory(search.root, each.row)
        namespace = _namespace(directory, "net")
        if namespace not in read:
            read.add(namespace)
            try:
                found.update(tcp_sockets(directory, ports) | udp_sockets(directory, ports))
            except OSError:
                search.unread += 1
    return {f"socket:[{inode}]": each for inode, each in found.items()}


def _namespace(directory: str, kind: str) -> int | None:
    try:
        return os.stat(f"{directory}/ns/{kind}").st_ino  # noqa: PTH116 a path of /proc
    except OSError:
        return None


_REACHES_NOBODY = (b"closed", b"TCP", b"UDP", b"NETLINK", b"PACKET", b"ALG")
"""Sockets of these protocols reach no other process if they are in no table."""


def _protocol(path: str) -> bytes:
    """Return the kernel's name for the protocol of a socket, ``closed`` if it is; empty if it is a file now.

    The file may be on a file system of its user that never answers, so it is not asked.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return b"closed"
    except OSError:
        return b""
    ours = f"/proc/self/fd/{descriptor}"
    try:
        is_socket = os.readlink(ours).startswith("socket:[")  # noqa: PTH115 a name alone
        return os.getxattr(ours, "system.sockprotoname") if is_socket else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


class _Others(NamedTuple):
    """Who has the other ends, by name: who reads, and who writes; a socket does both."""

    readers: Mapping[str, set[int]]
    writers: Mapping[str, set[int]]


def _other_ends(search: _Search, wanted: Collection[str]) -> _Others:
    others = _Others(defaultdict(set), defaultdict(set))
    for pid, end in search.ends(search.rows if wanted else (), wanted):
        if end.reads:
            others.readers[end.name].add(pid)
        if end.writes:
            others.writers[end.name].add(pid)
    return others


class _Found(NamedTuple):
    """All that a look has read."""

    search: _Search  # the processes
    suspects: Sequence[_Suspect]  # those that may have lost their launcher
    # those who certainly have lost their launcher, workers that were left behind with them, and all below:
    # that they hold each other's ends says nothing of anybody who wants them
    workers: set[int]
    # they, and the other suspects, with all below. Such a one may run on purpose, and want a worker
    inside: set[int]
    connections: Mapping[str, SocketEnd]  # what the kernel says of sockets, by name
    others: _Others  # who has the other ends


class _FarEnd(NamedTuple):
    """The other end of a pipe or a socket."""

    holders: Collection[int] = ()  # who has it
    alive: bool = False  # somebody has it who was not left behind, or another host
    gone: bool = False  # nobody has it any more
    listens: bool = False  # there is none yet, and anybody may connect
    to_launcher: bool = False  # the launcher said that it leads to it
    unread: bool = False  # who has it is not known


def _far_end(found: _Found, suspect: _Suspect, end: _End, ways: tuple[set[int], set[str]]) -> _FarEnd:
    """Return the other end of an end of a suspect; ``ways`` are those to its launcher."""
    inside = found.workers if suspect.worker else found.inside
    if end.is_pipe:
        far = found.others.writers[end.name] if end.reads else set()
        far = far | found.others.readers[end.name] if end.writes else far
        return _FarEnd(far, bool(far - inside), not far)
    connection = found.connections.get(end.name)
    if connection is None:
        # A Unix socket in a network namespace that is not ours is in no table, nor are other protocols.
        # Nor is TCP that was reset, or that never called anybody: which of them is not known.
        directory = find_memory_directory(found.search.root, suspect.row)
        return _FarEnd(unread=not _protocol(f"{directory}/fd/{end.number}").startswith(_REACHES_NOBODY))
    far = found.others.readers[connection.peer_name] if connection.peer else set()
    ports, numbers = ways
    named = connection.port in ports if connection.port else end.number in numbers
    return _FarEnd(
        far,
        connection.elsewhere or bool(far - inside),
        connection.severed,
        connection.listens,
        named or (suspect.by_socket and not connection.port),
        unread=bool(connection.peer and not connection.severed and not far),
    )


def _ties(found: _Found, suspect: _Suspect, fellows: Collection[int], ends: Iterable[_End]) -> Ties:
    search, row, unread = found.search, suspect.row, found.search.unread_for(suspect.row.pid)
    inside = found.workers if suspect.worker else found.inside
    severed = live = 0
    listening = held = False
    ways = search.ways_to_launcher(row.pid)
    for end in ends:
        far = _far_end(found, suspect, end, ways)
        live += far.alive
        unread += far.unread
        listening = listening or far.listens
        if end.number not in _STANDARD_STREAMS:
            held = held or ((suspect.top == row or suspect.reaped) and suspect.top.ppid in far.holders)
            # That nobody reads its output, or writes its input, says nothing of who ordered it.
            severed += far.gone and (suspect.by_pipe or far.to_launcher)
    same_launcher = {
        each.row.pid
        for each in found.suspects
        if each.worker and suspect.worker and each.top.ppid == suspect.top.ppid and each.row.pid != row.pid
    }
    return Ties(
        pid=row.pid,
        start=row.start,
        # Whose parent has the other end is its child: the parent has moved to another session since then, or
        # is the main program of a container.
        adopted=(suspect.adopted or (suspect.reaped and severed > 0 and not unread)) and not held,
        worker=suspect.worker and bool(fellows or not suspect.may_be_daemon),
        severed=severed,
        live=live,
        listening=listening,
        fellows=len({*fellows, *same_launcher}),
        mates=len(search.mates(row) - inside),
        unread=unread,
    )
