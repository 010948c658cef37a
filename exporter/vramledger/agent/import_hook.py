"""Notice that the program imports a framework, without importing it, wrapping it or slowing it.

A finder at the front of ``sys.meta_path`` that finds nothing hears of every import. It is all that the agent
is in a process that uses no framework, so this module imports nothing that Python has not loaded already.
No loader is wrapped: a framework's module is exactly what it is without us.
"""

from __future__ import annotations

import sys

FRAMEWORKS = {
    # By the module whose import says that the framework comes, and that has what the provider hooks into:
    # the module of ours that deals with it.
    "torch.cuda": "vramledger.agent.frameworks.pytorch",
    "tensorflow.python.eager.context": "vramledger.agent.frameworks.tensorflow",
    "jax._src.xla_bridge": "vramledger.agent.frameworks.jax",
    "cupy": "vramledger.agent.frameworks.cupy",
    "rmm": "vramledger.agent.frameworks.rmm",
}

OURS = "vramledger.agent."


class ImportHook:
    """Hear which modules are imported, and call the provider's module when a framework's is complete."""

    def __init__(self) -> None:
        self.coming = {name for name in FRAMEWORKS if name in sys.modules}
        self.waiting = set(FRAMEWORKS) - self.coming

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing, having heard that a module is about to be imported."""
        del path, target
        if name in self.waiting:
            self.waiting.discard(name)
            self.coming.add(name)
        elif self.coming and not name.startswith(OURS):
            # The next import after the framework's own module was executed: torch does hundreds of them.
            self.arrive()

    def arrive(self) -> None:
        """Tell the providers of the modules that are complete now."""
        for name in tuple(self.coming):
            module = sys.modules.get(name)
            if module is None:
                continue  # about to be imported, or it failed: its next try is told apart by its spec
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                continue
            self.coming.discard(name)
            try:
                __import__("vramledger.agent.worker")
                sys.modules["vramledger.agent.worker"].worker.add(FRAMEWORKS[name])
            except Exception:
                continue


_listener: ImportHook | None = None


def watch() -> None:
    """Hear of imports from now on; a framework that is there already is heard of at once."""
    global _listener  # noqa: PLW0603 a process has one
    if _listener is None:
        _listener = ImportHook()
        sys.meta_path.insert(0, _listener)  # it finds nothing
        if _listener.coming:
            _listener.arrive()


def unwatch() -> None:
    """Hear of them no more."""
    global _listener  # noqa: PLW0603
    if _listener is not None:
        try:
            sys.meta_path.remove(_listener)
        except ValueError:  # the program cleared the list
            pass
        _listener = None
