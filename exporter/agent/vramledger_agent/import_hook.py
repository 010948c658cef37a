"""Notice that the program imports a framework, without importing it, wrapping it or slowing it.

A finder in ``sys.meta_path`` that finds nothing sees every import. In a process that uses no framework, this
is the whole agent. So this module imports only the declarations of the frameworks and what Python has loaded
already. No loader is wrapped: a framework's module is exactly what it is without us.
"""

from __future__ import annotations

import sys
from _thread import get_ident

from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.frameworks import REPORTING_FRAMEWORKS

PROVIDERS = {framework.imported_module: framework.provider for framework in REPORTING_FRAMEWORKS.values()}
"""The providers' modules, by the module whose import shows that a framework is being loaded."""

ANNOUNCING = {framework.imported_module for framework in REPORTING_FRAMEWORKS.values() if framework.announces}
"""The modules that are hooked into, which takes a module that is completely imported."""

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec

    FindSpec = Callable[[str, object], ModuleSpec | None]


class ImportHook:
    """A finder that finds nothing of the program's.

    It sees every import, and adds a framework's provider once the framework is there: after the import where
    it announces its allocator, otherwise as soon as it is being executed. That it was looked for says
    nothing: it may not be installed.
    """

    def __init__(self, find_own: FindSpec | None = None) -> None:
        self.awaited = set(PROVIDERS)  # the frameworks' modules that have not been added
        # those of frameworks that do not announce their allocator: each import is a moment to look
        self.added: set[str] = set()
        # by thread, the module that it must not import now; see :class:`RefusedImport`
        self.refused: dict[int, str] = {}
        self.find_own = find_own  # finds the agent's own modules where they are not on the program's path

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find nothing but ours; add frameworks. Raises AttributeError if it must not be imported now."""
        del target
        if name.startswith("vramledger_agent."):
            return self.find_own(name, path) if self.find_own is not None else None
        if self.refused and self.refused.get(get_ident()) == name:
            raise AttributeError(name)
        self.add_imported()
        if self.added:
            self._call_worker("find_allocators")
        return None

    def add_imported(self) -> None:
        for name in tuple(self.awaited):
            module = sys.modules.get(name)
            if module is None or (name in ANNOUNCING and is_being_imported(module)):
                continue
            self.awaited.discard(name)  # first: our own imports come here too
            try:
                self._call_worker("add_framework", PROVIDERS[name], name)
            except BaseException:
                self.awaited.add(name)
                raise
            if name not in ANNOUNCING:
                self.added.add(name)

    def _call_worker(self, method: str, *arguments: object) -> None:
        """Call the worker, and raise only what a signal handler of the program has raised meanwhile."""
        try:
            from vramledger_agent.worker import worker

            getattr(worker, method)(*arguments)
        except BaseException as error:
            if belongs_to_program(error):
                raise


def is_being_imported(module: object) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


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
        if self._hook is not None and self._before is None:
            self._hook.refused.pop(get_ident(), None)


_hook: ImportHook | None = None


def install(replaced: object = None, find_own: FindSpec | None = None) -> None:
    """See every import from now on; a framework that is already imported is added immediately.

    ``replaced``: a finder that did so until now. The hook takes its place in ``sys.meta_path``: a program may
    have put finders of its own in front, which it takes out by their place.
    """
    global _hook  # noqa: PLW0603 a process has one
    places = [number for number, each in enumerate(sys.meta_path) if each is replaced]
    place = slice(places[0], places[0] + 1) if places else slice(0, 0)
    if _hook is not None:
        del sys.meta_path[place]
        return
    _hook = ImportHook(find_own)
    sys.meta_path[place] = [_hook]
    _hook.add_imported()


def notice(name: str) -> None:
    """See an import that began before :func:`install` was called."""
    if _hook is not None:
        _hook.find_spec(name)


def uninstall() -> None:
    global _hook  # noqa: PLW0603
    if _hook is not None:
        try:
            sys.meta_path.remove(_hook)
        except ValueError:  # the program cleared the list
            pass
        _hook = None
