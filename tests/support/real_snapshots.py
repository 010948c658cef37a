"""PyTorch's snapshots of six steps of a transformer on an H200, with torch 2.11, recorded from the start.

The outputs of an evaluation without ``no_grad`` are kept. Only the names of the files were replaced.
"""

import gzip
from pathlib import Path

from vramledger_agent.torch_snapshots.safe_pickle import load_plain
from vramledger_agent.torch_snapshots.snapshot import AllocationSnapshot, parse_snapshot

_DIRECTORY = Path(__file__).parents[1] / "recordings" / "torch_snapshots"

NAMES = ("training", "training-expandable")
"""Without and with expandable segments."""


def unpack(name: str, directory: Path) -> Path:
    """Write one of the snapshots into a directory, as PyTorch wrote it, and return its path."""
    path = directory / f"{name}.pickle"
    path.write_bytes(gzip.decompress((_DIRECTORY / f"{name}.pickle.gz").read_bytes()))
    return path


def read(name: str, directory: Path) -> AllocationSnapshot:
    return parse_snapshot(load_plain(unpack(name, directory)))
