"""The errors that a user may see, each with its exit code: those of the agent's commands, and two more.

VramledgerError ├── RecordingError          1   a recording is corrupt or of another version └── DriverError
1   NVML cannot be used at all (carries a reason)
"""

from __future__ import annotations

from vramledger_agent.errors import AgentError, SnapshotError, StartupError, UsageError, VramledgerError

__all__ = [
    "AgentError",
    "DriverError",
    "RecordingError",
    "SnapshotError",
    "StartupError",
    "UsageError",
    "VramledgerError",
]


class RecordingError(VramledgerError):
    """Say that a recording cannot be replayed."""


class DriverError(VramledgerError):
    """Say that NVML as a whole does not work, and why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # one of :data:`vramledger.model.reading.FAILURE_REASONS`, used as a label value
