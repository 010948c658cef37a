"""Map Slurm's numbers of GPUs to device files, and parse the names of its cgroups. Pure: no file is opened.

Slurm counts the GPUs of a node in the order of gres.conf. This number, which ``SLURM_JOB_GPUS`` and
``CUDA_VISIBLE_DEVICES`` show, is neither NVML's index nor that of ``/dev/nvidiaN``: with
``File=/dev/nvidia[2-3]`` number 0 is ``/dev/nvidia2``. ``slurmd -G`` prints what slurmd itself has made of
slurm.conf, gres.conf and AutoDetect, in the same order and with the same words, so one reader is enough for
both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

_WORD = re.compile(r"(\w+)=(\S+)")
_RANGES = re.compile(r"\[([\d,-]+)\]")
_GPU = re.compile(r".*/nvidia(\d{1,4})")
_CAPABILITY = re.compile(r".*/nvidia-cap(\d{1,6})")
_CAPABILITY_NAME = re.compile(r"gpu(\d+)/gi(\d+)(?:/ci(\d+))?/access (\d+)", re.ASCII)
_MAX_GPUS = 1024

Capabilities = Mapping[int, str]
"""What the numbers N of ``/dev/nvidia-caps/nvidia-capN`` stand for: ``gi1``, or ``gi1/ci0``."""


def parse_capabilities(text: str) -> dict[int, str]:
    """Read ``/proc/driver/nvidia-caps/mig-minors``, which names the device files of MIG instances."""
    return {
        int(match[4]): f"gi{match[2]}" + (f"/ci{match[3]}" if match[3] else "")
        for match in _CAPABILITY_NAME.finditer(text)
    }


def parse_gres(text: str, capabilities: Capabilities | None = None) -> tuple[str, ...] | None:
    """Return the device of each of Slurm's numbers, in their order; None when the text does not say it.

    A device is ``nvidia2`` for ``/dev/nvidia2``, or ``nvidia2/gi1`` for an instance of it.
    """
    found: dict[str, list[str]] = {}
    for written in text.splitlines():
        line = written.partition("#")[0]
        words = {key.lower(): value for key, value in _WORD.findall(line)}
        if "autodetect" in words and words["autodetect"].lower() != "off" and "file" not in words:
            return None
        if line.strip().lower().startswith("include"):
            return None
        if words.get("name", "").lower() != "gpu" or words.get("count") == "0":
            continue
        files = words.get("file") or words.get("multiplefiles")
        if files is None or files == "(null)":
            return None
        devices = list(_devices(list(_expand(files)), capabilities or {}))
        of_node = found.setdefault(words.get("nodename", ""), [])
        if not devices or len(of_node) + len(devices) > _MAX_GPUS:
            return None
        of_node += devices
    distinct = {tuple(each) for each in found.values()}
    return distinct.pop() if len(distinct) == 1 and ("" not in found or len(found) == 1) else None


def _devices(files: list[str], capabilities: Capabilities) -> Iterator[str]:
    """Yield the devices of one line: one for each file of a GPU, or the instance that it names."""
    numbers = [match[1] for each in files if (match := _GPU.fullmatch(each))]
    named = [int(match[1]) for each in files if (match := _CAPABILITY.fullmatch(each))]
    if not named:
        yield from (f"nvidia{number}" for number in numbers)
    elif len(numbers) == 1 and (names := [capabilities[each] for each in named if each in capabilities]):
        yield f"nvidia{numbers[0]}/{max(names, key=len)}"


def _expand(files: str) -> Iterator[str]:
    """Yield the files of ``/dev/nvidia[0-1,3],/dev/nvidia7``."""
    for word in re.split(r",(?![^\[]*\])", files):
        parts = _RANGES.split(word)
        choices = [[part] if index % 2 == 0 else list(_numbers(part)) for index, part in enumerate(parts)]
        yield from ("".join(each) for each in product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit() and int(last or first) - int(first) < _MAX_GPUS:
            yield from (str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))


def devices_of(written: str, gres: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the devices of ``SLURM_JOB_GPUS`` (``0,2-3``); None when one of them is not known."""
    found: list[str] = []
    for word in written.split(","):
        if re.fullmatch(r"(?:GPU|MIG)-[\w/-]{1,80}", word, re.ASCII):
            found.append(word)
            continue
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", word, re.ASCII)
        if match is None or gres is None:
            return None
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not numbers or numbers[-1] >= len(gres):
            return None
        found += [gres[number] for number in numbers]
    return tuple(found) or None


_DIRECTORY = re.compile(r"slurm(?:_[\w.-]+)?")
SCOPE = re.compile(r"(?:[\w.-]+_)?slurmstepd\.scope")
"""The scope's name has a suffix where several slurmd share a host."""
_JOB_SEGMENT = re.compile(r"job_(?P<job>[0-9]{1,10})|(?P<sluid>s[0-9A-Z]{13})")
_STEP_SEGMENT = re.compile(r"step_(?P<step>[a-z0-9]{1,16}(?:\.[a-z0-9]{1,16})?)")
_UID_SEGMENT = re.compile(r"uid_(?P<uid>[0-9]{1,10})")


class SlurmMark(NamedTuple):
    """A Slurm job in a cgroup path, by number or (26.05) SLUID; ``step`` and ``uid`` may be missing."""

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
