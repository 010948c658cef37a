"""Declare what the agent reads from a framework: whether it is there, has memory, and what it holds.

A provider is a module of this package that the framework's declaration names, with a function
``make_provider()``. The module is imported when the program starts to import the framework, never before, so
it may import what the framework imports anyway. The rules for every method: make no GPU call, initialise
nothing, change no setting, reset no peak. An exception is caught and counted as an error of this provider;
the program never sees it. A provider that takes more than :data:`SLOW_READ_SECONDS` three times in a row is
paused for a while.

Which GPUs a process has is found from files and variables, without any call to the driver. CuPy's and RMM's
functions answer for the calling thread's current device. If a thread of ours chose another device, it would
make a context there, of about 500 MiB. So such a function is called only where there is exactly one device,
and only when the driver is already in use.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from vramledger_agent.program_errors import belongs_to_program

_DEVICE_FILE = re.compile(r"nvidia\d+")

_OTHER_GPU_FILES = frozenset(("dxg", "kfd", "nvhost-gpu"))
"""GPUs in the Windows Subsystem for Linux, of AMD, and in a Tegra."""

_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ("", "-1"), "NVIDIA_VISIBLE_DEVICES": ("void", "none")}
"""The values of two variables that hide every GPU."""


def has_open_device(descriptors: str = "/proc/self/fd") -> bool:
    """Return whether this process has a GPU open, which is true from its first call of CUDA on."""
    try:
        names = os.listdir(descriptors)
    except OSError as error:
        if belongs_to_program(error):
            raise
        return False
    for name in names:
        try:
            target = os.readlink(f"{descriptors}/{name}")
        except OSError as error:  # closed meanwhile
            if belongs_to_program(error):
                raise
            continue
        directory, _, file = target.rpartition("/")
        if directory == "/dev" and _DEVICE_FILE.fullmatch(file):
            return True
    return False


def at_most_one(devices: str = "/dev") -> bool:
    """Return whether CUDA can see at most one GPU: the variable names one, or the host has one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return "," not in visible
    try:
        names = os.listdir(devices)
    except OSError as error:
        if belongs_to_program(error):
            raise
        return False
    return sum(1 for name in names if _DEVICE_FILE.fullmatch(name)) == 1


def may_exist() -> bool:
    """Return whether this process may use a GPU: the host has one, and the environment does not hide it."""
    hidden = any(os.environ.get(name) in values for name, values in _NO_DEVICES.items())
    return not hidden and has_device_files()


@functools.cache
def has_device_files(devices: str = "/dev") -> bool:
    """Return whether the host has a GPU of any make; it is asked at every import."""
    try:
        names = os.listdir(devices)
    except OSError as error:
        if belongs_to_program(error):
            raise
        return True
    return any(_DEVICE_FILE.fullmatch(name) or name in _OTHER_GPU_FILES for name in names)


SLOW_READ_SECONDS = 0.005
"""The longest time that a reading may take, because it may hold the interpreter's lock all that time."""


class OutOfMemoryMessage:
    """What a framework's error says of a failed allocation: the device and the bytes, None if not known."""

    __slots__ = ("ordinal", "requested")

    def __init__(self, ordinal: int | None, requested: int | None) -> None:
        self.ordinal = ordinal
        self.requested = requested


class Provider:
    """One framework in this process, by its declared ``name``; these defaults report no memory."""

    name = ""

    def hook_initialisation(self, announce: Callable[[], None]) -> bool:
        """Have ``announce()`` called once the allocator is initialised, if the framework can do that.

        Called once, on the thread that imports the framework, after the module that its declaration names was
        imported. ``announce`` never raises, takes any arguments, and may be called on any thread and more
        than once. Returns True when it will be called. False when the framework has no such moment: then
        :meth:`may_initialise` decides.
        """
        del announce
        return False

    def may_initialise(self) -> bool:
        """Return whether it may make an allocator without announcing it: then it is polled every 2 s."""
        return may_exist() or self.is_initialised()

    def is_initialised(self) -> bool:
        """Return whether the framework has an allocator now; takes microseconds, also during its import."""
        return False

    def has_given_up(self) -> bool:
        """Return whether the start that the framework announced has ended without an allocator."""
        return False

    def start(self) -> None:
        """Prepare for :meth:`read`: called once, when the allocator is initialised, on any thread.

        After a fork the child has new providers. Those whose framework was initialised in the parent are
        gone, because the child cannot use that framework.
        """

    def update(self) -> None:
        """Update what must be watched all the time: the agent calls this even without an exporter."""

    def refresh(self) -> None:
        """Read again what :meth:`read` returns, between two turns: what is watched stays as it is."""

    def read(self) -> dict[str, object] | None:
        """Return the framework's entry of the report, None while there is nothing to report.

        Called at every report, on the agent's thread, after :meth:`start`. A key whose value is None is left
        out of the report: not known is never zero.
        """
        return None

    def recognise_out_of_memory(self, error: BaseException) -> OutOfMemoryMessage | None:
        """Return what the error that ends the program says of a failed GPU allocation, or None."""
        del error
        return None

    def stop(self) -> None:
        """Undo what :meth:`start` hooked into the program, as far as the framework allows."""


class OneDeviceProvider(Provider):
    """A framework that answers for the calling thread's device: it is read where there can be only one."""

    def may_initialise(self) -> bool:
        """Return whether there is a GPU; :meth:`is_initialised` is too slow to ask it at each import."""
        return may_exist()

    def is_initialised(self) -> bool:
        return self.name in sys.modules and has_open_device()

    def read(self) -> dict[str, object] | None:
        module = sys.modules.get(self.name)
        if module is None:
            return None
        found = self.read_device(module) if at_most_one() else None
        return {
            "framework": self.name,
            "version": getattr(module, "__version__", None),
            "supported": found is not None,
            **(found or {"devices": []}),
        }

    def read_device(self, module: Any) -> dict[str, object] | None:  # noqa: ANN401 it is not installed here
        """Return the entry's figures; None where the program does not count."""
        raise NotImplementedError


def module_version(module: str) -> str | None:
    """Return the version that a module of the program states; None if it states none."""
    version = getattr(sys.modules.get(module), "__version__", None)
    return str(version) if version else None


def read_environment(names: Iterable[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


UNITS = {"b": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_REQUESTED = re.compile(
    r"(?:allocate|allocating|request for) (\d[\d,]*(?:\.\d+)?)\s?(bytes|[KMGT]iB|B)\b", re.IGNORECASE
)
_ORDINAL = re.compile(r"device ordinal (\d+)")
_TENSOR = re.compile(r"allocating tensor with shape\s?\[([\d,]*)\] and type (\w+) on \S*GPU:(\d+)")
_TYPE_BYTES = {
    "float": 4,
    "half": 2,
    "double": 8,
    "bfloat16": 2,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def read_requested(text: str) -> int | None:
    """Return the bytes of ``allocate 1,024 bytes`` or ``allocate 1.50GiB``; None if the text has neither."""
    found = _REQUESTED.search(text)
    if found is None:
        return None
    return int(float(found[1].replace(",", "")) * UNITS[found[2].lower()])


def read_ordinal(text: str) -> int | None:
    """Return the number after ``device ordinal``; None if the text has none."""
    found = _ORDINAL.search(text)
    return None if found is None else int(found[1])


def read_tensor(text: str) -> OutOfMemoryMessage | None:
    """Return what TensorFlow's message says of a tensor on a GPU; None if it is about something else."""
    found = _TENSOR.search(text)
    if found is None:
        return None
    width = _TYPE_BYTES.get(found[2])
    count = prod(int(length) for length in found[1].split(",") if length)
    return OutOfMemoryMessage(int(found[3]), None if width is None else count * width)
