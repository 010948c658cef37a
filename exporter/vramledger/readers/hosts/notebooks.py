"""Find the notebook of a process, from what Jupyter put into its environment or its command line.

What starts kernels, and what is then known (read in their code, or seen):

- jupyter-server from version 2 on, which JupyterLab, JupyterHub and JetBrains use, sets ``JPY_SESSION_NAME``;
- VS Code, on this host or over SSH, and code-server set no variable. The connection file is
  ``--f=.../kernel-v3HEX.json``, in quotes if its path has a space; older versions ``/tmp/tmp-ID.json``;
- Colab sets no variable: ``colab_kernel_launcher -f .../kernel-ID.json``;
- nbconvert, papermill and ``jupyter execute`` set none, and choose ``/tmp/tmpID.json``; ``jupyter run``
  and ``jupyter console`` choose ``kernel-PID.json``;
- Databricks: ``db_ipykernel_launcher.py -f .../connection.json``;
- marimo gives its kernels neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vramledger.readers.hosts.program_names import REPLACEMENT
from vramledger_agent.printable import printable

MAX_PATH_BYTES = 1024
"""Bytes of a notebook's path that are kept."""

_SESSION_VARIABLE = b"\0JPY_SESSION_NAME="
_OPTION = re.compile(r"(?:-f|--f|--connection-file)(?:=(?P<given>.*))?", re.DOTALL)
_CONNECTION_FILE = re.compile(r"(?:.*/)?(?P<name>[\w.-]{1,128})\.json", re.ASCII | re.DOTALL)
_KERNEL_NAME = re.compile(r"kernel-[\w-]{1,64}", re.ASCII)
_LAUNCHER = re.compile(
    r"(?:.*/)?(?:(?:db_)?ipykernel(?:_launcher)?|colab_kernel_launcher)(?:\.py)?", re.DOTALL
)
"""The module or script of a kernel for Python. Other programs also launch kernels: those of GPUs."""

_OTHER_LAUNCHER = re.compile(r"IRkernel::main\(\)|(?:.*/)?IJulia/.*/kernel\.jl", re.DOTALL)
"""What runs a kernel for R or Julia, which has its connection file as last argument, without an option."""


def find_notebook(argv: Sequence[str], environment: bytes) -> str:
    """Return the path of a kernel's notebook; without a path the kernel's name; otherwise empty.

    The kernel's children inherit the variable, and belong to the notebook too. A kernel's name is that of its
    connection file, ``kernel-ID.json``.
    """
    _, found, rest = environment.partition(_SESSION_VARIABLE)
    if found:
        path = rest[: MAX_PATH_BYTES + 1].partition(b"\0")[0][:MAX_PATH_BYTES].decode(errors="replace")
        path = printable(path, REPLACEMENT).strip()
        # Measured on jupyter-server 2.21: for a session without a name it is only the directory.
        if path and not path.endswith("/"):
            return path
    return find_kernel_name(argv)


def find_kernel_name(argv: Sequence[str]) -> str:
    """Return a kernel's name, from its connection file; of unknown programs only from ``kernel-ID.json``."""
    runs_kernels = False
    for position, word in enumerate(argv):
        if match := _OPTION.fullmatch(word):
            following = argv[position + 1] if position + 1 < len(argv) else ""
            name = _connection_name(following if match["given"] is None else match["given"])
            if name and (runs_kernels or _KERNEL_NAME.fullmatch(name)):
                return name
        runs_kernels = runs_kernels or _LAUNCHER.fullmatch(word) is not None
    if any(map(_OTHER_LAUNCHER.fullmatch, argv)):
        return _connection_name(argv[-1])
    return ""


def _connection_name(path: str) -> str:
    # VS Code adds the quotes, but starts the program without a shell, which would take them away.
    match = _CONNECTION_FILE.fullmatch(path.strip('"'))
    return match["name"] if match else ""
