"""How many examples hypothesis makes: all of them in ``make test-all``, a fifth in ``make test``."""

import os

from hypothesis import HealthCheck, settings

FEWER = "VRAMLEDGER_FEWER_EXAMPLES"
"""The variable that ``tests/conftest.py`` sets for the tests of ``make test``."""

_USUAL = 100
"""What hypothesis makes by itself."""


def examples(number: int = _USUAL) -> int:
    """Return how many examples this run makes where a full one makes so many."""
    return max(10, number // 5) if FEWER in os.environ else number


def load() -> None:
    # An example may take as long as a busy machine makes it: times are measured in tests/lab/bench alone.
    settings.register_profile(
        "patient", max_examples=examples(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")
