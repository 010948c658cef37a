"""The errors of the agent's commands that a user may see, each with its exit code.

VramledgerError             1   anything that stops a command ├── UsageError              2   a flag or
argument is wrong ├── StartupError            1   a port is taken, a file cannot be opened ├── SnapshotError
1   an allocation snapshot is broken, hostile or of another kind └── AgentError              1   an agent does
not exist, refuses, or does not answer Every message is one line and says what to do next; the command line
prints it without a traceback.
"""

from __future__ import annotations


class VramledgerError(Exception):
    """Stop a command with a one-line message."""

    exit_code = 1


class UsageError(VramledgerError):
    """Say that a flag or an argument is wrong."""

    exit_code = 2


class StartupError(VramledgerError):
    """Say that the program could not start."""


class SnapshotError(VramledgerError):
    """Say that an allocation snapshot cannot be read."""


class AgentError(VramledgerError):
    """Say that the agent in a process did not do what was requested."""
