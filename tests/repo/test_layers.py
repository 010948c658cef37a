"""Imports point one way: down the list of packages below. A new package must be added to it."""

import ast
import sys
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "exporter"

LAYERS = [
    # From the top to the bottom. A module may import from its own package and from those below it.
    *("__main__", "cli", "kubernetes.command", "slurm.command", "commands"),
    *("serving", "storage", "web", "metrics"),
    *("sampling", "agent_server", "views", "verdicts", "accounting", "readers", "config", "model"),
    *("exchange", "rate_limit", "logs", "errors"),
]

ROOMS = {"kubernetes": "readers", "slurm": "readers"}
"""A room has all that belongs to one scheduler; a module of it reads unless it has a line in LAYERS."""

AGENT = "vramledger_agent"
"""The agent's package needs no other: it imports the standard library and itself."""

TOOLS = [
    # Its parts that a user's process never loads, in the same order. The exporter may import them.
    *("__main__", "cli", "commands.run", "commands.attach", "commands.snapshot", "commands.parser"),
    *("torch_snapshots", "client", "private_files", "printable", "errors"),
]

PROTOCOL = "vramledger_agent.protocol"
"""What both ends of the agents' socket share; the agent loads it, so it imports nothing at all."""

FUTURE = "from __future__ import annotations"

ONLY_IN = {
    # Who may import what: only one package handles a library's quirks.
    "pynvml": ["vramledger.readers.nvml.driver"],
    "psutil": ["vramledger.commands.end"],
    "prometheus_client": ["vramledger.metrics.exposition", "vramledger.web.*"],
    "aiohttp": [*("vramledger.web.*", "vramledger.serving.control_socket", "vramledger.kubernetes.command")],
    "bcrypt": ["vramledger.web.access.passwords"],
    "yaml": [
        *("vramledger.commands.rules", "vramledger.commands.alert_settings"),
        "vramledger.web.access.config_file",
    ],
}

PROC_PATHS = [
    *("vramledger.config", "vramledger.readers.hosts.*", "vramledger.sampling.capabilities"),
    *("vramledger.commands.doctor", "vramledger_agent.commands.attach", "vramledger_agent.client"),
    *("vramledger_agent.frameworks.provider", "vramledger_agent.isolation"),
    "vramledger_agent.program_errors",
]
"""Who may name a path in /proc: who reads it, who says where it is by default, who explains it.

The agent looks for its own threads, children and open files there, and cannot import the others. Giving up
privileges concerns this host alone.
"""


def modules() -> dict[str, Path]:
    """Return the file of every module of both packages by its dotted name."""
    found = {}
    for root, package in ((SOURCES, "vramledger"), (SOURCES / "agent", AGENT)):
        for path in sorted(root.glob(f"{package}/**/*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


MODULES = modules()


@cache
def parsed(module: str) -> ast.Module:
    """Return a module as it was parsed, once and not before a test needs it."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"), str(MODULES[module]))


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(module)))


@cache
def code_of(module: str) -> tuple[ast.AST, ...]:
    """Return what a module consists of, without the texts that document it."""
    prose = {id(node.value) for node in nodes_of(module) if isinstance(node, ast.Expr)}
    return tuple(
        node for node in nodes_of(module) if not (isinstance(node, ast.Constant) and id(node) in prose)
    )


def matches(module: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def rank(module: str) -> int | None:
    """Return the position of a module's package in LAYERS, None when it is not there."""
    parts = module.split(".")[1:3]
    names = (".".join(parts), *parts[:1], *(ROOMS.get(part, "") for part in parts[:1]))
    found = next((name for name in names if name in LAYERS), None)
    return None if found is None else len(LAYERS) - LAYERS.index(found)


@cache
def imports(module: str) -> tuple[tuple[str, int], ...]:
    """Return everything that a module imports, as a dotted name and a line."""
    found = []
    for node in code_of(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute here"
            names = [(f"{node.module}.{alias.name}", str(node.module)) for alias in node.names]
            found += [(name if name in MODULES else whole, node.lineno) for name, whole in names]
    return tuple(found)


def own_imports(module: str) -> set[str]:
    """Return which modules of the package a module imports."""
    return {name for name, _ in imports(module) if name in MODULES and name != module}


def is_agent(module: str, package: str = AGENT) -> bool:
    """Say whether a module is of the agent's package, or of a part of it."""
    return f"{module}.".startswith(f"{package}.")


def tool_place(module: str) -> int | None:
    """Return the position of an agent's module in TOOLS, None when it runs in the user's process."""
    name = module.removeprefix(f"{AGENT}.")
    return next((at for at, each in enumerate(TOOLS) if name == each or name.startswith(f"{each}.")), None)


def is_protocol(module: str) -> bool:
    return is_agent(module, PROTOCOL)


def test_imports_point_down() -> None:
    """A module's package is one of LAYERS, and the module imports nothing from above it."""
    exporter = [each for each in MODULES if each != "vramledger" and not is_agent(each)]
    assert [module for module in exporter if rank(module) is None] == [], "they have no place in LAYERS"
    wrong = []
    for module in exporter:
        for name in own_imports(module) - {"vramledger", AGENT}:
            if is_agent(name):
                if not is_protocol(name) and tool_place(name) is None:
                    wrong.append(f"{module} imports {name}, which is for the user's process")
            elif (rank(name) or 0) > (rank(module) or 0):
                wrong.append(f"{module} imports {name}, which stands above it")
    assert wrong == []


def test_no_import_cycles() -> None:
    """No modules import each other in a cycle, not even within a package."""
    try:
        TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_library_stays_in_its_place() -> None:
    """A library is imported only in the part that handles its quirks."""
    strays = [
        f"{module}:{line} imports {name}"
        for module in MODULES
        for name, line in imports(module)
        if (library := name.split(".")[0]) in ONLY_IN and not matches(module, ONLY_IN[library])
    ]
    assert strays == []


def test_proc_is_read_in_one_place() -> None:
    """Only hosts/ names a file in /proc, so that ``--path.procfs`` applies to every reader."""
    named = [
        f"{module}:{node.lineno}: {node.value!r}"
        for module in MODULES
        if not matches(module, PROC_PATHS)
        for node in code_of(module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value == "/proc" or node.value.startswith("/proc/")
    ]
    assert named == []


def test_one_place_prints() -> None:
    """Only ``printable.write_plain`` writes to the terminal, where it replaces what would control it."""
    commands = ("vramledger_agent.cli", "vramledger_agent.commands.")
    printing = [
        f"{module}:{node.lineno}"
        for module in MODULES
        if module != "vramledger_agent.printable" and (not is_agent(module) or module.startswith(commands))
        for node in code_of(module)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == "print")
            or ast.unparse(node.func) in ("sys.stdout.write", "sys.stderr.write", "os.write(1", "os.write(2")
        )
    ]

    assert printing == []


def test_agent_imports_the_standard_library_alone() -> None:
    """The agent's package needs no dependency, and none of the exporter."""
    strays = [
        f"{module}:{line} imports {name}"
        for module in filter(is_agent, MODULES)
        for name, line in imports(module)
        if not is_agent(name) and name.split(".")[0] not in sys.stdlib_module_names
    ]
    assert strays == []


def test_what_runs_in_a_program_loads_no_tool() -> None:
    """The code in the user's process imports itself and the protocol; a tool imports what is below it."""
    wrong = []
    for module in filter(is_agent, MODULES):
        place = tool_place(module)
        for name in own_imports(module) - {AGENT, f"{AGENT}.commands"}:
            below = tool_place(name)
            if place is None and below is not None:
                wrong.append(f"{module} imports {name}, which is for commands")
            elif place is not None and not (is_protocol(name) if below is None else below >= place):
                wrong.append(f"{module} imports {name}, which stands above it or runs in the user's process")
    assert wrong == []


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
