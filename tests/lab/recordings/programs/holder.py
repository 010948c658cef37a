"""Hold memory on a device, idle or busy, until the end; the simplest holder."""

from __future__ import annotations

import argparse

from tests.lab.recordings.programs import cue, gpu


def hold(  # noqa: PLR0913 each is a flag
    role: str,
    size: int,
    device: int = 0,
    framework: str = "cuda",
    *,
    busy: bool = False,
    silent: bool = False,
) -> None:
    """Hold ``size`` bytes on a device and never return; ``silent``: nobody can read its output then."""
    cue.enter()
    card = gpu.open_gpu(device, framework)
    card.hold(size)
    if busy:
        card.work(0.2)
    cue.announce(role)
    if silent:
        cue.fall_silent()
    while busy:
        card.work(0.2)
    cue.wait()


def main() -> None:
    """Hold what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True)
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--framework", choices=["cuda", "torch"], default="cuda")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--silent", action="store_true")
    args = parser.parse_args()
    hold(args.role, int(args.gib * gpu.GIB), args.device, args.framework, busy=args.busy, silent=args.silent)


if __name__ == "__main__":
    main()
