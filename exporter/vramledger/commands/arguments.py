"""Declare what several commands share: the types of their arguments, and groups of arguments."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from vramledger import config
from vramledger.errors import UsageError
from vramledger_agent.commands.parser import argparse_type, duration

_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
"""Braces and some other characters have a meaning in aiohttp's router, so they are not accepted."""


address = argparse_type(config.parse_listen_address, "address")
pod_labels = argparse_type(config.parse_pod_labels, "labels")
kubelet = argparse_type(config.parse_kubelet_address, "address")


def speed(text: str) -> float:
    """Read a factor above 0."""
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed; write for example 1 or 10")
    return factor


_SIZES = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def size(text: str) -> int:
    """Read a size in bytes: ``1048576``, ``128MiB``, ``1GiB``."""
    match = re.fullmatch(r"(\d{1,15})(|KiB|MiB|GiB)", text, flags=re.IGNORECASE | re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 128MiB")
    return int(match[1]) * _SIZES[match[2].upper()]


_STORAGE_MIN = 16 * 2**20
"""One segment of a host with many holders has some MiB, and the newest one is never removed."""


def storage_size(text: str) -> int:
    """Read how many bytes the storage may have."""
    found = size(text)
    if found < _STORAGE_MIN:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too small for a storage; give it at least {_STORAGE_MIN // 2**20}MiB"
        )
    return found


def path(text: str) -> str:
    """Read the path of the metrics page."""
    if not _PATH.fullmatch(text) or text.startswith(("/-/", "/api/")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a path for metrics; write for example /metrics, in letters, digits and _.~-,"
            " and not below /-/ or /api/"
        )
    return text


def source(text: str) -> str:
    """Read the source of the readings."""
    if text not in ("nvml", "auto") and not (text.startswith("replay:") and len(text) > len("replay:")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a source; use nvml, auto or replay:FILE")
    return text


def add_sampling(
    parser: argparse.ArgumentParser, *, calm: bool = False, idle: bool = False, collectors: bool = False
) -> None:
    """Declare the flags of sampling; ``calm``, ``idle`` and ``collectors`` add their flags."""
    default = config.SamplingConfig()
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--sample.interval", dest="interval", type=duration, default=default.interval, metavar="DURATION",
        help="time from one sample to the next (default 1s)",
    )  # fmt: skip
    group.add_argument(
        "--sample.timeout", dest="timeout", type=duration, default=default.timeout, metavar="DURATION",
        help="how long a sample waits for a GPU (default 1s)",
    )  # fmt: skip
    group.add_argument(
        "--path.procfs", dest="procfs", type=Path, default=default.procfs, metavar="DIR",
        help="where the host's /proc is (default /proc)",
    )  # fmt: skip
    group.add_argument(
        "--path.rootfs", dest="rootfs", type=Path, default=default.rootfs, metavar="DIR",
        help="where the host's root file system is (default /)",
    )  # fmt: skip
    if calm:
        group.add_argument(
            "--sample.calm-interval", dest="calm_interval", type=duration, default=None,
            metavar="DURATION",
            help="the same while every GPU goes on with what it does and holds, which is looked at once a "
            "--sample.interval (default five of these, at most 5s)",
        )  # fmt: skip
    if idle:
        group.add_argument(
            "--idle-after", dest="idle_after", type=duration, default=None, metavar="DURATION",
            help="a holding without any sign of work is idle after this time (default 10m, or as a "
            "recording says)",
        )  # fmt: skip
    if not collectors:
        return
    group = parser.add_argument_group("collectors")
    for name, (on, what) in config.COLLECTORS.items():
        if name == "pods":
            continue  # --pods.labels turns it on
        group.add_argument(
            f"--collector.{name}", dest=f"collector_{name}", default=on,
            action=argparse.BooleanOptionalAction,
            help=f"{what} (default {'on' if on else 'off'})",
        )  # fmt: skip


def add_pods(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of labels of pods."""
    group = parser.add_argument_group("labels of pods")
    group.add_argument(
        "--pods.labels", dest="pods_labels", type=pod_labels, default=(), metavar="LABEL,...",
        help="show these labels of pods; Kubernetes is asked for them (default none)",
    )  # fmt: skip
    group.add_argument(
        "--pods.node", dest="pods_node", default="", metavar="NAME",
        help="name of this node in the cluster (needed with --pods.labels)",
    )  # fmt: skip
    group.add_argument(
        "--pods.kubelet", dest="pods_kubelet", type=kubelet, default=None, metavar="ADDRESS",
        help="the node's kubelet, asked before the API server (default: ask the API server alone)",
    )  # fmt: skip
    group.add_argument(
        "--pods.credentials", dest="pods_credentials", type=Path, default=config.SERVICE_ACCOUNT,
        metavar="DIR",
        help="folder with the files token and ca.crt (default: those of the pod's service account)",
    )  # fmt: skip


def add_source(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the source of readings."""
    parser.add_argument(
        "--source", type=source, default="nvml", metavar="SOURCE",
        help="nvml, replay:FILE, or auto: the bundled recording if there is no driver (default nvml)",
    )  # fmt: skip
    parser.add_argument(
        "--replay.speed", dest="replay_speed", type=speed, default=1.0, metavar="FACTOR",
        help="how many recorded seconds are played in one second (default 1)",
    )  # fmt: skip


def add_control(parser: argparse.ArgumentParser) -> None:
    """Declare the flag of the exporter's control socket."""
    parser.add_argument(
        "--control.socket", dest="control_socket", type=Path, default=None, metavar="FILE",
        help=f"where commands reach the exporter (default ${config.CONTROL_VARIABLE}, or else "
        f"{config.CONTROL_SOCKET})",
    )  # fmt: skip


def control_socket(args: argparse.Namespace) -> Path:
    """Return where a command looks for the exporter."""
    return args.control_socket or Path(os.environ.get(config.CONTROL_VARIABLE) or config.CONTROL_SOCKET)


def sampling_config(args: argparse.Namespace) -> config.SamplingConfig:
    """Return what the sampler needs to know. Raises UsageError if a path or --pods.labels cannot be used."""
    on = frozenset(
        name
        for name, (default, _) in config.COLLECTORS.items()
        if getattr(args, f"collector_{name}", default)
    )
    if not (args.procfs / "stat").is_file():
        raise UsageError(
            f"--path.procfs={args.procfs} is not a proc file system; mount the host's /proc there"
        )
    calm = getattr(args, "calm_interval", 0.0)
    if calm is None:
        calm = min(config.CALM_INTERVALS * args.interval, config.CALM_INTERVAL_MAX)
    if calm > config.CALM_INTERVAL_MAX:
        raise UsageError(
            f"--sample.calm-interval is at most {config.CALM_INTERVAL_MAX:.0f}s; to sample less often, give "
            "--sample.interval"
        )
    if problem := _rootfs_problem(args.rootfs):
        raise UsageError(f"--path.rootfs={args.rootfs} {problem}; mount the host's root file system there")
    pods = _pods(args) if getattr(args, "pods_labels", ()) else None
    return config.SamplingConfig(
        interval=args.interval,
        calm_interval=calm,
        timeout=args.timeout,
        procfs=args.procfs,
        rootfs=args.rootfs,
        collectors=on if pods is None else on | {"pods"},
        pods=pods,
    )


def _pods(args: argparse.Namespace) -> config.PodConfig:
    if not re.fullmatch(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", args.pods_node):
        raise UsageError(
            f"--pods.labels needs the name of this node; {args.pods_node!r} in --pods.node is none"
        )
    return config.PodConfig(args.pods_labels, args.pods_node, args.pods_kubelet, args.pods_credentials)


def _rootfs_problem(rootfs: Path) -> str:
    """Say why a directory cannot be the host's root file system: an image may have an empty one."""
    try:
        with os.scandir(rootfs) as entries:
            return "" if any(entries) else "is empty"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
