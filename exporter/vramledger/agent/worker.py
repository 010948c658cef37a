"""The agent's thread: it exists while there is something to report, and never across a fork.

The thread is a bare one and its signals are bare locks: ``threading`` would show it to the program, and has
locks of its own that a program may hold when the collector or a fork calls us. It waits, reads, sends, and
imports nothing; what it needs is imported by the program's thread that starts it.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import os
import sys
import time

from vramledger.agent import step_boundary
from vramledger.agent.frameworks.provider import SLOW, Provider
from vramledger.agent.gc_monitor import GCMonitor
from vramledger.agent.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vramledger.agent.requests import RequestHandler
    from vramledger.agent.transport import AgentTransport

POLL = 2.0
"""Seconds between two looks at a framework that does not tell us when it has an allocator."""

SOON = 0.005
"""Seconds between two looks at one that told us it is about to."""

SOON_LOOKS = 100
"""So many of these; then it is a slow start, looked at less often."""

LATER = 0.2
LAST_LOOK = 400
"""After so many its start has failed."""

TRIES = 3
"""Times running that a provider may be slow or fail before it is left alone for a while."""

REST = 60.0
"""Seconds for which it is left alone."""

STALL = 0.05
"""Seconds that a reading may take by the clock; :data:`SLOW` is for what it takes of the processor."""

STOP_WAIT = 0.1
"""Seconds that a fork or an exit waits for the thread to end: it may be waiting for the program's lock."""

WARNS_AT_FORK = sys.version_info[:2] >= (3, 13)
"""Python warns of a fork with threads, and counts those too that a hook starts after it (3.13.0)."""

LAST_WAIT = 0.05
"""Seconds that the last report of a process may wait for one that is being sent."""

OOM_WAIT = 0.5
"""Seconds that one may wait for that which is about a failure that nobody has been told of."""


class ProviderState:
    """A provider, and how it fares."""

    __slots__ = ("bad", "begun", "hooked", "looks", "provider", "ready", "rest")

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self.hooked = False
        self.ready = False
        self.begun = False
        self.bad = 0
        self.rest = 0.0
        self.looks = 0


class WorkerRun:
    """One run of the thread: how it is told to stop, and how it tells that it did."""

    __slots__ = ("done", "native", "stop")

    def __init__(self) -> None:
        self.stop = _thread.allocate_lock()
        self.stop.acquire()
        self.done = _thread.allocate_lock()
        self.done.acquire()
        self.native = 0


class Worker:
    """What the agent does in this process: at most one thread, one connection, one report at a time."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.sources: dict[str, ProviderState] = {}
        self.errors: dict[str, int] = {}
        self.gc_monitor = GCMonitor(self.nudge)
        self.errand: WorkerRun | None = None
        self.suspended = False
        self.alone = False
        self.stopped = False
        self.registered = False
        self.sequence = 0
        self.connection: AgentTransport | None = None
        self.desk: RequestHandler | None = None
        self.visible: dict[str, str | None] = {}
        self.last_oom: dict[str, object] | None = None
        self.told_oom: dict[str, object] | None = None
        self.sending = _thread.allocate_lock()

    # Beginning

    def add_framework(self, module: str) -> None:
        """Take a framework on that the program has just imported, given the module of its provider."""
        name = module.rpartition(".")[2]
        if name in self.sources:
            return
        self.stopped = False
        __import__(module)
        source = self.sources[name] = ProviderState(sys.modules[module].provider())
        try:
            source.hooked = source.provider.hook(lambda: self.ready(source))
        except Exception:
            self.count(source)
        if not source.hooked:
            self.start()

    def ready(self, source: ProviderState) -> None:
        """Hear from a framework that it is about to have an allocator; never raises."""
        try:
            source.ready = True
            self.start()
        except Exception:
            self.count(source)

    def start(self) -> None:
        """Start the thread unless it runs; what it will need is imported here."""
        if self.errand is not None or self.stopped:
            return
        self.prepare()
        self.suspended = False
        errand = self.errand = WorkerRun()
        try:
            _thread.start_new_thread(self.run, (errand,))
        except RuntimeError:  # no thread can be had, or the interpreter is about to end
            self.errand = None

    def prepare(self) -> None:
        """Import what the thread uses, and be told of forks, collections and the exit."""
        from vramledger.agent import message as report  # noqa: F401 not before it is needed
        from vramledger.agent import requests, transport

        if self.connection is None:
            self.connection = transport.AgentTransport(self.settings.socket_path)
        if self.desk is None:
            self.desk = requests.RequestHandler(requests.load_handlers(self.settings.consents))
        self.gc_monitor.start()
        if not self.registered:
            self.registered = True
            os.register_at_fork(
                before=self.before_fork,
                after_in_parent=self.after_fork_in_parent,
                after_in_child=self.after_fork_in_child,
            )
            atexit.register(self.leave)

    # The thread

    def run(self, errand: WorkerRun) -> None:
        """Report until told to stop."""
        errand.native = _thread.get_native_id()
        due = 0.0
        try:
            while not errand.stop.acquire(timeout=due):
                due = self.settings.interval
                try:
                    due = self.turn(time.monotonic())
                except Exception:
                    self.errors["agent"] = self.errors.get("agent", 0) + 1
                if due < 0:
                    break
        finally:
            if self.errand is errand:
                self.errand = None
            errand.done.release()

    def turn(self, now: float) -> float:
        """Do what is due, and return the seconds until the next turn, less than 0 for none."""
        wait = self.begin()
        begun = [source for source in self.known() if source.begun]
        if not begun or self.connection is None:
            return wait
        self.refresh()
        with self.sending:
            if self.connection.open(now):
                self.send()
                self.answer()
        return self.settings.interval if wait < 0 else min(wait, self.settings.interval)

    def refresh(self) -> None:
        """Let the frameworks' providers look at what they watch."""
        for source in self.known():
            if source.begun:
                try:
                    source.provider.observe()
                except Exception:
                    self.count(source)

    def known(self) -> list[ProviderState]:
        """Return the frameworks that are there, whatever the program imports at this moment."""
        return list(self.sources.values())

    def begin(self) -> float:
        """Begin with the frameworks that have an allocator by now, and return when to look again."""
        wait = -1.0
        for source in self.known():
            if source.begun or (source.hooked and not source.ready):
                continue
            try:
                if source.provider.initialised():
                    self.look_around()
                    source.begun = True
                    source.provider.begin()
                    continue
            except Exception:
                self.count(source)
            source.looks += 1
            pause = POLL
            if source.hooked:
                pause = SOON if source.looks < SOON_LOOKS else LATER
                if source.looks == LAST_LOOK:  # it failed, and tells us when it tries again
                    source.ready = False
                    source.looks = 0
                    continue
            wait = pause if wait < 0 else min(wait, pause)
        return wait

    def look_around(self) -> None:
        """Keep what the program sees of the devices, as it is when the first framework begins."""
        if not self.visible:
            for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                self.visible[name] = os.environ.get(name)

    def entries(self) -> list[dict[str, object]]:
        """Return what every framework says about itself now."""
        found = []
        for source in self.known():
            if source.begun:
                entry = self.read(source)
                if entry is not None:
                    found.append(entry)
        return found

    def read(self, source: ProviderState) -> dict[str, object] | None:
        """Read one provider; one that is slow or fails, again and again, has a rest."""
        begun = time.monotonic()
        if begun < source.rest:
            return None
        used = time.thread_time()
        entry = None
        failed = False
        try:
            entry = source.provider.read()
        except Exception:
            failed = True
            self.count(source)
        slow = time.thread_time() - used > SLOW or time.monotonic() - begun > STALL
        source.bad = source.bad + 1 if failed or slow else 0
        if source.bad >= TRIES:
            source.bad = 0
            source.rest = time.monotonic() + REST
            if not failed:
                self.count(source)
        return entry

    def count(self, source: ProviderState) -> None:
        """Count an error of a provider: the program never hears of it, the exporter does."""
        name = source.provider.name
        self.errors[name] = self.errors.get(name, 0) + 1

    def report(self) -> dict[str, object]:
        """Return the full state of this process as it is now; what is not known is not in it."""
        report = sys.modules["vramledger.agent.message"]
        known = report.known
        return {
            "version": report.VERSION,
            "sequence": self.sequence,
            "dropped": self.connection.dropped if self.connection is not None else 0,
            "agent": report.agent(),
            "interval": self.settings.interval,
            "monotonic": time.clock_gettime(time.CLOCK_BOOTTIME),
            "python": report.PYTHON,
            "visible": dict(self.visible),
            "consents": sorted(self.desk.handlers) if self.desk is not None else [],
            "errors": dict(self.errors),
            "collector": known(self.gc_monitor.report_entry()),
            "frameworks": [known(entry) for entry in self.entries()],
            **({"last_oom": self.last_oom} if self.last_oom is not None else {}),
        }

    def send(self) -> bool:
        """Build a report and send it."""
        if self.connection is None:
            return False
        report = sys.modules["vramledger.agent.message"]
        self.sequence += 1
        failure = self.last_oom
        sent = bool(self.connection.send(report.encode(self.report())))
        if sent:
            self.told_oom = failure
        return sent

    def tell(self, seconds: float) -> bool:
        """Send a report from the calling thread; False when there is nobody, or the thread sends for so long.

        For what must not wait for the thread's next turn: the program may have ended by then.
        """
        if not self.sending.acquire(timeout=seconds):
            return False
        try:
            return self.connection is not None and self.connection.open(time.monotonic()) and self.send()
        finally:
            self.sending.release()

    def answer(self) -> None:
        """Take the questions that have come."""
        while self.connection is not None and (received := self.connection.receive()) is not None:
            if self.desk is not None:
                self.desk.accept(*received)

    # Ending, and beginning again

    def nudge(self) -> None:
        """Start the thread again after a fork: called now and then from the program's own threads."""
        if self.suspended and not sys.is_finalizing():
            self.start()

    def halt(self, seconds: float) -> bool:
        """Tell the thread to end and wait for it; say whether there was one."""
        errand, self.errand = self.errand, None
        if errand is None:
            return False
        errand.stop.release()
        if errand.native != _thread.get_native_id() and errand.done.acquire(timeout=seconds):
            gone(errand.native, seconds)
        return True

    def before_fork(self) -> None:
        """Have no thread while the process forks: Python warns of one, and the child would lack it."""
        if self.halt(STOP_WAIT):
            self.suspended = True
            # CUDA has threads of its own: then Python warns with us or without us.
            self.alone = not WARNS_AT_FORK or len(os.listdir("/proc/self/task")) == 1

    def after_fork_in_parent(self) -> None:
        """Go on, but not yet where Python looks for threads only now (3.12, 3.13)."""
        if self.suspended and not (WARNS_AT_FORK and self.alone and gc.isenabled()):
            self.start()

    def after_fork_in_child(self) -> None:
        """Be a new process: what the parent's frameworks hold is not ours, and cannot be used here."""
        self.errand = None
        self.sending = _thread.allocate_lock()  # the parent's may be held by a thread that is not here
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.desk = None
        step_boundary.drop_pending()
        self.gc_monitor.reset()
        self.sequence = 0
        self.errors.clear()
        self.visible.clear()
        self.last_oom = self.told_oom = None
        for name, source in list(self.sources.items()):
            if source.begun:
                del self.sources[name]
            source.looks = 0
        # A framework that tells us will do so here too; one that does not is looked at again.
        self.suspended = any(not source.hooked or source.ready for source in self.known())

    def leave(self) -> None:
        """Say how it ended: the last report of a process that exits."""
        try:
            self.stopped = True
            self.suspended = False
            self.gc_monitor.stop()
            untold = self.last_oom is not self.told_oom
            # Without a framework that has begun there was nothing to tell.
            if (self.halt(LAST_WAIT) or untold) and any(source.begun for source in self.known()):
                self.refresh()
                self.tell(OOM_WAIT if untold else LAST_WAIT)
        except Exception:
            pass
        finally:
            if self.connection is not None:
                self.connection.close()

    def stop(self) -> None:
        """Report no more, until a framework is added again."""
        self.stopped = True
        self.suspended = False
        self.halt(STOP_WAIT)
        self.gc_monitor.stop()
        for source in self.known():
            if source.begun:
                try:
                    source.provider.end()
                except Exception:
                    self.count(source)
        self.sources.clear()
        if self.connection is not None:
            self.connection.close()


def gone(native: int, seconds: float) -> None:
    """Wait until a thread that has ended is gone for the kernel too, for Python counts the kernel's."""
    if not WARNS_AT_FORK:
        return
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/self/task/{native}") and time.monotonic() < deadline:
        time.sleep(0.0001)


worker = Worker()
"""This process's."""
