"""The order in which the files of tests begin."""

from __future__ import annotations

from tests.support.listening import PROJECT
from tests.support.order import SHARING, order_of_files, unit_of


def test_the_longest_begin_and_waiting_takes_turns_with_computing() -> None:
    """Of each kind the file with the longest limit comes first; when one kind ends, the other goes on."""
    limits = {"short": 0.0, "long": 600.0, "waits": 0.0, "waits long": 300.0, "shorter": 0.0}

    order = order_of_files(limits, {"waits", "waits long"})

    assert order == ["waits long", "long", "waits", "short", "shorter"]
    assert order_of_files(limits, ()) == ["long", "waits long", "short", "waits", "shorter"]


def test_files_that_share_servers_stay_on_one_worker() -> None:
    """The files of a folder that shares servers are one unit of work; every other file is one alone."""
    assert [folder for folder in SHARING if not (PROJECT / folder / "conftest.py").is_file()] == []
    within = f"{SHARING[0]}/test_one.py::test_a[b::c]"

    assert unit_of(within) == unit_of(f"{SHARING[0]}/test_two.py::test_b") == SHARING[0]
    assert unit_of("tests/unit/test_it.py::Class::test_a") == "tests/unit/test_it.py"
