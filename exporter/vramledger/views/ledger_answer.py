"""Write what a command gets when it asks for the ledger: a snapshot, and how its holdings have grown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vramledger.model.records import read_record, write_record
from vramledger.model.snapshot import Snapshot
from vramledger.views.timeline import HoldingGrowth, Key


class LedgerAnswer(NamedTuple):
    """The exporter's newest snapshot, and the growth of its holdings as the page shows it."""

    snapshot: Snapshot
    growth: tuple[tuple[Key, HoldingGrowth], ...] = ()


def write_answer(snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth]) -> bytes:
    """Return the text of an answer."""
    return write_record(LedgerAnswer(snapshot, tuple(growth.items())))


def read_answer(text: bytes) -> LedgerAnswer:
    """Read an answer.

    Raises:
        RecordError: it is not an answer of this version.
    """
    return read_record(text, LedgerAnswer)
