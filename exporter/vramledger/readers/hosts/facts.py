"""Read once for a process: its user, its program, its parent, and its worker evidence.

``cmdline``, ``environ`` and ``maps`` need the process' memory, whose lock a process that is stuck in the
driver may hold for ever; ``status``, ``stat`` and ``cgroup`` do not. So there are two readers:
:func:`read_basic_facts` reads only the files that do not need this lock, :func:`read_full_facts` reads all of
them. From another user's environment we keep only the values that
:data:`SETTINGS` names, and its rank in a distributed job. Nobody attests
such a rank: who joins ranks of one job also compares what the kernel attests (the user, the namespace).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from msgspec.structs import replace

from vramledger.model.reading import Owner, ParentFacts, ProcessFacts, ProcessRow, Rank
from vramledger.readers.hosts.program_names import (
    REPLACEMENT,
    clean,
    find_kernel_name,
    find_notebook,
    program_name,
    worker_evidence,
)
from vramledger.readers.hosts.stat import (
    READ_ONLY,
    names_in,
    parse_comm,
    parse_stat,
    read_row,
    read_stat,
    split_lines,
)
from vramledger.readers.owners.cgroups import is_in_service
from vramledger_agent.printable import printable
from vramledger_agent.protocol import distributed_ranks
from vramledger_agent.protocol.distributed_ranks import LONGEST_VALUE, add_node
from vramledger_agent.protocol.frameworks import FRAMEWORKS
from vramledger_agent.protocol.messages import ENABLE_VARIABLE

MAPS_CAP = 8 * 1024 * 1024
"""A mapping takes about 120 bytes, and the kernel allows a process 65,530 of them by default."""

LONGEST_SETTING = 256

_LIBRARIES = [library for framework in FRAMEWORKS for library in framework.libraries]
LIBRARIES = tuple(library.name for library in _LIBRARIES)
"""Every value that ``ProcessFacts.libraries`` may hold."""

_LIBRARY_BY_STEM = {stem.encode(): library.name for library in _LIBRARIES for stem in library.stems}
_LIBRARY_BY_PROGRAM = {
    program.encode(): library.name for library in _LIBRARIES for program in library.programs
}
_PACKAGES = [library for library in _LIBRARIES if library.path]
_PACKAGE_MODULE = re.compile(
    "/(?:{})[^\\n]*\\.so$".format("|".join(f"({package.path})" for package in _PACKAGES)).encode()
)

SETTINGS = (
    *dict.fromkeys(setting.variable for framework in FRAMEWORKS for setting in framework.settings),
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "CUDA_MPS_CLIENT_PRIORITY",
    ENABLE_VARIABLE,  # whether it was started with our agent
)
"""Variables that control GPU memory or our agent, in full: a prefix would accept unknown ones."""


def find_libraries(maps: bytes) -> tuple[str, ...]:
    """Return the libraries of frameworks that are in a ``maps``, in the order of :data:`LIBRARIES`."""
    # No text before the path has a slash, and a library is mapped in about five pieces.
    paths = {line.partition(b"/")[2] for line in maps.split(b"\n")}
    found: set[str] = set()
    for path in paths:
        file = b"/" + path.removesuffix(b" (deleted)")  # upgraded while the program runs
        name = file.rpartition(b"/")[2]
        stem, dot, _ = name.partition(b".so")
        library = _LIBRARY_BY_STEM.get(stem) if dot else _LIBRARY_BY_PROGRAM.get(name)
        if library is not None:
            found.add(library)
        elif dot and (match := _PACKAGE_MODULE.search(file)):
            found.add(_PACKAGES[(match.lastindex or 1) - 1].name)
    return tuple(library for library in LIBRARIES if library in found)


def find_settings(environment: bytes) -> tuple[tuple[str, str], ...]:
    """Return the allow-listed variables of an environment; the caller puts a zero byte in front of it.

    The first of several with one name counts, as for ``getenv``. Values are cut and made printable.
    """
    found = ((name, find_variable(environment, name, LONGEST_SETTING)) for name in SETTINGS)
    return tuple((name, value) for name, value in found if value is not None)


def find_variable(environment: bytes, name: str, longest: int) -> str | None:
    """Return a variable, cut and printable, of an environment with a zero byte in front of it, or None."""
    mark = b"\0" + name.encode() + b"="
    begin = environment.find(mark)
    if begin < 0:
        return None
    begin += len(mark)
    # Cut before searching for the end, and at four bytes a character at most.
    value = environment[begin : begin + 4 * longest].partition(b"\0")[0]
    return printable(value.decode(errors="replace"), REPLACEMENT)[:longest]


def names_framework(libraries: tuple[str, ...] | None) -> bool:
    """Say whether the libraries name a framework, or whether more may be loaded yet."""
    return libraries is not None and any(library != "libcuda" for library in libraries)


FILE_CAP = 64 * 1024
ENVIRON_CAP = 1024 * 1024
"""Large: a launcher adds its variables at the end, and a cluster's service variables come first."""

WORKER_VARIABLES = (
    b"LOCAL_RANK",  # torchrun, deepspeed, accelerate
    b"TORCHELASTIC_RUN_ID",
    b"OMPI_COMM_WORLD_RANK",  # Open MPI
    b"PMI_RANK",  # MPICH, Intel MPI
    b"PMIX_RANK",
    b"RAY_RAYLET_PID",  # a raylet sets it for its workers and agents
)
"""Variables that show a worker; not SLURM_PROCID, as slurmstepd is like a service manager."""

_KERNEL_PARENT = b"JPY_PARENT_PID"
"""Jupyter sets this variable for its kernels; their children inherit it, not the connection file."""

_ANCESTORS_MAX = 8
"""How many ancestors are asked for a notebook: a worker may be below a script, a launcher and a shell."""

_SERVICE_MARK = b"\0SYSTEMD_EXEC_PID="
"""systemd 248 and later sets this variable to the pid of the service's main process."""

_SIGNALS = (("HUP", 1), ("INT", 2), ("QUIT", 3))
_PASSWD_LINE = re.compile(rb"^([^:\n]+):[^:\n]*:(\d+):", re.MULTILINE)
_ATTEMPTS = 3

_GPU_FILES = ("/dev/nvidia", "/dev/nvhost", "/dev/nvmap", "/dev/dri/", "/dev/dxg", "/dev/vfio/")
"""The beginnings of the device files of GPUs: discrete, Tegra, graphics, WSL2, given to a virtual machine."""

_GPU_MAPPING = re.compile(
    rb"/dev/(?:nvidia|nvhost|nvmap|dri/|dxg)|/libcuda\.so|/libnvidia-|/lib(?:GLX|EGL|GLESv\w+)_nvidia"
)
_LINKS_MAX = 65536

_ASSIGNMENT = re.compile(rb"(?:\A|\0)[A-Za-z_][^\0= ]*=")

_SIGNAL_MASK = re.compile(rb"[0-9a-f]{1,16}")


class Users:
    """Remember names of users; a query to the name service may take any time."""

    def __init__(self, rootfs: Path = Path("/")) -> None:
        """Read the users' names from the list below ``rootfs``, if that is the host's file system."""
        self._names: dict[int, str] = {}
        self._foreign = rootfs != Path("/")
        if self._foreign:
            try:
                listed = _PASSWD_LINE.findall((rootfs / "etc/passwd").read_bytes())
            except OSError:
                listed = []
            self._names = {int(uid): name.decode(errors="replace") for name, uid in reversed(listed)}

    def name(self, uid: int) -> str:
        """Return the name of a user, the number as text when it has none."""
        name = self._names.get(uid)
        if name is None and not self._foreign:
            with contextlib.suppress(KeyError):
                name = self._names[uid] = pwd.getpwuid(uid).pw_name
        return str(uid) if name is None else name

    def cached_name(self, uid: int) -> str:
        """Return the name of a user if it was looked up before, otherwise the number as text; never waits."""
        return self._names.get(uid, str(uid))


def read_basic_facts(root: str, row: ProcessRow, user_name: Callable[[int], str]) -> ProcessFacts | None:
    """Read what can be read without the process' memory; None when it is gone.

    A name service that is down makes :meth:`Users.name` wait; with :meth:`Users.cached_name` nothing waits.
    The parent may end between two of our reads, so the row is read again at the end. Facts about another
    process with the same pid are dropped, and a new parent is read again.
    """
    for _ in range(_ATTEMPTS):
        facts = _read_basic(root, row, user_name)
        again = read_row(root, row.pid)
        if again is None or again.start != row.start:
            return None
        if again.ppid == row.ppid:
            return facts
        row = again
    return facts


def read_full_facts(root: str, row: ProcessRow, users: Users) -> ProcessFacts | None:
    """Read everything, with what needs the process' memory; None when it is gone. It may hang."""
    facts = read_basic_facts(root, row, users.name)
    if facts is None:
        return None
    denied = list(facts.denied)
    directory = find_memory_directory(root, row)
    argv = split_arguments(read_file(f"{directory}/cmdline", FILE_CAP, denied))
    environment = b"\0" + read_environment(directory, denied)
    signs = worker_variables(environment)
    service_main = _is_service_main(environment, {facts.pid, *facts.nspid})
    may_be_service_main = _SERVICE_MARK not in environment and _may_lead_service(row, facts)
    settings = find_settings(environment)
    rank = find_rank(environment, os.uname().nodename)
    path = find_notebook(argv, environment) or _find_notebook_above(root, row, facts.uid)
    served = b"\0" + _KERNEL_PARENT + b"=" in environment
    del environment
    before = len(denied)
    maps = read_file(f"{directory}/maps", MAPS_CAP, denied)
    libraries = find_libraries(maps) if len(denied) == before else None
    uses_gpu = bool(libraries) or _uses_gpu(directory, maps)
    del maps
    parent = facts.parent
    if parent is not None:
        words = split_arguments(read_file(f"{root}/{parent.pid}/cmdline", FILE_CAP, []))
        refused: list[str] = []
        its_environment = b"\0" + read_environment(f"{root}/{parent.pid}", refused)
        # A sign that the parent has in the part that was not read would seem to be the child's own.
        whole = not refused and 1 < len(its_environment) <= ENVIRON_CAP
        parent = parent._replace(
            command=program_name(words, parent.comm),
            signs=worker_variables(its_environment) if whole else None,
        )
    again = read_row(root, row.pid)
    if again is None or again.start != row.start:
        return None
    return replace(
        facts,
        command=program_name(argv, facts.comm),
        signs=signs + worker_evidence(argv) + _kernel_evidence(argv, served=served),
        service_main=service_main,
        may_be_service_main=may_be_service_main,
        libraries=libraries,
        uses_gpu=uses_gpu,
        settings=settings,
        owner=Owner("user", facts.user, notebook=path) if path and facts.user else None,
        parent=parent,
        denied=tuple(denied),
        rank=rank,
    )


def _uses_gpu(directory: str, maps: bytes) -> bool | None:
    """Tell whether a process maps the driver's libraries or has a GPU's device file open; None if not known.

    A CUDA program does both from its first context on, and so does a client of MPS. A process that is exiting
    has no mappings any more, so nothing is known of it.
    """
    if _GPU_MAPPING.search(maps):
        return True
    if not maps or len(maps) >= MAPS_CAP:
        return None
    return has_gpu_file(directory)


def has_gpu_file(directory: str) -> bool | None:
    """Tell whether a process, by its directory in /proc, has a GPU's device file open; None if not known."""
    try:
        for count, number in enumerate(names_in(f"{directory}/fd")):
            if count == _LINKS_MAX:
                return None
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"{directory}/fd/{number}").startswith(_GPU_FILES):  # noqa: PTH115 as above
                    return True
    except OSError:
        return None
    return False


def worker_variables(environment: bytes) -> tuple[str, ...]:
    return tuple(name.decode() for name in WORKER_VARIABLES if b"\0" + name + b"=" in environment)


def _kernel_evidence(argv: list[str], *, served: bool) -> tuple[str, ...]:
    """Return the sign of a kernel that a Jupyter server has started: a connection file ``kernel-ID.json``."""
    return ("jupyter",) if served and find_kernel_name(argv).startswith("kernel-") else ()


def _find_notebook_above(root: str, row: ProcessRow, uid: int | None) -> str:
    """Return the notebook of the nearest ancestor that has one; empty if none has.

    A kernel of VS Code has its name in its arguments alone, so what it starts does not inherit it. Another
    user's process is not asked, nor what is above it: a user must not name the notebook of another one.
    """
    for _ in range(_ANCESTORS_MAX):
        above = read_row(root, row.ppid) if row.ppid else None
        if above is None or above.start > row.start or uid is None:
            return ""
        directory = f"{root}/{above.pid}"
        status = status_fields(read_file(f"{directory}/status", FILE_CAP, []))
        if next(iter(_parse_numbers(status.get(b"Uid", b""))), None) != uid:
            return ""
        argv = split_arguments(read_file(f"{directory}/cmdline", FILE_CAP, []))
        environment = b"\0" + read_environment(directory, [])
        if notebook := find_notebook(argv, environment):
            return notebook
        row = above
    return ""


def split_arguments(data: bytes) -> list[str]:
    """Split a ``cmdline``; a program that rewrites its title leaves empty words after it."""
    data = data.rstrip(b"\0")
    return [word.decode(errors="replace") for word in data.split(b"\0")] if data else []


def status_fields(data: bytes) -> dict[bytes, bytes]:
    return {name: value.strip() for name, _, value in (line.partition(b":") for line in data.split(b"\n"))}


def read_file(path: str, cap: int, denied: list[str]) -> bytes:
    """Read up to ``cap`` bytes of a process' file; if it is gone empty, if not ours also in ``denied``."""
    data = bytearray()
    try:
        descriptor = os.open(path, READ_ONLY)
        try:
            while len(data) < cap and (chunk := os.read(descriptor, min(cap - len(data), 65536))):
                data += chunk
        finally:
            os.close(descriptor)
    except PermissionError:
        denied.append(path.rpartition("/")[2])
        return b""
    except OSError:
        pass  # the process ended while we read; what was read before belongs to it
    return bytes(data)


def read_environment(directory: str, denied: list[str]) -> bytes:
    """Return the environment with which a program was started; empty, and in ``denied``, if it is not known.

    A program that sets its title (setproctitle) writes it over arguments and environment, and fills the rest
    with zeros. An environment that is really empty has no bytes at all.
    """
    data = read_file(f"{directory}/environ", ENVIRON_CAP, denied)
    if data and (data.endswith(b"\0\0") or _ASSIGNMENT.search(data) is None):
        denied.append("environ")
        return b""
    return data


def _read_basic(root: str, row: ProcessRow, user_name: Callable[[int], str]) -> ProcessFacts:
    denied: list[str] = []
    directory = f"{root}/{row.pid}"
    status = status_fields(read_file(f"{directory}/status", FILE_CAP, denied))
    uid = next(iter(_parse_numbers(status.get(b"Uid", b""))), None)
    mask = status.get(b"SigIgn", b"")
    ignored = int(mask, 16) if _SIGNAL_MASK.fullmatch(mask) else 0
    nspid = _parse_numbers(status.get(b"NSpid", b""))
    before = len(denied)
    cgroup = read_file(f"{directory}/cgroup", FILE_CAP, denied)
    try:
        comm = _decode_comm(parse_comm(read_stat(root, row.pid)))
    except (OSError, ValueError):
        comm = ""
    return ProcessFacts(
        pid=row.pid,
        start=row.start,
        uid=uid,
        user=None if uid is None else user_name(uid),
        comm=comm,
        command=comm,
        nspid=nspid,
        ignores=tuple(name for name, number in _SIGNALS if ignored >> (number - 1) & 1),
        cgroup=_split_cgroup(cgroup) if len(denied) == before else None,
        parent=_read_parent(root, row, len(nspid), user_name),
        leader_alive=_is_leader_alive(root, row),
        denied=tuple(denied),
    )


_split_cgroup = lru_cache(maxsize=256)(split_lines)
"""Split a ``cgroup`` file; the many processes of a container share one result."""


def _read_parent(
    root: str, row: ProcessRow, depth: int, user_name: Callable[[int], str]
) -> ParentFacts | None:
    """Return the parent, None if outside or gone; ``depth``: PID namespaces of the child, 0 if unknown."""
    if row.ppid == 0:
        return None
    try:
        data = read_stat(root, row.ppid)
        parent = parse_stat(row.ppid, data)
        comm = _decode_comm(parse_comm(data))
    except (OSError, ValueError):
        return None
    if parent.start > row.start:
        return None  # a parent is older than its child; this is another process with its pid
    status = status_fields(read_file(f"{root}/{row.ppid}/status", FILE_CAP, []))
    numbers = _parse_numbers(status.get(b"NSpid", b"")) or (row.ppid,)
    uid = next(iter(_parse_numbers(status.get(b"Uid", b""))), None)
    path = read_program_path(f"{root}/{row.ppid}") or ""
    return ParentFacts(
        row.ppid, parent.start, comm, comm, init=numbers[-1] == 1, outside=len(numbers) < depth, uid=uid,
        user=None if uid is None else user_name(uid),
        program=clean(path.removesuffix(" (deleted)").rpartition("/")[2]),
    )  # fmt: skip


def read_program_path(directory: str) -> str | None:
    """Return the path of the file that a process runs, given its directory in the proc file system.

    None for a zombie, a kernel thread, or a process that we may not read. It needs no lock of the process'
    memory. A process chooses its command line and ``comm`` itself; this path comes from the kernel.
    """
    try:
        return os.readlink(f"{directory}/exe")  # noqa: PTH115 a name alone, which may not exist here
    except OSError:
        return None


def _is_leader_alive(root: str, row: ProcessRow) -> bool | None:
    """Tell whether the group's leader lives: its pid goes to nobody else while the group exists."""
    if row.pgrp == row.pid:
        return True
    if row.pgrp == 0:
        return None  # the group's leader is outside our PID namespace
    try:
        return parse_stat(row.pgrp, read_stat(root, row.pgrp)).state not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return None


def find_memory_directory(root: str, row: ProcessRow) -> str:
    """Return the directory that shows a process' memory: a zombie leader's is with its other threads."""
    return _living_thread_path(root, row) if row.state == "Z" else f"{root}/{row.pid}"


def _living_thread_path(root: str, row: ProcessRow) -> str:
    directory = f"{root}/{row.pid}"
    try:
        with os.scandir(f"{directory}/task") as entries:
            return next((entry.path for entry in entries if entry.name != str(row.pid)), directory)
    except OSError:
        return directory


def _is_service_main(environment: bytes, pids: set[int]) -> bool:
    """Tell whether systemd started this very process; children inherit the variable, but not the pid."""
    value = environment.partition(_SERVICE_MARK)[2].partition(b"\0")[0]
    return value.isdigit() and int(value) in pids


def _may_lead_service(row: ProcessRow, facts: ProcessFacts) -> bool:
    """Tell whether systemd may have started it: it leads a session in a service that runs only itself."""
    return row.session == row.pid and (facts.cgroup is None or is_in_service(facts.cgroup))


def _parse_numbers(text: bytes) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split() if word.isdigit())


def _decode_comm(comm: bytes) -> str:
    return clean(comm.decode(errors="replace"))


def find_rank(environment: bytes, node: str) -> Rank | None:
    """Return the rank that an environment names; None where it names none, or a job of a single rank.

    ``node``: the name of this host, which tells a rendezvous on localhost from that of another host.
    """
    found = distributed_ranks.find_rank(lambda name: find_variable(environment, name, LONGEST_VALUE) or "")
    return None if found is None else Rank(*found[:2], add_node(found[2], node))
