"""Answer what was: pass questions on to the storage, if there is one."""

from __future__ import annotations

from typing import Any, Protocol

from vramledger import __version__
from vramledger.errors import VramledgerError
from vramledger.serving.callers import Caller
from vramledger.serving.control_messages import ControlError, ControlRequest, PastHeader
from vramledger.storage.protocol import AT, READINGS


class StorageError(VramledgerError):
    """The storage does not answer, or says why it cannot."""


class Answering(Protocol):
    """The storage, which loads much and is loaded only where something is stored."""

    async def request(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a question."""


class PastDesk:
    """Answer commands that ask for the past."""

    def __init__(self, *, expected: bool) -> None:
        """Start without a storage. If one is ``expected``, the exporter sets it when it is open."""
        self.storage: Answering | None = None
        self._expected = expected

    async def answer_page(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a question of the page.

        Raises:
            StorageError: there is none, or not yet.
        """
        if self.storage is None:
            raise StorageError(self._without())
        return await self.storage.request(question)

    async def answer(self, request: ControlRequest, caller: Caller) -> tuple[PastHeader, bytes]:
        """Return the answer to a command's question.

        Raises:
            ControlError: this caller may not ask that, or nothing is stored, or not yet.
        """
        if self.storage is None:
            raise ControlError(self._without())
        question = dict(request.question)
        if question["ask"] == READINGS:
            caller.check_control()
        if question["ask"] == AT and not caller.trusted:
            question["uid"] = caller.peer.uid
        head, content = await self.storage.request(question)
        return PastHeader(__version__, head, len(content)), content

    def _without(self) -> str:
        """Return why there is no storage."""
        if self._expected:  # the control socket and the page answer before it is open
            return "it is still starting; ask again in a moment"
        return "it keeps no past; start it with --storage.path"
