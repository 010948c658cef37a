"""Find the commit that was installed, where the installer recorded one."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import vramledger


@functools.cache
def revision() -> str:
    """Return the commit of PEP 610's record beside the package; empty if there is no record.

    ``importlib.metadata`` finds the record as well, but loads modules that keep 0.7 MiB of memory.
    """
    packages = Path(vramledger.__file__).parents[1]
    record = packages / f"vramledger-{vramledger.__version__}.dist-info" / "direct_url.json"
    try:
        return str(json.loads(record.read_bytes())["vcs_info"]["commit_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
