"""Write segments for the tests of later versions: ``python -m tests.lab.storage``.

Run it once for each version of the format, and keep the earlier ones.
"""

import json
from random import Random

from tests.support.host.model import EPOCH
from tests.support.past import GOLDEN, GOLDEN_MOMENTS, StoredPast, night, shown_facts
from vramledger.storage.answers import open_past
from vramledger.storage.database import VERSION
from vramledger.storage.protocol import SINCE
from vramledger.storage.state import compute


def write_golden() -> None:
    """Store half an hour of 6 holders as this version of the format does, with what must be shown of it."""
    directory = GOLDEN / f"v{VERSION}"
    directory.mkdir(parents=True)
    past = StoredPast(directory, night(6, Random(1)))  # noqa: S311 a simulation
    for thinned in (2 * 3600.0, 0.0):
        past.watch(1000)
        past.process.flush()
        past.recorder.begin_again()
        past.sample()
        reached, past.now = past.now, past.now + thinned
        past.writer.keep_house()
        past.now = reached
    past.watch(150)
    past.process.flush()
    shown = {}
    for at in GOLDEN_MOMENTS:
        with open_past(directory) as found:
            moment = found.find(EPOCH + at)
        assert moment is not None
        shown[str(EPOCH + at)] = shown_facts(compute(moment, EPOCH + at).snapshot)
    report = past.ask(ask=SINCE, **{"from": EPOCH, "to": EPOCH + past.now})[1]
    past.process.end()
    content = {"moments": shown, "owners": report["owners"], "leftovers": report["leftovers"]}
    (directory / "shown.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_golden()
