"""Patches: what is stored of a document is enough to make it again."""

import json
from random import Random
from typing import Any

import pytest

from vramledger.storage.deltas import apply, difference

KEYS = ("a", "b", "pid", "=", "-", "#", "~m", "")


def document(random: Random, depth: int = 3) -> Any:  # noqa: ANN401 whatever JSON has
    """Return any document, also with keys that mean something in a patch."""
    kind = random.randrange(5 if depth else 3)
    if kind == 3:
        return {random.choice(KEYS): document(random, depth - 1) for _ in range(random.randrange(4))}
    if kind == 4:
        return [document(random, depth - 1) for _ in range(random.randrange(4))]
    return random.choice((None, True, False, 0, 1, 1.5, "", "text", -7))


@pytest.mark.parametrize("seed", range(20))
def test_a_patch_makes_the_document_again(seed: int) -> None:
    """Of any two documents, also odd ones, the patch and the first one give the second one, through JSON."""
    random = Random(seed)  # noqa: S311 a test's
    before: dict[str, Any] = {}
    stored: Any = {}
    for _ in range(100):
        after = {random.choice(KEYS): document(random) for _ in range(4)}
        stored = apply(stored, json.loads(json.dumps(difference(before, after))))
        assert stored == after
        assert json.dumps(stored, sort_keys=True) == json.dumps(after, sort_keys=True)
        before = after


def test_what_stays_is_not_written_again() -> None:
    """A patch has the changed value alone, however large the document is."""
    rows = [[pid, 100, "S"] for pid in range(500)]
    changed = [*rows[:7], [7, 100, "R"], *rows[8:]]
    assert len(json.dumps(difference({"rows": rows}, {"rows": changed}))) < 60
