"""Write down why PyTorch ran out of memory, before the program sees its own exception.

torch calls the observer on the thread that failed, after its retries and before the stack unwinds. Only at
that moment does the code that took too much still hold its memory. An exception from the observer would
replace the program's OutOfMemoryError, so it raises nothing but what a signal handler of the program raises
meanwhile. It cannot be detached, so there is one observer in the process.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

from vramledger_agent.oom.diagnosis import OomDiagnosis
from vramledger_agent.oom.report_file import write_report
from vramledger_agent.oom.stacks import failing_stack
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.worker import OOM_REPORT_TIMEOUT_SECONDS, worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from vramledger_agent.torch.allocator import TorchAllocator

MAX_REPORTS = 20
"""The maximum number of reports of one process: a search for the largest size fails often, on purpose."""

REPORT_PAUSE_SECONDS = 5.0
"""The shortest pause between two reports, and between two that are sent to the exporter immediately."""


class OomObserver:
    """The observer that is attached to torch, once in the process."""

    def __init__(self) -> None:
        self.allocator: TorchAllocator | None = None  # whose failures are reported; None while none are
        self.attached = False  # torch has the observer, and calls it
        self._pid = 0
        self._reports = 0
        self._next_report = 0.0
        self._busy = _thread.RLock()

    def attach(self, allocator: TorchAllocator) -> None:
        """Report failures from now on; CUDA must be initialised, because attaching would initialise it."""
        self.allocator = allocator
        self._pid = os.getpid()
        torch = allocator.torch
        register = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if register is not None and not self.attached and torch.cuda.is_initialized():
            self.attached = True
            register(self)

    def disable(self) -> None:
        """Stop reporting, although torch goes on calling."""
        self.allocator = None

    def __call__(self, ordinal: int, requested: int, capacity: int, free: int) -> None:
        """Handle a failed allocation; torch passes the device's number and three figures in bytes."""
        try:
            if self.allocator is None or self._pid != os.getpid() or not self.allocator.may_read():
                return
            if self._busy._is_owned():  # type: ignore[attr-defined, unused-ignore]
                return  # a signal handler of the program failed, while this thread's failure is written down
            try:
                # A signal handler may raise directly after this call, so only the lock knows who has it.
                if not self._busy.acquire(blocking=False):
                    return  # another thread's failure is being written down
                # Only strings of the stack are kept: a frame would keep its tensors.
                stack = failing_stack(sys._getframe().f_back)
                self._handle(self.allocator, (ordinal, requested, capacity, free), stack)
            finally:
                try:
                    self._busy.release()
                except RuntimeError as error:  # it is another thread's
                    if belongs_to_program(error):
                        raise
        except BaseException as error:
            if belongs_to_program(error):
                raise
            worker.count_error("torch")

    def _handle(
        self, allocator: TorchAllocator, failed: tuple[int, int, int, int], stack: dict[str, object]
    ) -> None:
        now = time.monotonic()
        diagnosis = OomDiagnosis(allocator, *failed, stack)
        last_oom = diagnosis.summary()
        is_due = now >= self._next_report
        if is_due and self._reports < MAX_REPORTS:
            self._reports += 1
            flight = diagnosis.flight()
            snapshot = flight.pop("snapshot", None)
            content = {**diagnosis.report_content(), **({"flight": flight} if flight else {})}
            path = write_report(content, worker.settings.report_directory, snapshot)
            if path is not None:
                last_oom["report"] = path
        if worker.session is not None:
            worker.session.last_oom = last_oom
        if is_due:
            self._next_report = now + REPORT_PAUSE_SECONDS
            if worker.session is not None:
                # A program that does not catch this may end before the next report.
                worker.session.send_now(OOM_REPORT_TIMEOUT_SECONDS)


observer = OomObserver()
"""The one observer of this process."""
