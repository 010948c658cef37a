"""Answer what was: pass questions on to the storage, if there is one."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import msgspec

from vramledger import __version__
from vramledger.errors import VramledgerError
from vramledger.serving.callers import Caller
from vramledger.serving.control_messages import At, ControlError, PastHead, PastQuestion, Readings
from vramledger.storage.protocol import HIDE
from vramledger.views.hidden_names import HiddenNames

VISITORS = "visitors of the page"
"""They ask as one: who they are is not known."""


_Answer = TypeVar("_Answer")


class StorageError(VramledgerError):
    """The storage does not answer, or says why it cannot."""


class Answering(Protocol):
    """The storage, which loads much and is loaded only where something is stored."""

    async def request(
        self, question: dict[str, Any], timeout: float = ..., asker: str | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a question of somebody, within seconds."""


async def while_alive(pidfd: int, answering: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Return an answer, not computed further if who asked ends. Raises ControlError then."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(answering)
    if pidfd >= 0:
        loop.add_reader(pidfd, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        task.cancel()
        if pidfd < 0 or not select.select([pidfd], [], [], 0)[0]:
            raise
        raise ControlError("who asked has ended") from None
    finally:
        loop.remove_reader(pidfd)


class PastDesk:
    """Answer commands that ask for the past."""

    def __init__(self, *, expected: bool, hidden: HiddenNames | None = None) -> None:
        """Start without a storage. If one is ``expected``, the exporter sets it when it is open."""
        self.storage: Answering | None = None
        self._expected = expected
        self._hiding = {} if hidden is None else {HIDE: hidden.key.hex()}

    async def answer_page(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a question of the page. Raises StorageError if there is none, or not yet."""
        if self.storage is None:
            raise StorageError(self._without())
        return await self.storage.request({**question, **self._hiding}, asker=VISITORS)

    async def answer(self, asked: PastQuestion, caller: Caller) -> tuple[PastHead, bytes]:
        """Return the answer to a command. Raises ControlError if not allowed, or nothing is stored yet."""
        if self.storage is None:
            raise ControlError(self._without())
        if isinstance(asked, Readings):
            caller.check_control()
        question = msgspec.to_builtins(asked)
        if isinstance(asked, At) and not caller.trusted:
            question["uid"] = caller.peer.uid
        if not caller.trusted:
            question |= self._hiding
        asker = None if caller.trusted else f"uid {caller.peer.uid}"
        head, content = await while_alive(caller.peer.pidfd, self.storage.request(question, asker=asker))
        return PastHead(__version__, head), content

    def _without(self) -> str:
        """Return why there is no storage."""
        if self._expected:  # the control socket and the page answer before it is open
            return "it is still starting; ask again in a moment"
        return "it keeps no past; start it with --storage.path"
