"""Define how the exporter starts its children; apart, as the driver's bindings take 3.5 MiB."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

import vramledger
import vramledger_agent
from vramledger.config import SamplingConfig

DEVICES_CHANGED = 4
"""The exit status that asks for a restart: NVML lists only the devices of its initialisation."""

DRIVER_FAILED = 3
"""The exit status after a failure of the driver as a whole, which the last line has reported."""

_ROOTS = list({str(Path(str(each.__file__)).parents[1]): None for each in (vramledger, vramledger_agent)})
"""Where our two packages are: in one folder, or each in its own."""

_PROGRAM = (
    f"import gc, sys; gc.disable(); sys.path[:1] == [''] and sys.path.pop(0); sys.path += {_ROOTS}; "
    "from vramledger.{} import main; gc.freeze(); gc.enable(); main()"
)
"""This is not ``-m``, which puts the current directory first on the path: root's sampler would import a
``queue.py`` that somebody left there. (``-P`` exists since 3.11, and ``-I`` hides the user's own
packages.) What is imported stays: to look for garbage in it is a fifth of a start."""


def child_command(module: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Return the command line of a child, a module of ours with ``main``; ``flags`` are Python's."""
    return [sys.executable, *flags, "-c", _PROGRAM.replace("{}", module), *arguments]


def sampler_command(*arguments: str) -> list[str]:
    """Return the command line of a sampler; the arguments are its configuration, and those of the log."""
    return child_command("sampling.sampler", *arguments)


def starter_command(*arguments: str) -> list[str]:
    """Return the starter's command line; ``-S``, as it needs no package that a start would look for."""
    return child_command("sampling.starter", *sampler_command(*arguments), flags=("-S",))


def encode_config(config: SamplingConfig) -> str:
    return msgspec.json.encode(config, enc_hook=str).decode()


def decode_config(text: str) -> SamplingConfig:
    return msgspec.json.decode(text, type=SamplingConfig, dec_hook=lambda kind, raw: kind(raw))
