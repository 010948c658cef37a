"""Define how the exporter starts its sampler: command line, configuration, exit statuses.

This is a separate module, so that the exporter need not load what only the sampler uses: the driver's
bindings alone take 3.5 MiB and 11 ms.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vramledger
from vramledger.config import ListenAddress, PodConfig, SamplingConfig

DEVICES_CHANGED = 4
"""The exit status that requests an immediate restart: NVML lists only the devices that existed at its
initialisation."""

DRIVER_FAILED = 3
"""The exit status after a failure of the driver as a whole, which the last line has reported."""

_PACKAGE_ROOT = str(Path(vramledger.__file__).parents[1])
_PROGRAM = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append(sys.argv.pop(1)); "
    "from vramledger.{} import main; main()"
)
"""This is not ``-m``, which puts the current directory first on the path: root's sampler would import a
``queue.py`` that somebody left there. (``-P`` exists since 3.11, and ``-I`` hides the user's own
packages.)"""


def child_command(module: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Return the command line of a child process of the exporter: a module of ours that has a ``main``.

    ``flags`` are the interpreter's.
    """
    return [sys.executable, *flags, "-c", _PROGRAM.format(module), _PACKAGE_ROOT, *arguments]


def sampler_command(*arguments: str) -> list[str]:
    """Return the command line of a sampler; the arguments are its configuration, and those of the log."""
    return child_command("sampling.sampler", *arguments)


def starter_command(*arguments: str) -> list[str]:
    """Return the command line of the process that starts samplers with these arguments.

    It needs no installed package (``-S``), which a start would look for.
    """
    return child_command("sampling.starter", *sampler_command(*arguments), flags=("-S",))


def launch_counter_command(*arguments: str) -> list[str]:
    """Return the command line of the process that counts launches."""
    return child_command("sampling.launch_counter", *arguments)


def encode_config(config: SamplingConfig) -> str:
    """Write the sampler's only argument."""
    return json.dumps(
        {
            "interval": config.interval,
            "calm_interval": config.calm_interval,
            "timeout": config.timeout,
            "procfs": str(config.procfs),
            "rootfs": str(config.rootfs),
            "collectors": " ".join(sorted(config.collectors)),
            "pods": None if config.pods is None else asdict(config.pods),
        },
        default=str,
    )


def decode_config(text: str) -> SamplingConfig:
    """Read what :func:`encode_config` wrote."""
    raw: Mapping[str, Any] = json.loads(text)
    return SamplingConfig(
        interval=float(str(raw["interval"])),
        calm_interval=float(str(raw["calm_interval"])),
        timeout=float(str(raw["timeout"])),
        procfs=Path(str(raw["procfs"])),
        rootfs=Path(str(raw["rootfs"])),
        collectors=frozenset(str(raw["collectors"]).split()),
        pods=None if raw["pods"] is None else _pods(**raw["pods"]),
    )


def _pods(labels: list[str], node: str, kubelet: Mapping[str, Any] | None, credentials: str) -> PodConfig:
    address = None if kubelet is None else ListenAddress(**kubelet)
    return PodConfig(tuple(labels), node, address, Path(credentials))
