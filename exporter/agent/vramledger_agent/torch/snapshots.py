"""Take snapshots of PyTorch's allocator, without PyTorch importing anything for them.

To name the lines of a recorded stack, PyTorch asks itself for ``torch._inductor``. Where nothing has imported
that yet, the question does, and takes seconds. If that happens on a thread of ours while the program imports
a part of PyTorch, Python lets one of the two have a module that is not complete: on an H200 with torch 2.11
six of six programs failed so as they made their first optimizer. On the program's own thread it is a pause
that the program has not asked for. PyTorch accepts that there is no such part, and names every line but those
of code that ``torch._inductor`` has written, of which there is none yet.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from vramledger_agent.import_hook import RefusedImport

_Snapshot = TypeVar("_Snapshot")


class WouldImportError(RuntimeError):
    """The snapshot was not taken, because PyTorch would import a part of itself."""


def take_without_import(
    torch: ModuleType, take: Callable[[], _Snapshot], *, own_thread: bool = False
) -> _Snapshot:
    """Return what ``take`` gives. Raises WouldImportError if it would import, unless on ``own_thread``."""
    with RefusedImport("torch._inductor") as holds:
        if not holds and not own_thread and _would_import(torch):
            message = (
                "to name the lines, PyTorch would import torch._inductor beside the program, which can break"
                " an import of the program; it does not once the program has imported torch._inductor"
            )
            raise WouldImportError(message)
        return take()


def _would_import(torch: ModuleType) -> bool:
    return "_inductor" in vars(torch).get("_lazy_modules", ()) and "_inductor" not in vars(torch)
