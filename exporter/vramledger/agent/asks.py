"""What others may ask of this process over the agent's socket: who may, and who answers.

A module that answers is named in :data:`MODULES` and has a function ``answer(ask)``. It is imported when the
agent's thread starts, for an import later might find the program in any state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

MODULES: dict[str, str] = {
    "reclaim": "vramledger.agent.reclaiming",
    "snapshot": "vramledger.agent.recording",
}
"""By what is asked (which is also the consent it takes): the module whose ``answer()`` answers it."""


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
