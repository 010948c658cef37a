"""Define the messages on the agents' socket: their format, their limits and the words in them.

A message is one JSON object in one packet of a Unix SEQPACKET socket. There are three kinds:

- a report, from an agent to the exporter, which has ``sequence``: the full state of one process;
- a request, which has ``ask``: to the exporter itself, or, with ``to``, to the agent in that pid. The
  exporter forwards it there without ``to``, together with the sender's own connection. If the request has
  ``file``: true, the sender sends a file behind it, with a message of one byte, which the agent receives: the
  exporter receives no descriptor, because to close a stranger's file may take as long as the stranger likes;
- a response, which has ``ok``: True and the result, or False and ``error``.

This module imports nothing: the agent loads it in processes that may never use a GPU.
"""

from __future__ import annotations

FORMAT_VERSION = 1
DEFAULT_SOCKET = "/run/vramledger/agent.sock"

# --- limits ----------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 65_536
MAX_INTEGER = 2**63 - 1
MAX_TEXT_CHARS = 128
MAX_PATH_CHARS = 1024
MAX_VISIBLE_CHARS = 4096
"""The longest CUDA_VISIBLE_DEVICES: 64 devices by UUID are 2,700 characters."""

MAX_DEVICES = 64
MAX_PROVIDERS = 16
"""The maximum number of parts of an agent that a report may name in its ``errors``."""

MIN_INTERVAL_SECONDS = 0.05
"""The shortest interval that a report may state; the agent itself sends at most four reports a second."""

MAX_INTERVAL_SECONDS = 3600.0

# --- words -----------------------------------------------------------------------------------------

CONSENTS = ("reclaim", "snapshot")
"""The requests to an agent; each needs the program's consent of the same name."""

VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""The keys of a report's ``visible``."""

POLICIES = frozenset(
    "caching preallocate growth limit fraction platform cuda_malloc_async async steps no_gpu".split()
)
"""How a framework may take memory; any other word counts as not known."""

OOM_VERDICTS = ("too_big", "fragmented", "hoarded", "leaking", "unknown")
CATEGORIES = ("parameters", "gradients", "optimizer", "activations")
"""What PyTorch's live tensors are for."""

SNAPSHOT_KEY = "vramledger"
"""The key in a snapshot file under which the agent adds what PyTorch does not know."""

ALLOCATOR_SETTINGS = {
    "expandable_segments": r"true|false",
    "max_split_size_mb": r"unlimited|[1-9][0-9]{0,6}",
    "garbage_collection_threshold": r"off|0?\.[0-9]{1,6}|1",
}
"""The settings of PyTorch's allocator that a report may have, and what a value may be."""

# --- the environment of a program that has an agent --------------------------------------------------

ENABLE_VARIABLE = "VRAMLEDGER_AGENT"
"""The value ``1`` starts the agent."""

SOCKET_VARIABLE = "VRAMLEDGER_AGENT_SOCKET"
INTERVAL_VARIABLE = "VRAMLEDGER_AGENT_INTERVAL"
CONSENT_VARIABLE = "VRAMLEDGER_AGENT_CONSENT"
REPORTS_VARIABLE = "VRAMLEDGER_AGENT_REPORTS"
FROM_START_VARIABLE = "VRAMLEDGER_AGENT_SNAPSHOT_FROM_START"
"""The value ``1`` starts a recording of the allocator's history before the first allocation."""


def make_request(name: str, **arguments: object) -> dict[str, object]:
    """Return a request; with ``to``, a pid, it is for the agent in that process."""
    return {"version": FORMAT_VERSION, "ask": name, **arguments}


def make_success(**content: object) -> dict[str, object]:
    return {"version": FORMAT_VERSION, "ok": True, **content}


def make_failure(error: object) -> dict[str, object]:
    return {"version": FORMAT_VERSION, "ok": False, "error": error}
