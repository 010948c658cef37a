"""Make a recording of this host: the sampler's readings, masked, in a file that replays exactly.

Masked are UUIDs, users, program names that are not common ones, and the ids and names in cgroup paths;
each gets one stand-in throughout the file, so that relations stay. Pids, times and bytes stay.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from vramledger import states
from vramledger.errors import DriverError, StartupError
from vramledger.nvml.replay import header
from vramledger.readings import DeviceReading, Owner, ParentFacts, ProcessFacts, Reading, encode

COMMON = (
    states.SHELLS
    | states.TERMINALS
    | states.LOGINS
    | states.SERVICE_MANAGERS
    | states.WRAPPERS
    | states.REAPERS
    | frozenset(
        "torchrun torch.distributed.run accelerate deepspeed ray raylet jupyter-lab jupyter-notebook ipykernel_launcher"
        " gunicorn uvicorn tritonserver vllm nvidia-cuda-mps nvidia-cuda-mps-server nvidia-cuda-mps-control Xorg"
        " nvidia-persistenced nvidia-smi dcgm-exporter vramledger multiprocessing.spawn multiprocessing.forkserver"
        " multiprocessing.resource_tracker java node systemd python".split()
    )
)
"""Names that say nothing about their user and everything about the situation."""

_INTERPRETER = re.compile(r"(?:python|pypy|perl|ruby)[\d.]*(?: -c)?|pt_\w+")


_OWNER_KINDS = ("namespace", "pod", "container", "slurm_job", "unit", "notebook")


class Mask:
    """Replace what could identify a person, a customer or a card, consistently."""

    def __init__(self) -> None:
        """Start without any stand-ins."""
        self._names: dict[tuple[str, str], str] = {}

    def reading(self, reading: Reading) -> Reading:
        """Return a reading that may be published."""
        return replace(
            reading,
            boot_id=self._name("boot", reading.boot_id),
            # The sentences name the owners.
            ended=dict.fromkeys(reading.ended, "its owner has ended"),
            devices=tuple(self._device(device) for device in reading.devices),
            facts=tuple(self._facts(facts) for facts in reading.facts),
            hidden=None
            if reading.hidden is None
            else tuple(
                holder._replace(
                    command=self._program(holder.command),
                    user=None if holder.user is None else self._name("user", holder.user),
                )
                for holder in reading.hidden
            ),
            events=tuple(event._replace(uuid=self._uuid(event.uuid)) for event in reading.events),
        )

    def _name(self, kind: str, real: str) -> str:
        count = sum(1 for known, _ in self._names if known == kind)
        return self._names.setdefault((kind, real), f"{kind}-{count + 1}")

    def _uuid(self, real: str) -> str:
        kind, dash, _ = real.partition("-")
        number = int(self._name(f"uuid-{kind}", real).rsplit("-", 1)[1])
        return f"{kind}{dash}{number:08x}-0000-4000-8000-000000000000"

    def _program(self, name: str) -> str:
        if name in COMMON or _INTERPRETER.fullmatch(name) or states.base_name(name) in COMMON:
            return name
        stem, dot, suffix = name.rpartition(".")
        masked = self._name("program", stem or name)
        return f"{masked}.{suffix}" if dot and suffix in ("py", "sh", "jar", "R", "jl") else masked

    def _device(self, device: DeviceReading) -> DeviceReading:
        return replace(
            device,
            uuid=self._uuid(device.uuid),
            parent=None if device.parent is None else self._uuid(device.parent),
        )

    def _facts(self, facts: ProcessFacts) -> ProcessFacts:
        user = None if facts.user is None else self._name("user", facts.user)
        return replace(
            facts,
            uid=None if user is None else 1000 + int(user.rsplit("-", 1)[1]),
            user=user,
            comm=self._program(facts.comm)[:15],
            command=self._program(facts.command),
            cgroup=None if facts.cgroup is None else tuple(self._cgroup(line) for line in facts.cgroup),
            owner=None if facts.owner is None else self._owner(facts.owner),
            parent=None if facts.parent is None else self._parent(facts.parent),
        )

    def _owner(self, owner: Owner) -> Owner:
        """Mask each name, and write the owner's own anew from the masked ones."""
        masked = Owner(
            owner.type,
            "",
            **{kind: self._name(kind, real) for kind in _OWNER_KINDS if (real := getattr(owner, kind))},
        )
        names = {
            "pod": f"{masked.namespace}/{masked.pod}" if masked.namespace else masked.pod,
            "slurm": masked.slurm_job,
            "user": self._name("user", owner.name),
        }
        return masked._replace(name=names.get(owner.type) or getattr(masked, owner.type))

    def _parent(self, parent: ParentFacts) -> ParentFacts:
        return parent._replace(comm=self._program(parent.comm)[:15], command=self._program(parent.command))

    def _cgroup(self, line: str) -> str:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        return f"{number}:{controllers}:" + "/".join(self._segment(part) for part in path.split("/"))

    def _segment(self, part: str) -> str:
        """Keep the shape that owners are told by, mask its ids and names."""
        if part in (
            "",
            "..",
            "system.slice",
            "user.slice",
            "machine.slice",
            "init.scope",
            "kubepods",
            "docker",
        ):
            return part

        def stand_in(match: re.Match[str]) -> str:
            word = match.group()
            if re.fullmatch(r"[0-9a-f]{32,64}", word):
                return f"{int(self._name('id', word).rsplit('-', 1)[1]):0{len(word)}x}"
            if re.fullmatch(r"[0-9a-f]{8}([-_])[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{12}", word):
                mark = word[8]
                tail = int(self._name("pod", word).rsplit("-", 1)[1])
                return mark.join(["00000000", "0000", "4000", "8000", f"{tail:012x}"])
            return word

        masked = re.sub(r"[0-9a-f]{8}[-_][0-9a-f_-]{27}|[0-9a-f]{32,64}", stand_in, part)
        return masked if masked != part or _known_segment(part) else self._name("cgroup", part)


def _known_segment(part: str) -> bool:
    return bool(
        re.fullmatch(
            r"(user-\d+\.slice|user@\d+\.service|app\.slice|session\.slice|session-\w+\.scope|kubepods[\w-]*(\.slice)?"
            r"|besteffort|burstable|guaranteed|slurm|uid_\d+|job_\d+|step_\w+|task_\w+|libpod_parent|user|slurmstepd\.scope"
            r"|container|buildkit|podruntime|system)",
            part,
        )
    )


async def capture(
    readings: AsyncIterator[Reading | None], path: Path, *, seconds: float, mask: bool, note: str = ""
) -> int:
    """Write the readings of a span to a file; return how many there are.

    Raises:
        DriverError: the very first reading says that the driver is out of use.
        StartupError: the file cannot be written.
    """
    masking = Mask()
    count = 0
    begun: float | None = None
    try:
        with gzip.open(path, "wb", compresslevel=9) as out:
            out.write(header(note))
            async with aclosing(readings) as stream:  # type: ignore[type-var]
                async for reading in stream:
                    if reading is None:
                        break
                    if reading.failure is not None and not count:
                        raise DriverError(*reading.failure)
                    out.write(encode(masking.reading(reading) if mask else reading))
                    count += 1
                    begun = reading.monotonic if begun is None else begun
                    if reading.monotonic - begun >= seconds:
                        break
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise StartupError(message) from error
    return count
