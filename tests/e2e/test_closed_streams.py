"""Commands whose standard streams are closed."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.exporter import command, environment
from tests.support.standin.library import StandIn


@pytest.mark.parametrize("closed", [">&-", "<&- >&-"])
def test_an_answer_that_goes_nowhere_is_an_error(standin: StandIn, closed: str) -> None:
    """With standard output closed, a command reports that in one line and writes to no other file."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command("show")],
        env=environment(standin.env()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    said = "cannot write to standard output: Bad file descriptor; free some space or write elsewhere"
    assert done.stderr == f"vramledger: {said}\n"


def test_without_any_stream_it_ends_in_order(standin: StandIn) -> None:
    """With all three streams closed, a command still has an exit status."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command("show")],
        env=environment(standin.env()),
        check=False,
    )
    assert done.returncode == 1
