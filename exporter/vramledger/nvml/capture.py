"""Make a recording of this host: the sampler's readings, masked, in a file that replays exactly.

Masked are UUIDs, users, program names that are not common ones, the ids and names in cgroup paths, and
what is no plain number or known word in a variable's value;
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
from vramledger.readings import DeviceReading, Owner, ParentFacts, ProcessFacts, Reading, encode

COMMON = (
    states.SHELLS
    | states.TERMINALS
    | states.LOGINS
    | states.SERVICE_MANAGERS
    | states.WRAPPERS
    | states.REAPERS
    | frozenset(
        "torchrun torch.distributed.run accelerate deepspeed ray raylet jupyter-lab jupyter-notebook"
        " ipykernel_launcher gunicorn uvicorn tritonserver vllm nvidia-cuda-mps nvidia-cuda-mps-server"
        " nvidia-cuda-mps-control Xorg nvidia-persistenced nvidia-smi dcgm-exporter vramledger"
        " multiprocessing.spawn multiprocessing.forkserver multiprocessing.resource_tracker"
        " java node systemd python".split()
    )
)
"""Names that say nothing about their user and everything about the situation."""

_INTERPRETER = re.compile(r"(?:python|pypy|perl|ruby)[\d.]*(?: -c)?|pt_\w+")


_PLAIN = re.compile(r"[-+]?\d*\.?\d*[A-Za-z]?|\d+=\d+[A-Za-z]?")
_WORDS = frozenset(
    "true false yes no on off default bfc platform cuda_async vmm cuda_malloc_async cuda_malloc memory_guard"
    " backend native cudamallocasync expandable_segments max_split_size_mb garbage_collection_threshold >"
    " roundup_power2_divisions per_process_memory_fraction release_lock_on_cudamalloc"
    " pinned_use_cuda_host_register pinned_num_register_threads max_non_split_rounding_mb".split()
)
"""What the allocators' variables may say in words; anything else could be anybody's."""
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
            settings=tuple((name, self._setting(value)) for name, value in facts.settings),
            owner=None if facts.owner is None else self._owner(facts.owner),
            parent=None if facts.parent is None else self._parent(facts.parent),
        )

    def _setting(self, value: str) -> str:
        """Mask a variable's value word by word: devices like everywhere else, the unknown by a stand-in."""
        return "".join(
            part if index % 2 else self._word(part)
            for index, part in enumerate(re.split(r"([,:\[\]\s])", value))
        )

    def _word(self, word: str) -> str:
        if _PLAIN.fullmatch(word) or word.lower() in _WORDS:
            return word
        if re.match(r"(GPU|MIG)-", word):
            # CUDA takes the beginning of a UUID for the whole.
            whole = [real for kind, real in self._names if kind.startswith("uuid-") and real.startswith(word)]
            return self._uuid(whole[0] if len(whole) == 1 else word)
        return self._name("value", word)

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
    readings: AsyncIterator[Reading | None], path: Path, *, head: bytes, seconds: float, mask: bool
) -> int:
    """Write a header and the readings of a span to a file; return how many readings there are.

    The file is opened when there is something to write: an older one of that name is not lost for nothing.

    Raises:
        DriverError: the very first reading says that the driver is out of use.
        StartupError: the file cannot be written.
    """
    masking = Mask()
    count = 0
    begun = 0.0
    out: gzip.GzipFile | None = None
    try:
        async with aclosing(readings) as stream:  # type: ignore[type-var]
            async for reading in stream:
                if reading is None:
                    break
                if out is None:
                    if reading.failure is not None:
                        raise DriverError(*reading.failure)
                    out = gzip.GzipFile(path, "wb", compresslevel=9)
                    out.write(head)
                    begun = reading.monotonic
                out.write(encode(masking.reading(reading) if mask else reading))
                count += 1
                if reading.monotonic - begun >= seconds:
                    break
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise StartupError(message) from error
    finally:
        if out is not None:
            out.close()
    return count
