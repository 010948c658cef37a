"""Notice that the program imports a framework, without importing it, wrapping it or slowing it.

A finder at the front of ``sys.meta_path`` that finds nothing hears of every import. It is all that the agent
is in a process that uses no framework, so this module imports nothing that Python has not loaded already.
"""

from __future__ import annotations

FRAMEWORKS = {
    # By the module whose import says that the framework comes, and that has what the provider hooks into:
    # the module of ours that deals with it.
    "torch.cuda": "vramledger.agent.pytorch",
    "tensorflow.python.eager.context": "vramledger.agent.tensorflow",
    "jax._src.xla_bridge": "vramledger.agent.jax",
    "cupy": "vramledger.agent.cupy",
    "rmm": "vramledger.agent.rmm",
}


def watch() -> None:
    """Hear of imports from now on."""


def unwatch() -> None:
    """Hear of them no more."""
