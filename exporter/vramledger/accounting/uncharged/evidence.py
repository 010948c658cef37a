"""Say in words what a holder has of the bytes that NVML charges to no process, and how that is known."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Collection
from typing import NamedTuple

from vramledger.accounting.uncharged.solver import Range, alike
from vramledger.model.device_signs import LEAST_BYTES, MIB
from vramledger.model.snapshot import Grade, UnchargedBytes

GIB = 2**30

_PIDS_SHOWN = 5

_CREATOR = re.compile(r"(created by pid \d+ of (?!an unknown user,))(.*?)(, which ended at \d\d:\d\d UTC)")


class LeftEvidence(NamedTuple):
    """Memory of an ended holder that this one can have.

    Attributes:
        range: how many bytes.
        created: :func:`created`.
        heirs: the pids that can have them.
        hidden: a process that NVML does not list and that may have them too, None without one.
        elsewhere: the pids on other GPUs that may have them mapped.
    """

    range: Range
    created: str
    heirs: Collection[int]
    hidden: int | None
    elsewhere: Collection[int] = ()


class HolderEvidence(NamedTuple):
    """What is known of one holder's uncharged bytes.

    Attributes:
        share: how many of them it has.
        charged: what NVML charges to it.
        managed: how many of them can be managed memory.
        bound: its mappings of ``/dev/nvidia-uvm``, None when we may not read them.
        reported: managed memory that its agent reports, None without such a report.
        left: what ended holders left and this one can have.
        rivals: the other holders that can have some of the same bytes.
        matched: all mappings on the device are together as large as its uncharged bytes.
        late: some of these bytes came while we did not watch.
    """

    share: Range
    charged: int
    managed: Range
    bound: int | None
    reported: int | None
    left: Collection[LeftEvidence]
    rivals: Collection[int]
    matched: bool
    late: bool


def describe(known: HolderEvidence) -> UnchargedBytes:
    """Return what a holder has, with the grade and a sentence of the evidence."""
    share, managed = known.share, known.managed
    grade = Grade.SEEN if share.exact and not known.late else Grade.INFERRED
    reasons = []
    if managed.most >= LEAST_BYTES:
        maps = "its mappings, which we may not read"
        if known.bound is not None:
            maps = f"its {_size(known.bound)} of /dev/nvidia-uvm mappings"
        if known.reported and alike(known.reported, known.bound or 0):
            maps += f" and its agent's report of {_size(known.reported)}"
            grade = Grade.PROVEN if share.exact else grade
        verb = "are" if managed.exact else "can be"
        reasons.append(f"{_amount(managed)} {verb} managed memory, from {maps}")
    for left in known.left:
        grade = Grade.INFERRED
        hidden = "" if left.hidden is None else f" or hidden pid {left.hidden}"
        others = f" or {_pids(left.elsewhere)} on another GPU" if left.elsewhere else ""
        holds = "still has them" if len(left.heirs) == 1 else "still have them"
        reasons.append(f"{_amount(left.range)} {left.created}; {_pids(left.heirs)}{others}{hidden} {holds}")
    if not share.exact:
        reasons.append(
            f"{_pids(known.rivals)} can have them too"
            if known.rivals
            else "a process that NVML does not list here can have them too"
        )
    elif known.matched:
        reasons.append("the mappings here are as large as what NVML charges to nobody")
    elif managed.exact:
        reasons.append("nobody else here can have them")
    return UnchargedBytes(
        least=share.least,
        most=share.most,
        managed=min(share.least, managed.most if share.exact else managed.least),
        grade=grade,
        why="; ".join((f"NVML charges {_size(known.charged)}", *reasons)),
    )


def created(pid: int, user: str | None, ended: float) -> str:
    """Say who created memory that is still there, and when its creator ended."""
    when = dt.datetime.fromtimestamp(ended, dt.timezone.utc)
    return f"created by pid {pid} of {user or 'an unknown user'}, which ended at {when:%H:%M} UTC"


def rename_creators(text: str, rename: Callable[[str], str]) -> str:
    """Give each user whom :func:`created` has named in a text another name."""
    return _CREATOR.sub(lambda found: found[1] + rename(found[2]) + found[3], text)


def _pids(pids: Collection[int]) -> str:
    known = sorted(set(pids))
    more = f" and {len(known) - _PIDS_SHOWN} more" if len(known) > _PIDS_SHOWN else ""
    return f"pid {', '.join(map(str, known[:_PIDS_SHOWN]))}{more}"


def _amount(found: Range) -> str:
    if found.exact:
        return _size(found.most)
    return f"{_size(found.least)} to {_size(found.most)}" if found.least else f"up to {_size(found.most)}"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count // MIB} MiB"
