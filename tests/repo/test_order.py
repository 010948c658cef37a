"""The order in which the files of tests begin."""

from __future__ import annotations

from tests.support.order import order_of_files


def test_the_longest_begin_and_waiting_takes_turns_with_computing() -> None:
    """Of each kind the file with the longest limit comes first; when one kind ends, the other goes on."""
    limits = {"short": 0.0, "long": 600.0, "waits": 0.0, "waits long": 300.0, "shorter": 0.0}

    order = order_of_files(limits, {"waits", "waits long"})

    assert order == ["waits long", "long", "waits", "short", "shorter"]
    assert order_of_files(limits, ()) == ["long", "waits long", "short", "waits", "shorter"]
