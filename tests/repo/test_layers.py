"""Imports point one way: down the list of packages below. A new package must be added to it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "exporter"

LAYERS = [
    # From the top to the bottom. A module may import from its own package and from those below it.
    "__main__",
    "cli",
    "commands",
    "torch_snapshots",
    "serving",
    "storage",
    "web",
    "metrics",
    "sampling",
    "agent_server",
    "views",
    "accounting",
    "readers",
    "model",
    "config",
    "rate_limit",
    "printable",
    "private_file",
    "logs",
    "errors",
    "agent_protocol",
]

AGENT = "vramledger.agent"
"""The code in the user's process is separate: it imports the standard library, itself and the protocol."""

PROTOCOL = "vramledger.agent_protocol"
FUTURE = "from __future__ import annotations"
"""What both ends of the agents' socket share; the agent loads it, so it imports nothing at all."""

ONLY_IN = {
    # Who may import what: only one package handles a library's quirks.
    "pynvml": ["vramledger.readers.nvml.bindings"],
    "psutil": ["vramledger.commands.attach", "vramledger.commands.sampling_loop"],
    "prometheus_client": ["vramledger.metrics.exposition", "vramledger.web.*"],
    "aiohttp": ["vramledger.web.*", "vramledger.commands.taint", "vramledger.commands.kubernetes_node"],
    "bcrypt": ["vramledger.web.access.passwords"],
    "yaml": ["vramledger.web.access.config_file"],
}

PROC_PATHS = [
    "vramledger.config",
    "vramledger.readers.hosts.*",
    "vramledger.sampling.capabilities",
    "vramledger.commands.diagnosis",
    "vramledger.agent.visible_devices",
    "vramledger.agent.isolation",
    "vramledger.agent.threads",
]
"""Who may name a path in /proc: who reads it, who says where it is by default, who explains it.

The agent looks for its own threads, children and open files there, and cannot import the others. Giving up
privileges concerns this host alone.
"""


def modules() -> dict[str, Path]:
    """Return the file of every module of the package by its dotted name."""
    found = {}
    for path in sorted(SOURCES.glob("vramledger/**/*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = modules()


@cache
def parsed(module: str) -> ast.Module:
    """Return a module as it was parsed, once and not before a test needs it."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"), str(MODULES[module]))


def matches(module: str, patterns: list[str]) -> bool:
    """Say whether a module is one of those that the patterns name."""
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def rank(module: str) -> int | None:
    """Return the position of a module's package in LAYERS, None when it is not there."""
    package = module.split(".")[1] if "." in module else ""
    return len(LAYERS) - LAYERS.index(package) if package in LAYERS else None


@cache
def imports(module: str) -> tuple[tuple[str, int], ...]:
    """Return everything that a module imports, as a dotted name and a line."""
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in MODULES else str(node.module)), node.lineno


def own_imports(module: str) -> set[str]:
    """Return which modules of the package a module imports."""
    return {name for name, _ in imports(module) if name in MODULES and name != module}


def is_agent(module: str) -> bool:
    """Say whether a module runs in the user's process."""
    return module == AGENT or module.startswith(f"{AGENT}.")


@pytest.mark.parametrize("module", [each for each in MODULES if each != "vramledger" and not is_agent(each)])
def test_imports_point_down(module: str) -> None:
    """A module's package is one of LAYERS, and the module imports nothing from above it."""
    place = rank(module)
    assert place is not None, f"{module} has no place in LAYERS"

    for name in own_imports(module) - {"vramledger"}:
        assert not is_agent(name), f"{module} imports {name}, which is for the user's process"
        below = rank(name)
        assert below is not None, f"{name} has no place in LAYERS"
        assert below <= place, f"{module} imports {name}, which stands above it"


def test_no_import_cycles() -> None:
    """No modules import each other in a cycle, not even within a package."""
    try:
        TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_stays_in_its_place(library: str) -> None:
    """A library is imported only in the part that handles its quirks."""
    importers = {module for module in MODULES for name, _ in imports(module) if name.split(".")[0] == library}

    assert {module for module in importers if not matches(module, ONLY_IN[library])} == set()


@pytest.mark.parametrize("module", [module for module in MODULES if not matches(module, PROC_PATHS)])
def test_proc_is_read_in_one_place(module: str) -> None:
    """Only hosts/ names a file in /proc, so that ``--path.procfs`` applies to every reader."""
    prose = {
        id(node.value)
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    named = [
        f"{module}:{node.lineno}: {node.value!r}"
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Constant) and id(node) not in prose
        if isinstance(node.value, str) and (node.value == "/proc" or node.value.startswith("/proc/"))
    ]

    assert named == []


def is_protocol(module: str) -> bool:
    """Say whether a module is shared by the agent and the exporter."""
    return module == PROTOCOL or module.startswith(f"{PROTOCOL}.")


def test_agent_imports_the_standard_library_alone() -> None:
    """The code in the user's process needs no dependency, and of our code only the protocol."""
    strays = [
        f"{module}:{line} imports {name}"
        for module in filter(is_agent, MODULES)
        for name, line in imports(module)
        if not is_agent(name) and not is_protocol(name) and name.split(".")[0] not in sys.stdlib_module_names
    ]

    assert strays == []


def test_the_protocol_imports_nothing() -> None:
    """A program that never uses a GPU does not import the protocol; only type checkers see the import."""
    strays = [
        f"{module}:{node.lineno}"
        for module in filter(is_protocol, MODULES)
        for statement in parsed(module).body
        if not (isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING")
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) != FUTURE
    ]

    assert strays == []
