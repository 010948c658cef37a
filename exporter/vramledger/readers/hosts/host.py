"""Read a host's proc file system: boot, PID namespace, and processes on request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from vramledger.errors import StartupError
from vramledger.model.reading import ProcessFacts, ProcessRow
from vramledger.readers.hosts import facts
from vramledger.readers.hosts.own_process import is_wsl
from vramledger.readers.hosts.stat import parse_stat, read_row, read_stat, split_lines

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's fixed inode of the first PID namespace (``PROC_PID_INIT_INO``)."""

LONGEST_VALUE = 4096
"""Bytes of a variable's value that are kept; 64 UUIDs take 2,624."""


TITLE_CAP = 4096
"""Bytes of a process' title that are read; slurmstepd's is ``slurmstepd: [4711.extern]``."""

_CPU_CLOCK = 2
"""CPUCLOCK_SCHED of the kernel: the time for which a process has run."""

CLOCK_STEP = 0.1
"""Seconds of a clock step: two clocks are read milliseconds apart; NTP's slow drift moves boot along."""


class Host:
    """Read processes below one proc file system."""

    def __init__(
        self, procfs: Path, rootfs: Path = Path("/"), *, boot_by_clocks: Callable[[], float] | None = None
    ) -> None:
        """Look at a host.

        ``procfs``: root of the proc file system. ``rootfs``: root of the host's file system, for the names of
        its users. ``boot_by_clocks``: the Unix time of boot by the system's clocks; they count, and not
        ``procfs``, for how far it has moved since. Raises StartupError if there is no proc file system.
        """
        self.root = str(procfs)  # where the proc file system is mounted
        self.ticks = os.sysconf("SC_CLK_TCK")  # clock ticks a second, the unit of start times
        self._boot_by_clocks = boot_by_clocks or _boot_by_clocks
        self._boot_time = _read_boot_time(procfs)
        self._boot_clock = self._boot_by_clocks()
        self.boot_id = _read_boot_id(procfs)  # the id of this boot of the host, empty when not available
        self._users = facts.Users(rootfs)
        self._same_pid_namespace = _is_same_pid_namespace(procfs)

    @property
    def boot_time(self) -> float:
        """The Unix time of boot in seconds; it moves when the clock is set, by hand or by NTP.

        ``/proc/stat`` has this time too, but to read it, the kernel adds up all interrupts first: 19 µs here,
        and milliseconds on a host with hundreds of cores.
        """
        moved = self._boot_by_clocks() - self._boot_clock
        if abs(moved) >= CLOCK_STEP:
            self._boot_time += moved
            self._boot_clock += moved
        return self._boot_time

    def pid_namespace(self) -> bool | None:
        """Tell whether we are in the host's first PID namespace; None when not known.

        Our own namespace counts, and not that of the procfs that we read: in any other namespace NVML lists
        no processes at all. WSL2 is a virtual machine beside Windows, whose programs use the same GPU and are
        not listed to us: its PID namespace is not the host's.
        """
        if is_wsl(Path(self.root)):
            return False
        try:
            return str(Path(self.root, "self/ns/pid").readlink()) == INITIAL_PID_NAMESPACE
        except OSError:
            return None

    def row(self, pid: int) -> ProcessRow | None:
        """Return the row of a process, None when it is gone or hidden. The hot path: see ``stat``."""
        return read_row(self.root, pid)

    def rows(self, pids: Iterable[int]) -> tuple[tuple[ProcessRow, ...], dict[int, str]]:
        """Return the rows of processes, and for each pid without one the reason: ``gone`` or ``denied``."""
        rows: list[ProcessRow] = []
        unseen: dict[int, str] = {}
        for pid in pids:
            try:
                rows.append(parse_stat(pid, read_stat(self.root, pid)))
            except (OSError, ValueError) as error:
                hidden = isinstance(error, PermissionError) or self._exists(pid)
                unseen[pid] = "denied" if hidden else "gone"
        return tuple(rows), unseen

    def cpu_seconds(self, pid: int) -> float | None:
        """Return the CPU time of a process, to 10 microseconds; None where it is not known.

        The kernel gives it to every user, in 1 µs. ``/proc/PID/stat`` has ticks of 10 ms, and a small piece
        of work takes 0.4. The kernel knows the pids of our own namespace only.
        """
        if not self._same_pid_namespace:
            return None
        try:
            # As clock_getcpuclockid(3) makes it; Python does not have that call.
            return round(time.clock_gettime_ns((~pid << 3) | _CPU_CLOCK) / 1e9, 5)
        except OSError:
            return None

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self.root) if name.isdigit()]  # noqa: PTH208 3 x faster

    def facts(self, row: ProcessRow) -> ProcessFacts | None:
        """Return everything about a process, None when it is gone. It may hang."""
        return facts.read_full_facts(self.root, row, self._users)

    def basic_facts(self, row: ProcessRow) -> ProcessFacts | None:
        """Return facts that cannot hang, without the process' memory; a user never looked up is a number."""
        known = facts.read_basic_facts(self.root, row, self._users.cached_name)
        return known and replace(known, denied=(*known.denied, "cmdline", "environ", "maps"))

    def variables(self, pid: int, names: frozenset[str]) -> dict[str, str] | None:
        """Return a process' named variables alone; None if unreadable. It may hang."""
        denied: list[str] = []
        data = facts.read_environment(f"{self.root}/{pid}", denied)
        if len(data) >= facts.ENVIRON_CAP:
            return None
        pairs = (each.partition(b"=") for each in data.split(b"\0"))
        found = {name.decode(errors="replace"): value for name, _, value in pairs}
        return (
            None
            if denied
            else {
                name: found[name][:LONGEST_VALUE].decode(errors="replace") for name in names if name in found
            }
        )

    def started_at(self, start: int) -> float:
        return self.boot_time + start / self.ticks

    def program_path(self, pid: int) -> str | None:
        """Return the path of the file that a process runs; None when it has none or we may not read it."""
        return facts.read_program_path(f"{self.root}/{pid}")

    def has_device_file(self) -> bool:
        """Tell whether we ourselves have a GPU's device file open, as every user of the driver has."""
        return facts.has_gpu_file("/proc/self") is True

    def cgroup(self, pid: int) -> tuple[str, ...] | None:
        """Return a process' cgroup now, None when it is gone or hidden."""
        denied: list[str] = []
        data = facts.read_file(f"{self.root}/{pid}/cgroup", facts.FILE_CAP, denied)
        return split_lines(data) or None

    def comm(self, pid: int) -> str | None:
        """Return the kernel's name of a process now, None when it is gone or hidden."""
        data = facts.read_file(f"{self.root}/{pid}/comm", facts.FILE_CAP, [])
        return data.decode(errors="replace").rstrip("\n") if data else None

    def uid(self, pid: int) -> int | None:
        """Return the number of the user as whom a process acts now, None when it is gone or hidden."""
        numbers = self._status(pid, b"Uid")
        return int(numbers[1]) if len(numbers) > 1 else None

    def is_roots(self, pid: int) -> bool:
        """Tell whether root is every user of a process: real, effective, saved and for files.

        Not that of a PID namespace below ours: a container's root chooses names as a user does.
        """
        same = len(self._status(pid, b"NSpid")) <= len(self._status("self", b"NSpid"))
        return same and set(self._status(pid, b"Uid")) == {b"0"}

    def _status(self, pid: int | str, name: bytes) -> list[bytes]:
        data = facts.read_file(f"{self.root}/{pid}/status", facts.FILE_CAP, [])
        return facts.status_fields(data).get(name, b"").split()

    def title(self, pid: int) -> bytes:
        """Return a process' own title; empty if gone, hidden or a zombie. It may hang."""
        return facts.read_file(f"{self.root}/{pid}/cmdline", TITLE_CAP, [])

    def _exists(self, pid: int) -> bool:
        """Tell whether a process without a row exists: a proc mounted with hidepid shows no entry.

        A signal can only test pids of our own namespace. A container may read the host's procfs without being
        in the host's PID namespace (``/host/proc`` without hostPID). There the number would mean another
        process or none, and only an entry counts.
        """
        if pid <= 0:
            return False
        if not self._same_pid_namespace:
            return os.path.lexists(f"{self.root}/{pid}")
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except OSError:
            return False
        return True


def _is_same_pid_namespace(procfs: Path) -> bool:
    """Tell whether a procfs numbers processes as we do: then ``NSpid`` of ourselves is one number."""
    status = facts.status_fields(facts.read_file(f"{procfs}/self/status", facts.FILE_CAP, []))
    return status.get(b"NSpid", b"") == b"%d" % os.getpid()


def _read_boot_time(procfs: Path) -> float:
    try:
        for line in (procfs / "stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    except (OSError, ValueError):
        pass
    raise StartupError(f"there is no proc file system at {procfs}; mount it or set --path.procfs")


def _boot_by_clocks() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _read_boot_id(procfs: Path) -> str:
    try:
        return (procfs / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
