"""What others may ask of this process over the agent's socket: who may, and who answers.

The exporter only forwards: with the question comes the asker's own connection, of which the kernel says who
is at its other end, and over which the answer goes. Root and our own user are obeyed, in what this process
consented to when it was started, and nobody in anything else.
"""

from __future__ import annotations

import _thread
import json
import os
import socket
from collections.abc import Callable, Mapping

from vramledger.agent import transport

MODULES: dict[str, str] = {
    "reclaim": "vramledger.agent.torch.reclaiming",
    "snapshot": "vramledger.agent.torch.memory_history",
}
"""By what is asked (which is also the consent it takes): the module whose ``answer()`` answers it.

It is imported when the agent's thread starts, for an import later might find the program in any state.
"""

WAIT = 5.0
"""Seconds that the asker has to take the answer."""


class Ask:
    """One question, its sender already found to be root or our own user, and consented to.

    Attributes:
        name: what is asked, as ``snapshot``.
        arguments: the message, parsed: nothing in it can be trusted but its being a JSON object.
        descriptors: files that came with it; they are closed after the answer.
        uid: of who asks, from the kernel.
    """

    __slots__ = ("arguments", "descriptors", "name", "uid")

    def __init__(self, name: str, arguments: Mapping[str, object], descriptors: list[int], uid: int) -> None:
        self.name = name
        self.arguments = arguments
        self.descriptors = descriptors
        self.uid = uid


Answer = Callable[[Ask], "dict[str, object]"]
"""Do what is asked and return what to say besides ``ok``; runs on a thread of its own, one ask at a time.

What it raises is the answer's ``error``. What must run between two training steps goes through
``boundary.run``.
"""


def load(consents: frozenset[str]) -> dict[str, Answer]:
    """Import who answers what this process consents to; who cannot be imported cannot be asked."""
    found: dict[str, Answer] = {}
    for name, module in MODULES.items():
        if name in consents:
            try:
                found[name] = __import__(module, fromlist=["answer"]).answer
            except Exception:
                continue
    return found


class RequestHandler:
    """Answers one question after the other, beside the reports."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.answers = answers
        self._busy = _thread.allocate_lock()

    def take(self, message: bytes, descriptors: list[int]) -> None:
        """Answer a message of the exporter on a thread of its own, or refuse it; never raises."""
        asker = None
        try:
            if not descriptors:
                return
            asker = socket.socket(fileno=descriptors[0])
            descriptors = descriptors[1:]
            asker.settimeout(WAIT)
            _, uid = transport.peer(asker)
            arguments = json.loads(message)
            if not isinstance(arguments, dict):
                return
            refusal = self._refusal(arguments.get("ask"), uid)
            if refusal is None:
                ask = Ask(str(arguments["ask"]), arguments, descriptors, uid)
                try:
                    _thread.start_new_thread(self._answer, (asker, ask))
                except RuntimeError:  # no thread can be had, and the desk must not stay taken for that
                    self._busy.release()
                    refusal = "the process cannot start a thread now; ask again later"
                else:
                    asker, descriptors = None, []  # the thread's by now
            if asker is not None:
                say(asker, {"version": 1, "ok": False, "error": refusal})
        except Exception:
            pass
        finally:
            if asker is not None:
                asker.close()
            release(descriptors)

    def _refusal(self, name: object, uid: int) -> str | None:
        """Return why a question is not answered; None, and the desk is taken, when it is."""
        if uid not in {0, os.geteuid()}:
            return "only root and the user whose process it is may ask that"
        if not isinstance(name, str) or name not in self.answers:
            return f"this process does not consent to it; start it with 'vramledger run --allow-{name}'"
        if not self._busy.acquire(blocking=False):
            return "the process is busy with another question; ask again later"
        return None

    def _answer(self, asker: socket.socket, ask: Ask) -> None:
        try:
            try:
                told = {"version": 1, "ok": True, **self.answers[ask.name](ask)}
            except BaseException as error:
                told = {"version": 1, "ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
            say(asker, told)
        finally:
            asker.close()
            release(ask.descriptors)
            self._busy.release()


def say(asker: socket.socket, answer: dict[str, object]) -> None:
    """Send an answer; an asker who has gone is nobody's loss."""
    try:
        asker.send(json.dumps(answer).encode(), socket.MSG_NOSIGNAL)
    except (OSError, ValueError, TypeError):
        pass


def release(descriptors: list[int]) -> None:
    """Close what came with a message."""
    for descriptor in descriptors:
        try:
            os.close(descriptor)
        except OSError:
            pass
