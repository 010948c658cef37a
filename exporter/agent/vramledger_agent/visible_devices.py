"""Find which GPUs this process has, from files and variables: without any call to the driver.

CuPy's and RMM's functions answer for the calling thread's current device. If a thread of ours chose another
device, it would make a context there, of about 500 MiB. So such a function is called only where there is
exactly one device, and only when the driver is already in use.
"""

from __future__ import annotations

import functools
import os
import re

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
