"""The facts about holders: what they may consist of."""

from typing import get_args, get_type_hints

from vramledger.model.holder_facts import HOLDER_FACTS


def test_facts_about_holders_are_numbers() -> None:
    """A recording is masked, and nothing masks these facts: a text needs its own field in the reading."""
    for fact in HOLDER_FACTS:
        hints = get_type_hints(fact.kind)
        assert list(hints)[:2] == ["pid", "start"]
        kinds = {each for hint in hints.values() for each in (get_args(hint) or (hint,))}
        assert kinds <= {int, float, bool, type(None)}, fact.field
