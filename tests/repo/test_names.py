"""What names mean, where a constant is explained, and that no clause keeps a foreign exception."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tests.repo.test_layers import MODULES, nodes_of


def test_no_two_classes_share_a_name() -> None:
    """A class is found by its name alone, with or without an underscore before it."""
    classes: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in nodes_of(module):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{module}:{node.lineno}")
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


def test_nobody_writes_the_private_fields_of_another() -> None:
    """An attribute with an underscore is assigned through ``self`` or ``cls`` alone."""
    written = [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
    ]
    assert written == []


BARE_VERBS = frozenset(
    "ask come do form hear hold judge keep learn look make miss note say take tell".split()
)
"""Verbs that fit everything: a function's name must say what it does, and to what."""


def test_no_function_is_named_with_a_verb_that_fits_anything() -> None:
    """A function's name says what it does, which a bare ``take`` or ``look`` does not."""
    bare = [
        f"{module}:{node.lineno}: {node.name}"
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in BARE_VERBS
    ]
    assert bare == []


AGENT = Path(__file__).parents[2] / "exporter" / "agent" / "vramledger_agent"

BROAD = {"Exception", "BaseException"}

CARED_FOR = {"belongs_to_program", "keep_or_count", "_is_ours"}
"""The functions that ask whose an exception is."""

ELSEWHERE = {
    *("worker.py:_run_thread", "requests.py:accept", "requests.py:_respond"),
    *("isolation.py:_answer", "isolation.py:_pack_error", "sitecustomize.py:<module>"),
}
"""What runs on a thread or in a child of ours, where no handler of the program is called, or before it."""


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
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def test_no_broad_clause_keeps_what_belongs_to_the_program() -> None:
    """Each one raises again, asks whose the exception is, or runs where no handler of the program does."""
    assert {each for path in AGENT.rglob("*.py") for each in swallowing(path)} - ELSEWHERE == set()


def comments_at_constants(module: str) -> Iterator[int]:
    """Yield the number of each line that explains an assignment in a comment above, beside or below it."""
    lines = MODULES[module].read_text(encoding="utf-8").split("\n")
    bodies = (node.body for node in nodes_of(module) if isinstance(node, ast.Module | ast.ClassDef))
    for each in chain.from_iterable(bodies):
        if not isinstance(each, ast.Assign | ast.AnnAssign):
            continue
        target = each.targets[0] if isinstance(each, ast.Assign) else each.target
        if isinstance(target, ast.Name) and target.id.isupper():
            below = "".join(lines[each.end_lineno or 0 :][:1])
            beside = lines[(each.end_lineno or 1) - 1].partition("  # ")[2]
            if below.startswith(f"{' ' * each.col_offset}# ") or not re.match(r"noqa|type:|fmt:|$", beside):
                yield each.end_lineno or 0


def test_a_constant_is_explained_in_the_docstring_below_it() -> None:
    """No constant of either package has its meaning in a ``#`` line below it or in a comment beside it."""
    ours = [module for module in MODULES if not module.endswith(".sitecustomize")]
    assert [f"{module}:{line}" for module in ours for line in comments_at_constants(module)] == []
