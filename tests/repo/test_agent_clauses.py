"""No clause of the agent catches what a signal handler of the program raises, and keeps it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

AGENT = Path(__file__).parents[2] / "exporter" / "agent" / "vramledger_agent"

BROAD = {"Exception", "BaseException"}

CARED_FOR = {"belongs_to_program", "keep_or_count", "_is_ours"}
"""The functions that ask whose an exception is."""

ELSEWHERE = {
    "worker.py:_run_thread",
    "requests.py:accept",
    "requests.py:_respond",
    "isolation.py:_answer",
    "isolation.py:_pack_error",
    "sitecustomize.py:<module>",
}
"""What runs on a thread or in a child of ours, where Python calls no handler of the program, or before it has
one."""


def swallowing(path: Path) -> Iterator[str]:
    """Yield the functions of a file with a broad clause that neither raises again nor asks whose it is."""

    def visit(node: ast.AST, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.ExceptHandler) and (
                child.type is None or BROAD & {name.id for name in names(child.type)}
            ):
                called = {name.id for statement in child.body for name in names(statement)}
                raises = any(isinstance(each, ast.Raise) for each in child.body)
                if not (raises or called & CARED_FOR):
                    yield f"{path.name}:{function}"
            yield from visit(child, inside)

    yield from visit(ast.parse(path.read_text("utf-8")), "<module>")


def names(node: ast.AST) -> Iterator[ast.Name]:
    """Yield the names in a piece of code."""
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def test_no_broad_clause_keeps_what_belongs_to_the_program() -> None:
    """Each one raises again, asks whose the exception is, or runs where no handler of the program does."""
    assert {each for path in AGENT.rglob("*.py") for each in swallowing(path)} - ELSEWHERE == set()
