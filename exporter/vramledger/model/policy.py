"""Define the policy of a process: how its framework takes memory, as judged or as its agent reports."""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = "unknown"


class Policy(NamedTuple):
    """A verdict.

    ``source`` is ``agent``, ``environ``, ``pattern``, ``default`` or ``none``, ``why`` a sentence.
    """

    framework: str = UNKNOWN
    policy: str = UNKNOWN
    source: str = "none"
    why: str = "nothing is known of what it has loaded"


NO_POLICY = Policy()
"""The policy before anything was judged."""
