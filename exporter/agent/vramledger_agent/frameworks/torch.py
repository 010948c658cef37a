"""Read PyTorch: what its caching allocator holds on each device, from the allocator's own counters.

They are read only once ``torch.cuda.is_initialized()``. With ``cudaMallocAsync`` the counters belong to the
CUDA runtime, which we do not call. A pluggable allocator has no counters, and a pool with an allocator of the
program's own makes it unsafe to read them. All these are reported as not supported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from vramledger_agent.frameworks.provider import Provider
from vramledger_agent.oom.handler import observer
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.torch.allocator import NATIVE, TorchAllocator
from vramledger_agent.torch.optimizer_steps import OptimizerSteps
from vramledger_agent.torch.recording import DEFAULT_EVENTS, custom_allocators, recording
from vramledger_agent.worker import worker

POLICIES = {NATIVE: "caching", "cudaMallocAsync": "async"}


class PyTorch(Provider):
    name = "torch"

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.backend: str | None = None
        self.allocator: TorchAllocator | None = None
        self.optimizer_steps = OptimizerSteps(torch)
        custom_allocators(torch)  # none can exist before PyTorch is imported

    def hook_initialisation(self, announce: Callable[[], None]) -> bool:
        """Queue our call with those that torch makes when it initialises CUDA, or call now if it has."""
        if worker.settings.records_from_start and not self.torch.cuda.is_initialized():
            self.torch.cuda._lazy_call(self._record_from_start)
        self.torch.cuda._lazy_call(announce)
        return True

    def is_initialised(self) -> bool:
        """Read torch's own variable for it; it is False in a child that cannot use CUDA."""
        return bool(self.torch.cuda.is_initialized())

    def start(self) -> None:
        """Attach to out-of-memory errors and optimizer steps, and find out which allocator is used."""
        self.backend = str(self.torch._C._cuda_getAllocatorBackend())
        self.allocator = TorchAllocator(self.torch, self.backend, self.optimizer_steps)
        self.optimizer_steps.register()
        if self.allocator.supported:
            observer.attach(self.allocator)
            if worker.settings.records_from_start and not recording.active:
                self._record(from_start=False)  # the agent was started after CUDA

    def _record_from_start(self) -> None:
        """Begin to record on the thread that initialises CUDA, before anything can be allocated."""
        self._record(from_start=True)

    def _record(self, *, from_start: bool) -> None:
        """Begin to record; a PyTorch that cannot record is an error that is counted, and nothing else."""
        try:
            if str(self.torch._C._cuda_getAllocatorBackend()) == NATIVE:
                recording.begin(self.torch, DEFAULT_EVENTS, from_start=from_start)
        except BaseException as error:  # PyTorch would raise it in the program
            if belongs_to_program(error):
                raise
            worker.count_error(self.name)

    def stop(self) -> None:
        """Unregister from the optimizers; the observer of failures can only be disabled, not detached."""
        self.optimizer_steps.unregister()
        observer.disable()
        if recording.active and recording.is_active(self.torch):
            recording.end(self.torch)

    def update(self) -> None:
        if self.allocator is not None:
            self.allocator.update()

    def refresh(self) -> None:
        """Read the counters, without a reading of growth: these come at even intervals."""
        if self.allocator is not None:
            self.allocator.refresh()

    def read(self) -> dict[str, object] | None:
        entry: dict[str, object] = {"framework": self.name, "version": str(self.torch.__version__)}
        allocator = self.allocator
        if self.backend is not None:
            entry |= {"allocator": self.backend, "policy": POLICIES.get(self.backend)}
        if allocator is None:  # the reader of the allocator could not be started
            return entry
        entry["supported"] = allocator.supported
        if allocator.supported:
            entry["devices"] = [allocator.device_entry(ordinal) for ordinal in sorted(allocator.used)]
            entry |= allocator.process_entry()
        return entry


def make_provider() -> Provider:
    """Return PyTorch's provider, in a process that has imported it."""
    return PyTorch(sys.modules["torch"])
