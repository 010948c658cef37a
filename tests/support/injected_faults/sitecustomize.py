"""Make functions of a program fail while a file says so; Python imports this before the program.

``functions`` in the folder ``INJECTED_FAULTS`` names them; a file of that name has one raise, or ``hang``.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def _content(order: Path) -> str | None:
    try:
        return order.read_text(encoding="utf-8")
    except OSError:
        return None


def _replace(module: ModuleType, name: str, order: Path) -> None:
    *path, last = name.split(".")
    owner: Any = module
    for each in path:
        owner = getattr(owner, each)
    original = getattr(owner, last)

    def faulty(*values: Any, **named: Any) -> Any:  # noqa: ANN401
        content = _content(order)
        if content == "hang":
            while _content(order) == "hang":
                time.sleep(0.01)
        elif content is not None:
            raise RuntimeError("injected")
        return original(*values, **named)

    setattr(owner, last, faulty)


class _Finder(importlib.abc.MetaPathFinder):
    """Find the modules that have functions to replace, once each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, list[str]] = {}
        for line in (folder / "functions").read_text(encoding="utf-8").splitlines():
            module, _, name = line.partition(":")
            self._names.setdefault(module, []).append(name)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        names = self._names.pop(fullname, None)
        found = None if names is None else importlib.util.find_spec(fullname)
        if found is None or found.loader is None or names is None:
            return None
        execute = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for name in names:
                _replace(module, name, self._folder / f"{fullname}:{name}")

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


if "INJECTED_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Finder(Path(os.environ["INJECTED_FAULTS"])))
