"""Notice that the program imports a framework, without importing it, wrapping it or slowing it.

A finder at the front of ``sys.meta_path`` that finds nothing sees every import. In a process that uses no
framework, this is the whole agent. So this module imports only the declarations of the frameworks and what
Python has loaded already. No loader is wrapped: a framework's module is exactly what it is without us.
"""

from __future__ import annotations

import sys

from vramledger.agent_protocol.frameworks import REPORTING_FRAMEWORKS

PROVIDERS = {framework.imported_module: framework.provider for framework in REPORTING_FRAMEWORKS.values()}
"""The providers' modules, by the module whose import shows that a framework is being loaded."""

OUR_PACKAGES = ("vramledger.agent.", "vramledger.agent_protocol")


class ImportHook:
    """A finder that finds nothing.

    It sees every import, and adds a framework's provider after the import.
    """

    def __init__(self) -> None:
        self.importing = {name for name in PROVIDERS if name in sys.modules}
        self.awaited = set(PROVIDERS) - self.importing

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing; record that a framework's module is about to be imported."""
        del path, target
        if name in self.awaited:
            self.awaited.discard(name)
            self.importing.add(name)
        elif self.importing and not name.startswith(OUR_PACKAGES):
            # This is the next import after the framework's own module was executed: torch does hundreds of
            # them.
            self.add_imported()

    def add_imported(self) -> None:
        """Add the providers of the frameworks whose modules are completely imported by now."""
        for name in tuple(self.importing):
            module = sys.modules.get(name)
            if module is None:
                continue  # about to be imported, or it failed: the next try has another spec
            if getattr(getattr(module, "__spec__", None), "_initializing", False):
                continue
            self.importing.discard(name)
            try:
                __import__("vramledger.agent.worker")
                sys.modules["vramledger.agent.worker"].worker.add_framework(PROVIDERS[name])
            except Exception:
                continue


_hook: ImportHook | None = None


def install() -> None:
    """See every import from now on; a framework that is already imported is added immediately."""
    global _hook  # noqa: PLW0603 a process has one
    if _hook is None:
        _hook = ImportHook()
        sys.meta_path.insert(0, _hook)  # the hook finds no module
        if _hook.importing:
            _hook.add_imported()


def uninstall() -> None:
    """Stop seeing imports."""
    global _hook  # noqa: PLW0603
    if _hook is not None:
        try:
            sys.meta_path.remove(_hook)
        except ValueError:  # the program cleared the list
            pass
        _hook = None
