"""Find the notebook of a process, from what Jupyter put into its environment or its command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vramledger.printable import printable
from vramledger.readers.hosts.program_names import REPLACEMENT

MAX_PATH_BYTES = 1024
"""Bytes of a notebook's path that are kept."""

_SESSION_VARIABLE = b"\0JPY_SESSION_NAME="
_CONNECTION_FILE = re.compile(r"(?:.*/)?(?P<name>kernel-[\w-]{1,64})\.json", re.ASCII)


def find_notebook(argv: Sequence[str], environment: bytes) -> str:
    """Return the path of a kernel's notebook; without a path the kernel's name; otherwise empty.

    From version 2 on, jupyter-server tells each kernel the path of its notebook in ``JPY_SESSION_NAME``. The
    kernel's children inherit this variable, and belong to the notebook too. Other servers (VS Code,
    nbconvert) do not set it; then the kernel's name is that of its connection file, ``kernel-ID.json``.

    Args:
        argv: the command line.
        environment: the environment with a NUL before each variable; only the one variable is read.
    """
    _, found, rest = environment.partition(_SESSION_VARIABLE)
    if found:
        path = rest[: MAX_PATH_BYTES + 1].partition(b"\0")[0][:MAX_PATH_BYTES].decode(errors="replace")
        path = printable(path, REPLACEMENT).strip()
        # Measured on jupyter-server 2.21: for a session without a name it is only the directory.
        if path and not path.endswith("/"):
            return path
    for position, word in enumerate(argv):
        given = argv[position + 1] if word == "-f" and position + 1 < len(argv) else word.partition("=")[2]
        if word.startswith(("-f", "--f=")) and (match := _CONNECTION_FILE.fullmatch(given)):
            return match["name"]
    return ""
