"""Owners on the page, in the table, in the JSON, in a masked recording, and as a state."""

from msgspec.structs import replace

from tests.support import builders
from tests.support.host.model import Fate
from tests.support.host.one_holder import OneHolder
from tests.support.sure import sure
from vramledger.metrics import processes
from vramledger.model.reading import Owner, Reading, decode, encode
from vramledger.model.snapshot import ProcessSnapshot, Snapshot, State
from vramledger.views.table import render_table

POD = Owner("pod", "ml/train-0", namespace="ml", pod="train-0", container="main", notebook="/ada/gan.ipynb")


def owned(owner: Owner | None, user: str | None = "ada") -> Snapshot:
    """Make a snapshot with one holder of an owner."""
    process = builders.process(101)
    one = ProcessSnapshot(101, process.start_time, replace(sure(process.facts), owner=owner, user=user))
    return builders.snapshot(builders.device(0, [builders.holding(101)]), processes=[one])


def labels(snapshot: Snapshot) -> dict[str, str]:
    """Return the labels of the only process."""
    ((values, _),) = dict(processes.collect(snapshot, 0))[processes.PROCESS_INFO]
    return dict(zip(processes.PROCESS_INFO.labels, values, strict=True))


def test_the_owner_fills_its_labels() -> None:
    """The info series has the owner, and all other known facts about it; without an owner the user's."""
    known = {"owner_type": "pod", "owner": "ml/train-0", "user": "ada", "slurm_job": "", "unit": ""}
    of_pod = {name: getattr(POD, name) for name in ("namespace", "pod", "container", "notebook")}
    assert labels(owned(POD)).items() >= {**known, **of_pod}.items()
    assert labels(owned(None)).items() >= {"owner_type": "user", "owner": "ada"}.items()
    assert labels(owned(None, user=None)).items() >= {"owner_type": "", "owner": ""}.items()


def test_the_table_shows_the_owner_with_its_user() -> None:
    """A pod with its user, a user alone, and no control characters; a recording has its end."""
    assert "OWNER" in render_table(owned(POD))
    assert "pod ml/train-0 (ada)" in render_table(owned(POD))
    assert "user ada" not in render_table(owned(Owner("user", "ada")))
    assert " ada " in render_table(owned(Owner("user", "ada")))
    assert "\x1b" not in render_table(owned(Owner("user", "ada", notebook="\x1b[2J")))
    reading = Reading(1.0, 1.0, ended={7: "its container x has ended"})
    assert decode(encode(reading)).ended == {7: "its container x has ended"}


def test_an_ended_owner_makes_an_orphan_with_its_evidence() -> None:
    """A live process whose owner has ended is orphaned; stopped comes later, zombie earlier."""
    host = OneHolder()
    host.sample()
    why = "its pod ml/train-0 has ended: the kubelet has removed the pod's directory"
    fates: tuple[tuple[dict[Fate, float], State], ...] = (
        ({}, State.ORPHANED),
        ({"stopped": host.now}, State.ORPHANED),
        ({"zombie": host.now}, State.ZOMBIE),
    )
    for met, state in fates:
        host.holder.fates = met
        (device,) = host.sample(ended={host.holder.pid: why}).devices
        (holding,) = device.holdings
        assert holding.state is state
        assert holding.why.startswith(f"{why}; ") is (state is State.ORPHANED)
    host.holder.fates = {}
    assert host.holding().state is not State.ORPHANED
