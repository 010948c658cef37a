"""Parse Slurm's names for the cgroups of its jobs and steps. Pure: no file is opened."""

from __future__ import annotations

import re
from typing import NamedTuple

_DIRECTORY = re.compile(r"slurm(?:_[\w.-]+)?")
SCOPE = re.compile(r"(?:[\w.-]+_)?slurmstepd\.scope")
"""The scope's name has a suffix where several slurmd share a host."""
_JOB_SEGMENT = re.compile(r"job_(?P<job>[0-9]{1,10})|(?P<sluid>s[0-9A-Z]{13})")
_STEP_SEGMENT = re.compile(r"step_(?P<step>[a-z0-9]{1,16}(?:\.[a-z0-9]{1,16})?)")
_UID_SEGMENT = re.compile(r"uid_(?P<uid>[0-9]{1,10})")


class SlurmMark(NamedTuple):
    """A Slurm job in a cgroup path; ``step`` is empty and ``uid`` None if the path does not show them.

    ``job`` is the number, or from Slurm 26.05 on the SLUID (``s5K1KKYAYG5D00``).
    """

    job: str
    step: str = ""
    uid: int | None = None


def begins_slurm(segment: str, position: int, segments: list[str]) -> bool:
    """Tell whether the rest of a path is Slurm's: its scope, or its directory with a user's below it."""
    after = segments[position + 1] if position + 1 < len(segments) else ""
    if SCOPE.fullmatch(segment):
        return _JOB_SEGMENT.fullmatch(after) is not None
    return _DIRECTORY.fullmatch(segment) is not None and _UID_SEGMENT.fullmatch(after) is not None


def parse_slurm(segments: list[str]) -> SlurmMark | None:
    """Read job, step and user from the segments after Slurm's own; None if they name no job."""
    job, step = "", ""
    uid: int | None = None
    for segment in segments[:4]:
        if match := _UID_SEGMENT.fullmatch(segment):
            uid = int(match["uid"])
        elif not job and (match := _JOB_SEGMENT.fullmatch(segment)):
            job = match["job"] or match["sluid"]
        elif job and not step and (match := _STEP_SEGMENT.fullmatch(segment)):
            step = match["step"]
    return SlurmMark(job, step, uid) if job else None
