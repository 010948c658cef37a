"""Notice that the program imports a framework, without importing it, wrapping it or slowing it.

A finder at the front of ``sys.meta_path`` that finds nothing sees every import. In a process that uses no
framework, this is the whole agent. So this module imports only the declarations of the frameworks and what
Python has loaded already. No loader is wrapped: a framework's module is exactly what it is without us.
"""

from __future__ import annotations

import sys
from _thread import get_ident

from vramledger.agent.program_errors import belongs_to_program
from vramledger.agent_protocol.frameworks import REPORTING_FRAMEWORKS

PROVIDERS = {framework.imported_module: framework.provider for framework in REPORTING_FRAMEWORKS.values()}
"""The providers' modules, by the module whose import shows that a framework is being loaded."""

ANNOUNCING = {framework.imported_module for framework in REPORTING_FRAMEWORKS.values() if framework.announces}
"""The modules that are hooked into, which takes a module that is completely imported."""

OUR_PACKAGES = ("vramledger.agent.", "vramledger.agent_protocol")


class ImportHook:
    """A finder that finds nothing.

    It sees every import, and adds a framework's provider: after the import where the framework announces its
    allocator, and before it where nothing has to be there yet.

    Attributes:
        awaited: the frameworks' modules that no import has asked for.
        importing: those that are being imported.
        added: those of frameworks that do not announce their allocator: each import is a moment to look.
        refused: by thread, the module that it must not import now; see :class:`RefusedImport`.
    """

    def __init__(self) -> None:
        self.importing = {name for name in PROVIDERS if name in sys.modules}
        self.awaited = set(PROVIDERS) - self.importing
        self.added: set[str] = set()
        self.refused: dict[int, str] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Find nothing; record that a framework's module is about to be imported.

        Raises:
            AttributeError: this thread must not import the module now.
        """
        del path, target
        if self.refused and self.refused.get(get_ident()) == name:
            raise AttributeError(name)
        if name in self.awaited:
            self.importing.add(name)
            self.awaited.discard(name)
            if name not in ANNOUNCING:
                self.add_imported()
        elif (self.importing or self.added) and not name.startswith(OUR_PACKAGES):
            # This is the next import after the framework's own module was executed: torch does hundreds of
            # them.
            self.add_imported()
            if self.added:
                self._call_worker("find_allocators")

    def add_imported(self) -> None:
        """Add the providers of the frameworks whose modules are there by now."""
        for name in tuple(self.importing):
            if name in ANNOUNCING:
                module = sys.modules.get(name)
                if module is None:
                    continue  # about to be imported, or it failed: the next try has another spec
                if getattr(getattr(module, "__spec__", None), "_initializing", False):
                    continue
            self.importing.discard(name)  # first: our own imports come here too
            try:
                self._call_worker("add_framework", PROVIDERS[name])
            except BaseException:
                self.importing.add(name)
                raise
            if name not in ANNOUNCING:
                self.added.add(name)

    def _call_worker(self, method: str, *arguments: object) -> None:
        """Call the worker, and raise only what a signal handler of the program has raised meanwhile."""
        try:
            from vramledger.agent.worker import worker

            getattr(worker, method)(*arguments)
        except BaseException as error:
            if belongs_to_program(error):
                raise


class RefusedImport:
    """Within it, this thread does not import a module that no thread has imported before.

    It is for a module that a package imports when it is asked for an attribute: to the package's own code the
    attribute is missing meanwhile. The hook is in ``sys.meta_path`` anyway. To put another finder there and
    take it away could make an import of another thread skip one, as Python goes through the list itself.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._hook = _hook
        self._before: str | None = None

    def __enter__(self) -> bool:
        """Refuse the import from now on; False if the program has taken the hook away."""
        if self._hook is None or self._hook not in sys.meta_path:
            return False
        self._before = self._hook.refused.get(get_ident())
        self._hook.refused[get_ident()] = self._module
        return True

    def __exit__(self, *_: object) -> None:
        """Allow it again, unless it was refused before."""
        if self._hook is not None and self._before is None:
            self._hook.refused.pop(get_ident(), None)


_hook: ImportHook | None = None


def install() -> None:
    """See every import from now on; a framework that is already imported is added immediately."""
    global _hook  # noqa: PLW0603 a process has one
    if _hook is None:
        _hook = ImportHook()
        sys.meta_path.insert(0, _hook)  # the hook finds no module
        if _hook.importing:
            _hook.add_imported()


def notice(name: str) -> None:
    """See an import that began before :func:`install` was called."""
    if _hook is not None:
        _hook.find_spec(name)


def uninstall() -> None:
    """Stop seeing imports."""
    global _hook  # noqa: PLW0603
    if _hook is not None:
        try:
            sys.meta_path.remove(_hook)
        except ValueError:  # the program cleared the list
            pass
        _hook = None
