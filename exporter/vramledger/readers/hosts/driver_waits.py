"""Find threads of holders that sleep in the NVIDIA driver and cannot be interrupted, at a bounded cost.

Such a thread has state ``D``. Not even SIGKILL ends it: only the driver can wake it. ``wchan`` names the
kernel function in which it sleeps, if we may look into the process, and ``kallsyms`` says to which kernel
module this function belongs. A state ``D`` in a file system or in ``vfork`` says nothing about a GPU. A
thread whose function we may not read is not reported. Each search looks at some threads, so its cost does not
grow with their number: one ``stat`` takes 7.7 µs. A thread whose count of switches is the same at two looks
has not run in between. So one look proves nothing, however long ago it was, and many threads only make the
proof come later.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from vramledger.model.reading import DriverWait, ProcessRow
from vramledger.readers.collector import BoundedReader, Collector, Context, Part
from vramledger.readers.hosts.stat import (
    READ_ONLY,
    count_switches,
    names_in,
    parse_stat,
    read_small,
    read_stat,
)

ROUND_INTERVAL = 10.0
BUDGET = 0.0005
"""Seconds of a sample for the search, about 60 threads; 2,500 threads take 40 s a round."""

_Sleep = tuple[int, int, int, str, int]
"""Process, its start, thread, function and count of switches: the same one while the thread does not run."""

_THREADS_AT_ONCE = 8
_CHUNK = 1024 * 1024
_SYMBOL = re.compile(rb"\w{1,256}(?:\.\w{1,64})*", re.ASCII)
_DRIVER_MODULES = rb"\[nvidia(?:_\w+)?\]"
"""nvidia, nvidia_uvm, nvidia_modeset, nvidia_drm, nvidia_peermem, nvidia_fs."""


class DriverWaitSearch(Collector):
    """Search the threads of the holders in rounds, one step in each sample."""

    def __init__(
        self,
        procfs: str,
        *,
        symbols: str = "",
        round_interval: float = ROUND_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing found; ``symbols`` replaces the ``kallsyms`` of ``procfs`` unless empty."""
        self._root = procfs
        self._symbol_file = symbols or f"{procfs}/kallsyms"
        self._round_interval = round_interval
        self._clock = clock
        self._round: Iterator[_Sleep | None] | None = None
        self._next_round = self.work_at = clock()
        self._finding: list[DriverWait] = []
        self._first_looks: dict[_Sleep, float] = {}
        self._sleeping: dict[_Sleep, float] = {}
        self._found: tuple[DriverWait, ...] = ()
        self._in_driver: dict[str, bool] = {}
        self._symbols: BoundedReader[tuple[str, bool]] = BoundedReader(clock=clock)

    def read(self, context: Context) -> Part:  # noqa: ARG002 as all are called
        return {"waits": self.result}

    def errors(self) -> Iterator[Exception]:
        """Yield what reading the kernel's list of symbols has raised; it is read again when it is needed."""
        yield from self._symbols.take_errors().values()

    def work_between(self, context: Context) -> None:
        try:
            self.search(context.rows)
        except Exception:
            self._round, self._found, self._next_round = None, (), self._clock()
            raise
        finally:
            self.work_at = self._next_round if self._round is None else 0.0

    @property
    def result(self) -> tuple[DriverWait, ...]:
        return self._found

    def search(self, rows: Iterable[ProcessRow], budget_seconds: float = BUDGET) -> None:
        """Continue the search for at most about ``budget_seconds``; ``rows`` are the holders now."""
        begun = self._clock()
        self._in_driver.update(self._symbols.collect(0.0))
        if self._round is None:
            if begun < self._next_round:
                return
            self._next_round = begun + self._round_interval
            self._finding, self._first_looks, self._sleeping = [], self._sleeping, {}
            self._round = self._search_round(tuple(rows))
        for sleep in self._round:
            now = self._clock()
            if sleep is not None:
                self._record(sleep, now)
            if now - begun >= budget_seconds:
                return
        self._round = None
        self._found = tuple(self._finding)

    def _record(self, sleep: _Sleep, now: float) -> None:
        first = self._sleeping[sleep] = self._first_looks.get(sleep, now)
        pid, start, thread, channel, _ = sleep
        if self._is_in_driver(channel):
            self._finding.append(DriverWait(pid, start, thread, channel, now - first))

    def _search_round(self, rows: tuple[ProcessRow, ...]) -> Iterator[_Sleep | None]:
        """Yield the threads that sleep without interruption; yield None after each other piece of work."""
        for row in rows:
            with suppress(OSError):  # it has ended
                for count, thread in enumerate(names_in(f"{self._root}/{row.pid}/task"), start=1):
                    if (sleep := self._read_sleep(row, thread)) is not None:
                        yield sleep
                    elif count % _THREADS_AT_ONCE == 0:
                        yield None
            yield None

    def _read_sleep(self, row: ProcessRow, thread: str) -> _Sleep | None:
        """Return a thread's sleep if it has state ``D`` and we may know where it sleeps.

        The count of context switches is read before and after: if it is the same, the thread has not run.
        """
        directory = f"{self._root}/{row.pid}/task/{thread}"
        try:
            if parse_stat(int(thread), read_small(f"{directory}/stat")).state != "D":
                return None
            switches = count_switches(read_small(f"{directory}/status"))
            channel = read_small(f"{directory}/wchan").strip()
            if switches != count_switches(read_small(f"{directory}/status")):
                return None
            leader = parse_stat(row.pid, read_stat(self._root, row.pid))
        except (OSError, ValueError):
            return None  # it has ended, or we may not look into it
        if leader.start != row.start or channel == b"0" or not _SYMBOL.fullmatch(channel):
            return None
        return row.pid, row.start, int(thread), channel.decode(), switches

    def _is_in_driver(self, symbol: str) -> bool:
        """Tell whether a kernel function is the driver's; False while the list of symbols is still read."""
        known = self._in_driver.get(symbol)
        if known is None:
            path = self._symbol_file
            self._symbols.submit(
                symbol, lambda: (symbol, _is_driver_symbol(path, symbol)), lambda: (symbol, False)
            )
        return known is True


def _is_driver_symbol(path: str, symbol: str) -> bool:
    """Search the kernel's list of symbols, some 200,000 lines, for a function of an NVIDIA module."""
    wanted = re.compile(rb" " + re.escape(symbol.encode()) + rb"\t" + _DRIVER_MODULES + rb"\n")
    tail = b""
    try:
        descriptor = os.open(path, READ_ONLY)
        try:
            while chunk := os.read(descriptor, _CHUNK):
                if wanted.search(tail + chunk):
                    return True
                tail = chunk[-512:]
        finally:
            os.close(descriptor)
    except OSError:
        pass  # hidden by the container's runtime: then no function is known to be the driver's
    return False
