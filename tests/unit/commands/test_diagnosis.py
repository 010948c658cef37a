"""What doctor concludes from a reading."""

from __future__ import annotations

import pytest

from vramledger.commands.diagnosis import Finding, diagnose
from vramledger.model.reading import Reading
from vramledger.readers.own_rights import OwnRights

ROOT = OwnRights(0, frozenset({"sys_ptrace", "dac_read_search", "sys_admin"}), hidepid=False)


def found(reading: Reading, subject: str) -> Finding:
    """Return the one finding about a subject."""
    (finding,) = [each for each in diagnose(reading, ROOT) if each.subject == subject]
    return finding


@pytest.mark.parametrize(
    ("namespace", "good", "says"),
    [(True, True, "the host's: "), (False, False, "not the host's: "), (None, False, "not known")],
)
def test_a_namespace_that_is_not_known_is_not_called_foreign(
    namespace: bool | None, good: bool, says: str
) -> None:
    """The PID namespace is the host's, is another, or is not known: three different findings."""
    finding = found(Reading(1.0, 1.0, host_pid_namespace=namespace), "PID namespace")
    assert finding.good is good
    assert finding.text.startswith(says)
    assert bool(finding.remedy) is not good


@pytest.mark.parametrize(
    ("message", "said", "remedy"),
    [
        ("it is not (a; b) loaded; load it", "it is not (a; b) loaded", "load it"),
        ("the sampler said nothing", "the sampler said nothing", "see the log at --log.level=debug"),
    ],
    ids=["with", "without"],
)
def test_a_failure_has_the_remedy_of_its_message(message: str, said: str, remedy: str) -> None:
    """The advice in a failure's message is the remedy, and no second one contradicts it."""
    finding = found(Reading(1.0, 1.0, failure=("no-driver", message)), "driver")
    assert (finding.text, finding.remedy) == (said, remedy)
