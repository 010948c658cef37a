"""Decide how a Kubernetes node is marked, from what the exporter says of it again and again.

Pure: observations in, marks out. It fails closed:

- a taint is set only for a leftover that every answer of a whole span has named;
- it is removed only when every answer of a whole span was "clean", and none of the processes for which it was
  set holds memory any more: an exporter that has restarted may not know that they are leftovers;
- an answer that does not come, is old, or says "cannot tell" changes no taint, and makes the condition
  Unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from vramledger.model.public_ledger import LeftoverReason, Leftovers
from vramledger.model.records import RecordError, read_record, write_record
from vramledger_agent.printable import printable

CONDITION = "GpuMemoryLeftOver"
"""The type of the node's condition. As with MemoryPressure, True is the bad news."""

MAX_MESSAGE_CHARS = 1024
MAX_ANNOTATED = 64
"""The maximum number of processes in the annotation: with more of them, one that is left is among these."""

MAX_AGE = 60.0
"""Seconds after which a sample is too old to say anything. The exporter samples every second."""

Process = tuple[int, int]
"""Pid, and start time in ticks since boot."""


class Leftover(NamedTuple):
    """What is left over: a device, the kind of leftover, and the process if there is one."""

    uuid: str
    kind: str
    process: Process | None


class Observation(NamedTuple):
    """One answer of the exporter."""

    verdict: str  # ``clean``, ``not-clean`` or ``cannot-tell``
    message: str  # the reasons, one line
    leftovers: frozenset[Leftover] = frozenset()  # what makes a device not clean
    holders: frozenset[Process] = frozenset()  # every process that holds memory, guilty or not


def cannot_tell(why: str) -> Observation:
    """Return the observation of an exporter that said nothing usable."""
    return Observation("cannot-tell", shorten(why))


def shorten(text: str) -> str:
    """Return a text that fits into a condition."""
    text = printable(text)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[: MAX_MESSAGE_CHARS - 1]}…"


def read_answer(answer: object, now: float) -> Observation:
    """Read what ``/api/v1/leftovers`` said, at a Unix time."""
    try:
        said = msgspec.convert(answer, Leftovers)
    except msgspec.ValidationError:
        return cannot_tell(
            "the exporter's answer has another form; use the vramledger that runs the exporter"
        )
    if said.version != 1:
        return cannot_tell("the exporter's answer is of another version")
    reasons = [(device, reason) for device in said.devices for reason in device.reasons]
    telling = [
        f"GPU {device.gpu}: {reason.said}"
        for device, reason in reasons
        if reason.counts or (said.verdict == "cannot-tell" and device.verdict == said.verdict)
    ]
    message = shorten("; ".join(telling) or "no GPU holds leftovers")
    if said.verdict == "cannot-tell":
        return Observation(said.verdict, message)
    if said.time is None or not -MAX_AGE <= now - said.time <= MAX_AGE:
        return cannot_tell("the exporter's newest sample is not new")
    if not said.devices:
        return cannot_tell("the driver lists no GPU")
    leftovers = frozenset(
        Leftover(device.uuid, reason.kind, _process(reason)) for device, reason in reasons if reason.counts
    )
    holders = frozenset(found for _, reason in reasons if (found := _process(reason)) is not None)
    return Observation(said.verdict, message, leftovers, holders)


def _process(reason: LeftoverReason) -> Process | None:
    return None if reason.pid is None or reason.start is None else (reason.pid, reason.start)


class Recorded(msgspec.Struct, frozen=True):
    """The annotation beside a taint: for which processes it was set, and in which boot of the node."""

    boot: str
    processes: frozenset[Process]

    def to_text(self) -> str:
        """Write the annotation."""
        listed = sorted(self.processes)[:MAX_ANNOTATED]
        return write_record({"boot": self.boot, "processes": listed}).decode()


def read_recorded(text: str) -> Recorded | None:
    """Read an annotation; None when it is not one of ours."""
    try:
        return read_record(text, Recorded)
    except RecordError:
        return None


@dataclass(frozen=True, slots=True)
class NodeMarks:
    """The marks of a node."""

    tainted: bool  # it has our taint
    annotation: str = ""  # the text beside the taint; empty without one
    status: str = ""  # of the condition, ``True``, ``False`` or ``Unknown``; empty when it has none
    message: str = ""  # of the condition


class NodeJudge:
    """Follow the exporter's answers, and say how the node should be marked."""

    def __init__(self, after: float, gap: float, boot: str) -> None:
        """Start without knowledge.

        ``after``: seconds for which the same must be seen before a mark changes. ``gap``: seconds between two
        answers after which nothing is known of the time between them. ``boot``: the id of this boot of the
        node.
        """
        self._after = after
        self._gap = gap
        self._boot = boot
        self._last: float | None = None
        self._since = 0.0
        self._newest = cannot_tell("no answer yet")
        self._seen: dict[Leftover, float] = {}

    def observe(self, observation: Observation, now: float) -> None:
        """Take an answer in, at a monotonic time."""
        broken = self._last is None or now - self._last > self._gap
        if broken or observation.verdict != self._newest.verdict:
            self._since = now
        if broken:
            self._seen = {}
        self._seen = {each: self._seen.get(each, now) for each in observation.leftovers}
        self._newest, self._last = observation, now

    def marks(self, present: NodeMarks, now: float) -> NodeMarks:
        """Return how the node should be marked, given how it is marked now."""
        newest = self._newest
        steady = now - self._since >= self._after
        lasting = {each for each, since in self._seen.items() if now - since >= self._after}
        if newest.verdict == "not-clean" and lasting:
            return self._tainted(present, lasting)
        if newest.verdict == "clean" and steady:
            kept = self._kept(present)
            if kept:
                return replace(present, status="True", message=kept)
            return NodeMarks(tainted=False, status="False", message=newest.message)
        if newest.verdict == "cannot-tell" and steady:
            return replace(present, status="Unknown", message=newest.message)
        return present

    def _tainted(self, present: NodeMarks, lasting: set[Leftover]) -> NodeMarks:
        guilty = frozenset(each.process for each in lasting if each.process is not None)
        before = read_recorded(present.annotation) if present.tainted else None
        if before is not None and before.boot == self._boot:
            # A process that was guilty before stays recorded while it holds memory.
            guilty |= before.processes & self._newest.holders
        annotation = Recorded(self._boot, guilty).to_text()
        return NodeMarks(tainted=True, annotation=annotation, status="True", message=self._newest.message)

    def _kept(self, present: NodeMarks) -> str:
        """Say why a taint stays although the exporter calls the node clean; empty if it does not stay."""
        if not present.tainted or not present.annotation:
            return ""
        recorded = read_recorded(present.annotation)
        if recorded is None:
            return "the annotation beside the taint cannot be read; remove the annotation to let the taint go"
        if recorded.boot != self._boot:
            return ""
        left = sorted(pid for pid, start in recorded.processes & self._newest.holders)
        if not left:
            return ""
        pids = ", ".join(map(str, left[:8]))
        return f"was found left over before the exporter restarted, and still holds memory: pid {pids}"
