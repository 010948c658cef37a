"""Find out what our own process may see of a host."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_CAPABILITIES = {"dac_read_search": 2, "sys_ptrace": 19, "sys_admin": 21}
"""Bit numbers of ``linux/capability.h``."""


class OwnRights(NamedTuple):
    """Our effective capabilities, ``hidepid`` (others' processes are hidden), ``wsl`` (Linux in Windows)."""

    uid: int
    capabilities: frozenset[str]
    hidepid: bool
    wsl: bool = False


def read_own_rights(procfs: Path) -> OwnRights:
    """Return what we may do; what cannot be read counts as not allowed."""
    effective = 0
    for line in _read_lines(procfs / "self" / "status"):
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    names = frozenset(name for name, bit in _CAPABILITIES.items() if effective >> bit & 1)
    mounts = [line.split() for line in _read_lines(procfs / "self" / "mounts")]
    hidepid = any(
        len(mount) > 3  # noqa: PLR2004 device, directory, type, options
        and _unescape(mount[1]) == str(procfs)
        and mount[2] == "proc"
        and any(
            each.startswith("hidepid=") and each not in ("hidepid=0", "hidepid=off")
            for each in mount[3].split(",")
        )
        for mount in mounts
    )
    return OwnRights(os.geteuid(), names, hidepid, is_wsl(procfs))


def is_wsl(procfs: Path) -> bool:
    """Tell whether this is a Linux in Windows (WSL2), by the name of its kernel."""
    return any("microsoft" in line.lower() for line in _read_lines(procfs / "sys" / "kernel" / "osrelease"))


def _unescape(directory: str) -> str:
    """Return a path of a mount table as it is: the kernel writes some characters as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), directory)


def _read_lines(path: Path) -> list[str]:
    try:
        # A path is bytes, which Python shows in this way whatever the locale is.
        return os.fsdecode(path.read_bytes()).split("\n")
    except OSError:
        return []
