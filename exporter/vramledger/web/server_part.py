"""Import aiohttp's server without its client: the exporter is none, and it starts in each test.

``import aiohttp`` loads the client, which takes 70 ms and 4 MiB, and reads the certificate authorities of the
host.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

_PACKAGE = "aiohttp"
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class _ServerPart(ModuleType):
    """The package without what its own code imports; its modules can be imported as usual."""

    def __getattr__(self, name: str) -> object:
        """Import the whole package when something is asked for that only its own code brings."""
        special = name.startswith("__") and name != "__all__"
        if special or find_spec(f"{_PACKAGE}.{name}") is not None:  # a module: the import system asks first
            raise AttributeError(name)
        assert self.__spec__ is not None  # noqa: S101 see below
        assert self.__spec__.loader is not None  # noqa: S101 the same
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def import_server_only() -> None:
    """Let later imports of aiohttp's modules load only what they need, unless aiohttp is imported already."""
    spec = find_spec(_PACKAGE)
    if _PACKAGE in sys.modules or spec is None or spec.origin is None:
        return
    version = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8"))
    if version is None:  # its server imports the version, so that the whole package would be imported anyway
        return
    package = module_from_spec(spec)
    package.__class__ = _ServerPart
    package.__dict__["__version__"] = version[1]
    sys.modules[_PACKAGE] = package
