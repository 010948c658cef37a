"""Names in the package mean one thing each, and private fields are written only by their class."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.repo.test_layers import MODULES, parsed


def test_no_two_classes_share_a_name() -> None:
    """A class is found by its name alone, with or without an underscore before it."""
    classes: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for node in ast.walk(parsed(module)):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{module}:{node.lineno}")

    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


def test_nobody_writes_the_private_fields_of_another() -> None:
    """An attribute with an underscore is assigned through ``self`` or ``cls`` alone."""
    written = [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module in MODULES
        for node in ast.walk(parsed(module))
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
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in BARE_VERBS
    ]

    assert bare == []
