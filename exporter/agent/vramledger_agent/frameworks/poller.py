"""Find the frameworks that have an allocator by now and read them; a slow or failing one is paused."""

from __future__ import annotations

import _thread
import os
import sys
import time
from collections.abc import Callable
from functools import partial

from vramledger_agent.frameworks.provider import SLOW_READ_SECONDS, Provider
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.messages import VISIBILITY_VARIABLES

POLL_SECONDS = 2.0
"""The pause between two polls of a framework that does not announce its allocator."""

ANNOUNCED_POLL_SECONDS = 0.005
"""The pause between two polls of a framework that has announced its allocator."""

QUICK_POLLS = 100
"""After this number of polls the framework counts as slow to start, and is polled less often."""

SLOW_START_POLL_SECONDS = 0.2

MAX_ANNOUNCED_POLLS = 400
"""After this number of polls without an allocator that was announced, the framework's start has failed."""

MAX_BAD_READS = 3
"""A provider may be slow or fail this number of times in a row before it is paused."""

RETRY_SECONDS = 60.0
MAX_READ_SECONDS = 0.05
"""The longest time that a reading may take by the clock; :data:`SLOW_READ_SECONDS` limits its CPU time."""


class ProviderState:
    """A provider, and the state of its readings."""

    __slots__ = ("announced", "bad_reads", "hooked", "imported", "polls", "provider", "retry_at", "started")

    def __init__(self, provider: Provider, imported: str) -> None:
        self.provider = provider
        self.imported = imported  # the framework's module whose import was noticed
        self.hooked = False  # its framework announces when it is about to have an allocator
        self.announced = False  # the framework has announced its allocator
        self.started = False  # the allocator exists, and :meth:`Provider.start` was called
        self.polls = 0  # since its framework was added or announced its allocator
        self.bad_reads = 0  # the number of consecutive readings that were slow or failed
        self.retry_at = 0.0  # it is paused until then


class ProviderPoller:
    """The frameworks that this process has imported."""

    def __init__(self, count_error: Callable[[str], None]) -> None:
        self.states: dict[str, ProviderState] = {}  # by the name of the provider's module
        # the variables that choose the program's devices, as they were when its first framework started
        self.visibility: dict[str, str | None] = {}
        self._count_error = count_error
        self._starting = _thread.allocate_lock()

    def add(self, module: str, imported: str, announced: Callable[[], None]) -> None:
        """Add an imported framework; its allocator calls ``announced``, on any thread."""
        __import__(module)
        state = ProviderState(sys.modules[module].make_provider(), imported)
        count_error = partial(self._count_error, state.provider.name)

        def announce(*_: object, **__: object) -> None:
            try:
                state.announced = True
                announced()
            except BaseException as error:
                if belongs_to_program(error):
                    raise
                count_error()

        name = module.rpartition(".")[2]
        self.states[name] = state
        try:
            state.hooked = state.provider.hook_initialisation(announce)
        except BaseException as error:
            if belongs_to_program(error):
                del self.states[name]
                raise
            count_error()

    def started_providers(self) -> list[Provider]:
        return [state.provider for state in self._started()]

    def has_started(self) -> bool:
        return bool(self._started())

    def needs_polling(self) -> bool:
        return any(_needs_polling(state) for state in self._listed())

    def start_initialised(self) -> float | None:
        """Start the providers with an allocator; return seconds until the next poll, None if none is due."""
        with self._starting:
            return self._start_initialised()

    def _start_initialised(self) -> float | None:
        wait: float | None = None
        for state in self._listed():
            if not _needs_polling(state):
                continue
            try:
                if state.provider.is_initialised():
                    self._keep_visibility()
                    state.started = True
                    state.provider.start()
                    continue
            except Exception as error:
                if belongs_to_program(error):
                    raise
                self._count_error(state.provider.name)
            if state.hooked and state.provider.has_given_up():
                state.announced = False
                continue
            pause = _seconds_to_next_poll(state)
            if pause is not None:
                wait = pause if wait is None else min(wait, pause)
        return wait

    def update(self) -> None:
        self._call_started(lambda provider: provider.update())

    def refresh(self) -> None:
        self._call_started(lambda provider: provider.refresh())

    def read(self) -> list[dict[str, object]]:
        entries = (self._read_provider(state) for state in self._started())
        return [entry for entry in entries if entry is not None]

    def stop(self) -> None:
        self._call_started(lambda provider: provider.stop())
        self.states.clear()

    def reset_after_fork(self) -> None:
        """Drop the frameworks that the parent had started, because the child cannot use them."""
        self.visibility.clear()
        self._starting = _thread.allocate_lock()  # the parent's thread may have had it
        for name, state in list(self.states.items()):
            if state.started:
                del self.states[name]
            state.polls = 0

    def _listed(self) -> list[ProviderState]:
        """Return the frameworks that are loaded, even if the program imports another at this moment."""
        return list(self.states.values())

    def _started(self) -> list[ProviderState]:
        return [state for state in self._listed() if state.started]

    def _call_started(self, call: Callable[[Provider], None]) -> None:
        for state in self._started():
            try:
                call(state.provider)
            except Exception as error:
                if belongs_to_program(error):
                    raise
                self._count_error(state.provider.name)

    def _keep_visibility(self) -> None:
        if not self.visibility:
            self.visibility.update({name: os.environ.get(name) for name in VISIBILITY_VARIABLES})

    def _read_provider(self, state: ProviderState) -> dict[str, object] | None:
        begun = time.monotonic()
        if begun < state.retry_at:
            return None
        used = time.thread_time()
        entry = None
        failed = False
        try:
            entry = state.provider.read()
        except Exception as error:
            if belongs_to_program(error):
                raise
            failed = True
            self._count_error(state.provider.name)
        slow = time.thread_time() - used > SLOW_READ_SECONDS or time.monotonic() - begun > MAX_READ_SECONDS
        state.bad_reads = state.bad_reads + 1 if failed or slow else 0
        if state.bad_reads >= MAX_BAD_READS:
            state.bad_reads = 0
            state.retry_at = time.monotonic() + RETRY_SECONDS
            if not failed:
                self._count_error(state.provider.name)
        return entry


def _needs_polling(state: ProviderState) -> bool:
    if state.started:
        return False
    if state.hooked:
        return state.announced
    return state.imported in sys.modules and state.provider.may_initialise()  # or its import has failed


def _seconds_to_next_poll(state: ProviderState) -> float | None:
    """Count a poll that found no allocator, and return when the next is due; None when its start failed."""
    state.polls += 1
    if not state.hooked:
        spec = getattr(sys.modules.get(state.imported), "__spec__", None)
        return SLOW_START_POLL_SECONDS if getattr(spec, "_initializing", False) else POLL_SECONDS
    if state.polls == MAX_ANNOUNCED_POLLS:  # the start failed, and the framework will announce its next try
        state.announced = False
        state.polls = 0
        return None
    return ANNOUNCED_POLL_SECONDS if state.polls < QUICK_POLLS else SLOW_START_POLL_SECONDS
