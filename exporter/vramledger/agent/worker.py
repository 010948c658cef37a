"""Run the agent's thread: it exists while there is something to report, and never across a fork.

The thread is a bare one and its signals are bare locks. ``threading`` would show it to the program, and has
locks of its own that a program may hold when the collector or a fork calls us. The thread waits, reads and
sends, and imports nothing: the program's thread that starts it imports what it needs.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import os
import sys
import time

from vramledger.agent import step_boundary
from vramledger.agent.frameworks.poller import ProviderPoller
from vramledger.agent.gc_monitor import GCMonitor
from vramledger.agent.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vramledger.agent.session import ExporterSession

STOP_TIMEOUT_SECONDS = 0.1
"""The longest time that a fork or an exit waits for the thread to end: the thread may wait for a lock of the
program."""

WARNS_AT_FORK = sys.version_info[:2] >= (3, 13)
"""Python warns of a fork with threads, and also counts those that a hook starts after it (3.13.0)."""

LAST_REPORT_TIMEOUT_SECONDS = 0.05
"""The last report of a process waits this long for another report that is being sent."""

OOM_REPORT_TIMEOUT_SECONDS = 0.5
"""The report about a new out-of-memory failure waits this long for another report that is being sent."""


class WorkerRun:
    """One run of the thread.

    Attributes:
        stop: held until the thread is to stop.
        done: held until it has stopped.
        native_id: the kernel's number of the thread.
    """

    __slots__ = ("done", "native_id", "stop")

    def __init__(self) -> None:
        self.stop = _thread.allocate_lock()
        self.stop.acquire()
        self.done = _thread.allocate_lock()
        self.done.acquire()
        self.native_id = 0


class Worker:
    """What the agent does in this process: at most one thread, one connection, one report at a time.

    Attributes:
        errors: how many were caught, by the framework's name, or ``agent`` for those of the thread.
        session: with the exporter; None until the thread is needed.
        current_run: of the thread; None while there is no thread.
        suspended: the thread was stopped for a fork, and starts again after it.
        single_threaded: the process had no other thread at that fork.
        stopped: no thread starts until a framework is added.
    """

    def __init__(self) -> None:
        self.settings = Settings()
        self.errors: dict[str, int] = {}
        self.poller = ProviderPoller(self.count_error)
        self.gc_monitor = GCMonitor(self.resume)
        self.session: ExporterSession | None = None
        self.current_run: WorkerRun | None = None
        self.suspended = False
        self.single_threaded = False
        self.stopped = False
        self._hooks_registered = False

    def count_error(self, name: str) -> None:
        """Count an error that was caught: the program never sees it, the exporter does."""
        self.errors[name] = self.errors.get(name, 0) + 1

    # Beginning

    def add_framework(self, module: str) -> None:
        """Add a framework that the program has just imported, given the module of its provider."""
        if module.rpartition(".")[2] in self.poller.states:
            return
        self.stopped = False
        if not self.poller.add(module, self.start):
            self.start()

    def start(self) -> None:
        """Start the thread unless it runs; what it will need is imported here."""
        if self.current_run is not None or self.stopped:
            return
        self.prepare_thread()
        self.suspended = False
        run = self.current_run = WorkerRun()
        try:
            _thread.start_new_thread(self._run_thread, (run,))
        except RuntimeError:  # no thread is available, or the interpreter is about to end
            self.current_run = None

    def prepare_thread(self) -> None:
        """Import what the thread uses, and have forks, collections and the exit call us."""
        from vramledger.agent import session  # not before it is needed

        if self.session is None:
            self.session = session.ExporterSession(self.settings, self.poller, self.gc_monitor, self.errors)
        self.gc_monitor.start()
        if not self._hooks_registered:
            self._hooks_registered = True
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork_in_parent,
                after_in_child=self._after_fork_in_child,
            )
            atexit.register(self._finish_at_exit)

    # The thread

    def _run_thread(self, run: WorkerRun) -> None:
        """Report until the run is stopped."""
        run.native_id = _thread.get_native_id()
        wait: float | None = 0.0
        try:
            while wait is not None and not run.stop.acquire(timeout=wait):
                wait = self.settings.interval
                try:
                    wait = self.run_turn(time.monotonic())
                except Exception:
                    self.count_error("agent")
        finally:
            if self.current_run is run:
                self.current_run = None
            run.done.release()

    def run_turn(self, now: float) -> float | None:
        """Do what is due, and return the seconds until the next turn, None if there is none."""
        wait = self.poller.start_initialised()
        if not self.poller.has_started() or self.session is None:
            return wait
        self.poller.update()
        self.session.exchange(now)
        return self.settings.interval if wait is None else min(wait, self.settings.interval)

    # Ending, and beginning again

    def resume(self) -> None:
        """Start the thread again after a fork: the program's own threads call this at times."""
        if self.suspended and not sys.is_finalizing():
            self.start()

    def stop_thread(self, timeout: float) -> bool:
        """Stop the thread and wait for its end; return whether there was one."""
        run, self.current_run = self.current_run, None
        if run is None:
            return False
        run.stop.release()
        if run.native_id != _thread.get_native_id() and run.done.acquire(timeout=timeout):
            wait_until_gone(run.native_id, timeout)
        return True

    def _before_fork(self) -> None:
        """Stop the thread during a fork: Python warns of threads, and the child would not have it."""
        if self.stop_thread(STOP_TIMEOUT_SECONDS):
            self.suspended = True
            # CUDA has threads of its own: then Python warns with us or without us.
            self.single_threaded = not WARNS_AT_FORK or len(os.listdir("/proc/self/task")) == 1

    def _after_fork_in_parent(self) -> None:
        """Resume after a fork, but not yet if Python looks for threads only after this hook (3.12, 3.13)."""
        if self.suspended and not (WARNS_AT_FORK and self.single_threaded and gc.isenabled()):
            self.start()

    def _after_fork_in_child(self) -> None:
        """Start as a new process: what the parent's frameworks hold is not ours and cannot be used here."""
        self.current_run = None
        if self.session is not None:
            self.session.close()
            self.session = None
        step_boundary.drop_pending()
        self.gc_monitor.reset()
        self.errors.clear()
        self.poller.reset_after_fork()
        # A framework that announces its allocator also announces it in the child; the others are polled
        # again.
        self.suspended = self.poller.needs_polling()

    def _finish_at_exit(self) -> None:
        """Send the last report of a process that exits."""
        try:
            self.stopped = True
            self.suspended = False
            self.gc_monitor.stop()
            unsent = self.session is not None and self.session.has_unsent_oom()
            # If no framework has started, there was nothing to report.
            if (self.stop_thread(LAST_REPORT_TIMEOUT_SECONDS) or unsent) and self.poller.has_started():
                self.poller.update()
                timeout = OOM_REPORT_TIMEOUT_SECONDS if unsent else LAST_REPORT_TIMEOUT_SECONDS
                if self.session is not None:
                    self.session.send_now(timeout)
        except Exception:
            pass
        finally:
            if self.session is not None:
                self.session.close()

    def stop(self) -> None:
        """Stop reporting until a framework is added again."""
        self.stopped = True
        self.suspended = False
        self.stop_thread(STOP_TIMEOUT_SECONDS)
        self.gc_monitor.stop()
        self.poller.stop()
        if self.session is not None:
            self.session.close()


def wait_until_gone(native_id: int, timeout: float) -> None:
    """Wait until the kernel has removed a thread that has ended, because Python counts the kernel's."""
    if not WARNS_AT_FORK:
        return
    deadline = time.monotonic() + timeout
    while os.path.exists(f"/proc/self/task/{native_id}") and time.monotonic() < deadline:
        time.sleep(0.0001)


worker = Worker()
"""The one worker of this process."""
