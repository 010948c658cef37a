"""``make pictures``: take pictures of the page in each of its states, from recordings, for the documents.

Never by hand: after a change of the page, make the pictures again, and look at them.
"""

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from tests.support.builders import Shown, failed
from tests.support.chromium import Tab, chromium, tab
from tests.support.hostile import hostile
from tests.support.serving import served
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import IDLE_AFTER
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import Replay, demo_recording, read_recording, shift_times

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "exporter" / "pictures"

_MOMENT = 901  # readings of the bundled recording, 30 minutes: the moment that COMMANDS.md shows too
_PAST = 450  # readings before that moment: they fill the 15 minutes of the chart
_NOW = 1_790_000_000.0  # the time that the pictures show, so that they are always the same

Steps = Callable[[Tab], Awaitable[object]]


def incident(*, source: str = "nvml") -> list[Snapshot]:
    """Replay the bundled recording up to the shown moment; return the snapshots of its last 15 minutes."""
    replay = Replay(demo_recording(), 1.0)
    name = replay.name if source == "replay" else None
    tracker = HoldingTracker(idle_after=replay.idle_after or IDLE_AFTER, source=source, recording=name)
    readings = list(islice(read_recording(demo_recording()), _MOMENT))
    shift = _NOW - readings[-1].time
    return [tracker.update(shift_times(reading, shift)) for reading in readings][-_PAST:]


async def _nothing(_: Tab) -> None:
    pass


async def _details(page: Tab) -> None:
    await page.click("[data-state=idle].state-button")
    await page.click("#rows tr .disclose")


async def _photograph(  # noqa: PLR0913 a picture has as many sides
    address: str, name: str, shots: list[Snapshot], *, steps: Steps = _nothing, dark: bool = False,
    phone: bool = False, lose: bool = False,
) -> None:  # fmt: skip
    shown = Shown(replace(shots[0], serial=1))
    async with AsyncExitStack() as exporter, tab(address) as page:
        client = await exporter.enter_async_context(served(shown))
        await page.call("Emulation.setTimezoneOverride", timezoneId="UTC")
        await page.size(*((390, 844) if phone else (1360, 800)), mobile=phone)
        await page.prefer(prefers_color_scheme="dark" if dark else "light", prefers_reduced_motion="reduce")
        # The exporter gets all of it, so that its history has it.
        for number, shot in enumerate([*shots[:-1:2], shots[-1]], 1):
            shown.snapshot = replace(shot, serial=number)
            await asyncio.sleep(0.006)
        await page.go(f"http://127.0.0.1:{client.port}/")
        await page.until("document.querySelector('#rows tr, .notice.bad') !== null")
        await page.until("!document.querySelector('.plot') || document.querySelector('.area') !== null")
        if lose:
            await exporter.aclose()
            await page.until("document.body.classList.contains('stale')")
        await steps(page)
        await asyncio.sleep(0.3)  # the last frame is drawn
        picture = await page.picture()
        (PICTURES / f"{name}.png").write_bytes(picture)
        print(f"{name}.png {len(picture) / 1000:.0f} kB")


async def _all(address: str) -> None:
    live = incident()
    await _photograph(address, "page", live)
    await _photograph(address, "page-dark", live, dark=True, steps=_details)
    await _photograph(address, "page-phone", live, phone=True)
    await _photograph(address, "page-recording", incident(source="replay"))
    reason = failed("no-library", "libnvidia-ml.so.1 is not on this host; install the NVIDIA driver")
    await _photograph(address, "page-no-driver", [reason])
    await _photograph(address, "page-lost", live, lose=True)
    opened: Steps = lambda page: page.click("#rows tr .disclose")  # noqa: E731 a step
    await _photograph(address, "page-hostile", [hostile()], steps=opened)


def main() -> int:
    program = shutil.which("chromium")
    if program is None:
        print("chromium is not on this machine; install it", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with chromium(Path(program)) as address:
        asyncio.run(_all(address))
    return 0


if __name__ == "__main__":
    sys.exit(main())
