"""A host whose names try to be markup, for the test and for the picture of it."""

from msgspec.structs import replace

from tests.support.builders import MIB, device, holding, process, snapshot
from vramledger.model.reading import HiddenHolder, Owner
from vramledger.model.snapshot import Snapshot, State

HOSTILE = (
    """</td><script>document.title='owned'</script><img src=x onerror="document.title='owned'">&amp;\u202e"""
)


def hostile() -> Snapshot:
    """Make a recording in which every name that a stranger can choose is a hostile one."""
    owner = Owner("pod", HOSTILE, namespace=HOSTILE, pod=HOSTILE)
    known = process(7, user=HOSTILE, command=HOSTILE, owner=owner)
    hidden = (HiddenHolder(8, 1, "cuda", HOSTILE, HOSTILE, (0,)),)
    held = [holding(7, 1024 * MIB, State.ORPHANED, why=HOSTILE)]
    shot = snapshot(device(0, held, name=HOSTILE, hidden=hidden), processes=[known])
    return replace(shot, source="replay", recording=HOSTILE)
