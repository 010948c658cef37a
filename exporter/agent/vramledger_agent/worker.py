"""Run the agent's thread: it exists while there is something to report.

The thread and its locks come from ``_thread``. ``threading`` would show the thread to the program, and has
locks of its own that a program may hold when a fork calls us. The thread waits, reads and sends, and imports
nothing: what it needs was imported with the framework. It keeps running during a fork, except where Python
would warn of it.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time
from collections.abc import Callable

from vramledger_agent import step_boundary
from vramledger_agent.frameworks.poller import ProviderPoller
from vramledger_agent.program_errors import (
    belongs_to_program,
    count_threads,
    forget_caught,
    has_thread,
    keep_or_count,
    make_hook,
    make_main_thread_call,
    raise_caught,
    start_thread,
)
from vramledger_agent.requests import Handler, load_handlers
from vramledger_agent.session import ExporterSession
from vramledger_agent.settings import Settings

STOP_TIMEOUT_SECONDS = 1.0
"""A fork or an exit waits this long for our thread, which may wait for a lock that the program holds."""

WARNS_AT_FORK = sys.version_info[:2] >= (3, 12)
"""Python warns of a fork in a process with several threads; it gets their number from the kernel."""

LAST_REPORT_TIMEOUT_SECONDS = 0.05
OOM_REPORT_TIMEOUT_SECONDS = 0.5


class WorkerRun:
    __slots__ = ("done", "ended", "native_id", "pid", "stop", "stopping")

    def __init__(self) -> None:
        self.stop = _thread.allocate_lock()  # held until the thread is to stop
        self.stop.acquire()
        self.done = _thread.allocate_lock()  # held until it has stopped
        self.done.acquire()
        self.stopping = False  # the thread is to stop
        self.ended = False  # it has stopped
        self.pid = os.getpid()  # of the process that it runs in; a forked child has the object, and no thread
        self.native_id = 0  # the kernel's number of the thread

    def request_stop(self) -> None:
        """Tell the thread to end; if a signal interrupts this, it ends at its next turn."""
        self.stopping = True
        if self.stop.locked():
            self.stop.release()

    def wait_until_gone(self, timeout: float) -> None:
        """Wait until the thread has ended, also for the kernel where Python asks it for the threads."""
        if self.native_id == _thread.get_native_id():
            return
        # A signal may end this wait after it took the lock; ``ended`` then tells the next call.
        if not self.ended and not self.done.acquire(timeout=timeout):
            return
        deadline = time.monotonic() + timeout
        pause = 0.0  # most threads are gone at once, and the shortest sleep takes longer than a fork
        while WARNS_AT_FORK and has_thread(self.native_id) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause + 0.00001, 0.0001)


class Worker:
    """What the agent does in this process: at most one thread, one connection, one report at a time."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # of the process that all this is about
        self.settings = Settings()
        # how many were caught, by the framework's name, or ``agent`` for those of the thread
        self.errors: dict[str, int] = {}
        self.poller = ProviderPoller(self.count_error)
        # of the requests that the program consents to; None until a framework is added
        self.handlers: dict[str, Handler] | None = None
        self.session: ExporterSession | None = None  # with the exporter; None until the thread is needed
        self.current_run: WorkerRun | None = None  # of the thread; None while there is no thread
        self.suspended = False  # the thread was stopped for a fork, and starts again after it
        self.stopped = False  # no thread starts until a framework is added
        # looks at the error that has ended the program; None until a framework is added, whose import has
        # loaded what it needs
        self.uncaught_reporter: Callable[..., dict[str, object] | None] | None = None
        self._alone = False
        self._due = 0.0
        self._fork_hooks: dict[str, Callable[[], object]] | None = None
        self._hooks_registered = False

    def count_error(self, name: str = "agent") -> None:
        """Count an error that was caught: the program never sees it, the exporter does."""
        self.errors[name] = self.errors.get(name, 0) + 1

    # Beginning

    def add_framework(self, module: str, imported: str) -> None:
        """Add a framework that the program imports: ``module`` is ours and reads it, ``imported`` its own."""
        self.adopt_process()
        if module.rpartition(".")[2] in self.poller.states:
            return
        self.stopped = False
        if self.handlers is None:
            self.handlers = load_handlers(self.settings.consents)
            self._fork_hooks = self._make_fork_hooks()
            self.uncaught_reporter = _load_uncaught_reporter()
        self.poller.add(module, imported, self.start)
        self.find_allocators()

    def find_allocators(self) -> None:
        """Start the thread if a framework that does not announce its allocator may have one by now."""
        if self.current_run is None and not self.stopped and self.poller.needs_polling():
            self.start()

    def start(self) -> None:
        """Start the thread unless it runs; what a signal handler raises here goes on into the program."""
        self.adopt_process()
        run = self.current_run
        if run is not None and not run.stopping:
            self.suspended = False
            return
        if self.stopped or sys.is_finalizing():
            return
        if self.session is None:
            self.session = ExporterSession(self.settings, self.poller, self.handlers or {}, self.errors)
        run = WorkerRun()
        try:
            self.current_run = run
            if not self.suspended:
                self._due = 0.0
            start_thread(self._run_thread, (run,))
            self.suspended = False
        except BaseException as error:
            run.request_stop()
            self.current_run = None
            if belongs_to_program(error):
                raise
            # Otherwise no thread is available, or the interpreter is about to end.

    def resume(self) -> None:
        """Start the thread again after a fork; called often, from the program's own threads."""
        if not self.suspended:
            return
        try:
            self.start()
        except BaseException:  # of a signal handler
            self.start()
            raise

    def adopt_process(self) -> None:
        """Start over in a forked child: what the parent's frameworks hold cannot be used here."""
        pid = os.getpid()
        if pid == self.pid:
            return
        self.current_run = None
        session, self.session = self.session, None
        if session is not None:
            session.close()
        step_boundary.drop_pending()
        self.errors.clear()
        self.poller.reset_after_fork()
        self.suspended = False
        self.pid = pid

    # The thread

    def _run_thread(self, run: WorkerRun) -> None:
        run.native_id = _thread.get_native_id()
        # A thread that was stopped for a fork goes on with the turns where it was: a report for each fork
        # would take longer than the fork.
        wait: float | None = max(0.0, self._due - time.monotonic())
        try:
            self._register_hooks()
            while wait is not None and not run.stop.acquire(timeout=wait) and not run.stopping:
                wait = self.settings.interval
                try:
                    wait = self.run_turn(time.monotonic())
                except Exception:
                    self.count_error()
                self._due = time.monotonic() + (wait or 0.0)
        finally:
            if self.current_run is run:
                self.current_run = None
            run.ended = True
            run.done.release()

    def _register_hooks(self) -> None:
        if not self._hooks_registered:
            self._hooks_registered = True
            atexit.register(self._finish_at_exit)
            if self._fork_hooks is not None:
                os.register_at_fork(**self._fork_hooks)

    def run_turn(self, now: float) -> float | None:
        """Do what is due, and return the seconds until the next turn, None if there is none."""
        # Only the main thread and this one: Python would warn of this one at a fork.
        self._alone = WARNS_AT_FORK and count_threads() == 2  # noqa: PLR2004
        wait = self.poller.start_initialised()
        if not self.poller.has_started() or self.session is None:
            return wait
        self.poller.update()
        self.session.exchange(now)
        return self.settings.interval if wait is None else min(wait, self.settings.interval)

    # Ending, and beginning again

    def stop_thread(self, timeout: float) -> bool:
        """Stop the thread and wait for its end; return whether there was one."""
        run = self.current_run
        if run is None or run.pid != os.getpid():
            return False
        run.request_stop()
        self.current_run = None
        run.wait_until_gone(timeout)
        return True

    def _make_fork_hooks(self) -> dict[str, Callable[[], object]] | None:
        """Return the fork hooks, made so that no exception of a signal handler is lost in them."""
        try:
            hooks = {"after_in_child": make_main_thread_call(self._begin_in_child, self.count_error)}
            if WARNS_AT_FORK:
                hooks["before"] = make_hook(self._stop_before_fork, self.count_error)
                hooks["after_in_parent"] = make_main_thread_call(self._resume_after_fork, self.count_error)
        except ImportError:  # without ctypes there are no hooks, so Python may warn of a fork
            return None
        return hooks

    def _stop_before_fork(self) -> None:
        """Stop the thread before a fork if Python would warn of it; beside other threads it always does."""
        run = self.current_run
        if not self._alone or run is None:
            return
        # A signal handler's exception may end this function anywhere. Then the thread goes on or is stopping;
        # both are known.
        self.suspended = True
        run.request_stop()
        try:
            run.wait_until_gone(STOP_TIMEOUT_SECONDS)
        except BaseException as error:  # also of a signal handler: the fork happens in any case
            keep_or_count(error, self.count_error)
            run.wait_until_gone(STOP_TIMEOUT_SECONDS)

    def _resume_after_fork(self) -> None:
        """Start the thread again soon after the fork: Python 3.13.0 also counts threads that hooks start."""
        self.resume()
        raise_caught()

    def _begin_in_child(self) -> None:
        forget_caught()
        self.adopt_process()
        self.find_allocators()

    def _finish_at_exit(self) -> None:
        if self.pid != os.getpid():
            return
        self.stopped = True
        # Before 3.12 a thread that is in the middle of its turn when the interpreter ends can end the program
        # by SIGSEGV (seen once, on 3.10). One that waits for its next turn is gone at once.
        self.stop_thread(STOP_TIMEOUT_SECONDS)
        session = self.session
        if session is None:
            return
        try:
            if self.poller.has_started():  # otherwise there was nothing to report
                self.poller.update()
                try:
                    self._report_uncaught(session)
                except Exception as error:  # of the program's own exception, whose text may raise one
                    if belongs_to_program(error):
                        raise
                    self.count_error()
                session.send_now(
                    OOM_REPORT_TIMEOUT_SECONDS if session.has_unsent_oom() else LAST_REPORT_TIMEOUT_SECONDS
                )
        except Exception as error:
            if belongs_to_program(error):
                raise
        finally:
            session.close()

    def _report_uncaught(self, session: ExporterSession) -> None:
        if self.uncaught_reporter is None:
            return
        found = self.uncaught_reporter(
            self.poller.started_providers(), self.settings.report_directory, dict(self.poller.visibility)
        )
        if found is not None:
            session.last_oom = found

    def stop(self) -> None:
        """Stop reporting until a framework is added again."""
        self.stopped = True
        self.suspended = False
        self.stop_thread(STOP_TIMEOUT_SECONDS)
        self.poller.stop()
        if self.session is not None:
            self.session.close()


def _load_uncaught_reporter() -> Callable[..., dict[str, object] | None] | None:
    """Import it, now and not while the program ends; None where it cannot be imported."""
    try:
        from vramledger_agent.oom.uncaught import report_uncaught
    except ImportError:
        return None
    return report_uncaught


worker = Worker()
