"""The sentences about memory that NVML charges to no process."""

import pytest

from vramledger.accounting.uncharged.solver import NOTHING, Range
from vramledger.accounting.uncharged.tracker import HolderEvidence, LeftEvidence, created, describe
from vramledger.model.device_signs import MIB
from vramledger.model.snapshot import Grade

GIB = 2**30
EXACT = Range(8 * GIB, 8 * GIB)
ALONE = HolderEvidence(
    Range(8 * GIB, 8 * GIB), 518 * MIB, Range(8 * GIB, 8 * GIB), 8 * GIB, None, (), (), False, False
)
LEFT = LeftEvidence(Range(4 * GIB, 4 * GIB), created(694, "alice", 7200.0), (702,), None)


CHARGED = "NVML charges 518 MiB; "
MAPPINGS = "from its 8.0 GiB of /dev/nvidia-uvm mappings"


@pytest.mark.parametrize(
    ("known", "grade", "why"),
    [
        (ALONE, Grade.SEEN, f"8.0 GiB are managed memory, {MAPPINGS}; nobody else here can have them"),
        (
            ALONE._replace(reported=8 * GIB, matched=True),
            Grade.PROVEN,
            (
                f"8.0 GiB are managed memory, {MAPPINGS} and its agent's report of 8.0 GiB; "
                "the mappings here are as large as what NVML charges to nobody"
            ),
        ),
        (
            ALONE._replace(
                share=Range(0, 8 * GIB), managed=Range(0, 8 * GIB), bound=None, rivals=range(10, 17)
            ),
            Grade.INFERRED,
            (
                "up to 8.0 GiB can be managed memory, from its mappings, which we may not read; "
                "pid 10, 11, 12, 13, 14 and 2 more can have them too"
            ),
        ),
        (
            ALONE._replace(share=Range(2 * GIB, 8 * GIB), managed=Range(2 * GIB, 8 * GIB)),
            Grade.INFERRED,
            (
                f"2.0 GiB to 8.0 GiB can be managed memory, {MAPPINGS}; "
                "a process that NVML does not list here can have them too"
            ),
        ),
        (
            ALONE._replace(share=LEFT.range, managed=NOTHING, left=(LEFT,)), Grade.INFERRED,
            "4.0 GiB created by pid 694 of alice, which ended at 02:00 UTC; pid 702 still has them",
        ),
        (
            ALONE._replace(
                share=Range(0, 4 * GIB),
                managed=NOTHING,
                left=(LEFT._replace(created=created(694, None, 7200.0), heirs=(702, 703), hidden=9),),
                rivals=(703,),
            ),
            Grade.INFERRED,
            (
                "4.0 GiB created by pid 694 of an unknown user, which ended at 02:00 UTC; "
                "pid 702, 703 or hidden pid 9 still have them; pid 703 can have them too"
            ),
        ),
        (
            ALONE._replace(late=True), Grade.INFERRED,
            f"8.0 GiB are managed memory, {MAPPINGS}; nobody else here can have them",
        ),
    ],
    ids=["alone", "reported", "unreadable", "unseen", "left", "hidden", "late"],
)  # fmt: skip
def test_the_evidence_is_said(known: HolderEvidence, grade: Grade, why: str) -> None:
    """The sentence has every fact on which the share rests, and the grade is that of the weakest."""
    found = describe(known)
    assert (found.grade, found.why) == (grade, CHARGED + why)


def test_only_certain_bytes_give_way() -> None:
    """Managed memory is all of an exact share that can be, and of a range only what certainly is."""
    both = ALONE._replace(share=Range(12 * GIB, 12 * GIB), left=(LEFT,))
    assert describe(both).managed == 8 * GIB
    assert (
        describe(ALONE._replace(share=Range(4 * GIB, 8 * GIB), managed=Range(2 * GIB, 8 * GIB))).managed
        == 2 * GIB
    )
