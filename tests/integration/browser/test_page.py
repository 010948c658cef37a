"""The live page does what it promises, in a real browser."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.integration.browser.conftest import Looking, violations
from tests.support.builders import (
    KV_CACHE,
    MIB,
    NOW,
    Shown,
    agent,
    crowd,
    device,
    failed,
    holding,
    process,
    reread,
    snapshot,
)
from tests.support.chromium import Tab, tab
from tests.support.hostile import HOSTILE, hostile
from tests.support.serving import LOOPBACK, served
from tests.support.sure import sure
from vramledger.model.holder_facts import KvCache
from vramledger.model.reading import DeviceReading, HiddenHolder, Owner
from vramledger.model.snapshot import (
    AgentSnapshot,
    DeviceSnapshot,
    Holding,
    OwnerLimit,
    Pool,
    Reservation,
    ReservationStatus,
    Snapshot,
    State,
)
from vramledger_agent.printable import printable

GIB = 1024 * MIB
UNPROVEN = "58.0 GiB (41%) idle or orphaned, not proven"
CAROL = process(7, user="carol", command="notebook")


def incident(serial: int = 1, *, grown: int = 0) -> Snapshot:
    """Make two GPUs: a working holder, an idle notebook with 60 GiB, an orphan, and a dead pid."""
    held = [
        holding(7, 60 * GIB, State.IDLE, why="no sign of GPU work for 3600 s"),
        holding(8, 20 * GIB + grown, sm=0.5, last_active=NOW),
    ]
    orphan = replace(holding(9, 3 * GIB, State.ORPHANED, why="its parent has ended"), working=False)
    rest = [orphan, holding(10, GIB, State.DEAD)]
    hidden = (HiddenHolder(77, 1, "cuda", "stray.py", "bob", (1,)),)
    people = [CAROL, process(8), process(9, user="bob", command="rank")]
    shot = snapshot(device(0, held), device(1, rest, hidden=hidden), processes=people, serial=serial)
    return replace(shot, time=NOW + serial)


async def find(page: Tab, words: str) -> None:
    """Search the holders."""
    await page.run("document.querySelector('#find').focus()")
    await page.type(words)


async def column(page: Tab, name: str) -> list[str]:
    """Return a column's texts from top to bottom, the first line of each cell."""
    return await page.texts(f"#rows .column-{name} .first, #rows .column-{name}:not(:has(.first))")


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (KV_CACHE, "256 MiB of what it holds, 412,000 tokens, 3% in use by requests; its vLLM server says"),
        (KV_CACHE._replace(memory=None, tokens=None, usage=0.0), "size not known, 0% in use by requests;"),
        (KV_CACHE._replace(usage=None, memory=None), "size not known, 412,000 tokens, use not known;"),
        (None, None),
    ],
)
async def test_the_details_show_the_kv_cache(look: Looking, told: KvCache | None, shown: str | None) -> None:
    """What a holder's vLLM server says is in its details; without an answer nothing is said of it."""
    async with look(Shown(replace(incident(), kv_caches={} if told is None else {7: told}))) as page:
        await page.click("#rows tr:first-child .disclose")
        words = await page.texts(".details dt, .details dd")
        if shown is None:
            assert "KV cache" not in words
        else:
            assert words[words.index("KV cache") + 1].startswith(shown)


async def test_the_page_shows_devices_and_holders(look: Looking) -> None:
    """Each device has its ledger in figures, and each holder its owner, state, bytes and what to do."""
    async with look(Shown(incident())) as page:
        assert await column(page, "pid") == ["7", "8", "9", "10"]
        assert await column(page, "owner") == ["carol", "ada", "bob", "unknown owner"]
        assert await column(page, "state") == ["idle", "active", "orphaned", "dead"]
        assert await column(page, "memory") == ["60.0 GiB", "20.0 GiB", "3.00 GiB", "1.00 GiB"]
        (idle, active, orphaned, dead) = await page.texts("#rows .column-todo")
        assert "vramledger end --pid 7" in idle
        assert active == ""
        assert "vramledger end --pid 9" in orphaned
        assert "nvidia-smi --gpu-reset -i 1" in dead
        legend = await page.texts(".card:first-child .legend div")
        assert legend[:2] == ["active20.0 GiB", "idle60.0 GiB"]
        assert "64.0 GiB" in await page.text(".waste")
        assert "1 hidden" in await page.text(".card:last-child .extras")


@pytest.mark.parametrize(
    ("held", "headline"),
    [
        (holding(8, 20 * GIB, sm=0.5, last_active=NOW), "nothing held without work"),
        (replace(holding(8, 58 * GIB, State.IDLE), working=None), UNPROVEN),
    ],
    ids=["works", "perhaps idle"],
)
async def test_the_headline_is_what_is_wasted(look: Looking, held: Holding, headline: str) -> None:
    """What is idle by inference is not in the waste; the driver's own few MiB are held by nobody."""
    async with look(Shown(snapshot(device(0, [held], unattributed=9 * MIB)))) as page:
        assert await page.text(".waste") == headline
        assert "unattributed9.00 MiB" in await page.texts(".card .legend div")


async def test_a_ghost_device_says_so_on_a_phone_too(look: Looking) -> None:
    """Only its card says that no process uses the GPU, and the page stays as wide as the screen."""
    ghost = replace(device(1, utilization={"gpu": 1.0, "memory": 0.0}), ghost=True, ghost_since=NOW)
    async with look(Shown(snapshot(device(0, [holding(7)]), ghost))) as page:
        await page.size(360, 740, mobile=True)
        (said,) = await page.texts(".card .ghost:not([hidden])")
        assert said.startswith("Busy for minutes at idle power, and no process uses it.")
        assert await page.texts(".card:first-child .ghost:not([hidden])") == []
        assert await page.run("document.documentElement.scrollWidth") <= 360


async def test_a_notebook_does_not_take_the_place_of_its_user(look: Looking) -> None:
    """The program names its notebook, and the kernel its user: the user is the owner."""
    forged = process(7, user="bob", command="notebook", owner=Owner("user", "bob", notebook="alice"))
    async with look(Shown(snapshot(device(0, [holding(7)]), processes=[forged]))) as page:
        assert await column(page, "owner") == ["bob"]
        assert "notebook, alice" in await page.text("#rows")


async def test_a_new_sample_changes_the_page_by_itself(look: Looking) -> None:
    """Bytes, new holders and ended holders appear without a reload."""
    shown = Shown(incident())
    async with look(shown) as page:
        await page.run("window.same = document.querySelector('#rows tr')")
        shown.snapshot = incident(2, grown=5 * GIB)
        await page.until("document.querySelector('#rows').innerText.includes('25.0 GiB')")
        only = snapshot(device(0, [holding(7, 60 * GIB, State.IDLE), holding(11, GIB)]), serial=3)
        shown.snapshot = replace(only, time=NOW + 3)
        await page.until("document.querySelectorAll('#rows tr').length === 2")
        assert await column(page, "pid") == ["7", "11"]
        assert await page.run("window.same === document.querySelector('#rows tr')")


async def test_columns_sort_both_ways(look: Looking) -> None:
    """A click on a heading sorts by it, a second one the other way, and the heading says so."""
    async with look(Shown(incident())) as page:
        await page.click("th.column-pid button")
        assert await column(page, "pid") == ["7", "8", "9", "10"]
        await page.click("th.column-pid button")
        assert await column(page, "pid") == ["10", "9", "8", "7"]
        assert await page.run("document.querySelector('th.column-pid').ariaSort") == "descending"
        await page.click("th.column-state button")
        assert await column(page, "state") == ["dead", "orphaned", "idle", "active"]


async def test_holders_are_found_by_state_gpu_and_words(look: Looking) -> None:
    """State buttons, the choice of a GPU and the search filter the table; two clicks show the hoarder."""
    async with look(Shown(incident())) as page:
        await page.click("[data-state=idle].state-button")
        assert await column(page, "pid") == ["7"]
        assert await page.text("#count") == "1 of 4 holders"
        await page.click("#rows tr .disclose")
        facts = await page.text("#rows .details")
        assert [each for each in ("user carol", "60.0 GiB now", "Ask its user") if each not in facts] == []
        await page.click("#reset")
        assert len(await column(page, "pid")) == 4
        await find(page, "bob rank")
        assert await column(page, "pid") == ["9"]
        await page.click("#reset")
        await page.run(
            "(() => { const g = document.querySelector('#gpu'); g.selectedIndex = 2;"
            " g.dispatchEvent(new Event('change')); })()"
        )
        assert await column(page, "pid") == ["9", "10"]
        await find(page, "nobody like that")
        assert await page.text("#empty") == "No holder matches."


def insight() -> Snapshot:
    """Make a reserved GPU: its pod holds nothing; another process with an agent holds much."""
    first = device(0, [holding(7, 40 * GIB, State.IDLE)])
    pods = (("ml/train-0", False), ("ml/x", None))
    reserved = tuple(Reservation("pod", name, "kubelet", held=held) for name, held in pods)
    shot = snapshot(replace(first, reservation_status=ReservationStatus(reserved, (7,), ("kubelet",))))
    told = agent(first.reading.uuid)
    gib = {"allocated": 10, "reserved": 32, "reclaimable": 20, "allocated_peak": 12}
    pool = Pool("torch", 0, {name: each * GIB for name, each in gib.items()}, {})
    report = structs.replace(sure(told.report), consents=("reclaim",))
    return replace(shot, agents={7: replace(told, report=report, pools={first.reading.uuid: (pool,)})})


async def test_what_the_agent_says_stands_beside_the_memory(look: Looking) -> None:
    """Bytes in use, taken and reclaimable are shown with the command; a silent agent has no zeros."""
    shown = Shown(insight())
    async with look(shown) as page:
        assert await page.texts("#rows .used-inside") == ["10.0 GiB in use"]
        await page.click("#rows tr .disclose")
        facts = await page.text("#rows .details")
        assert "10.0 GiB in use of 32.0 GiB taken from the driver; 20.0 GiB could be freed" in facts
        assert "vramledger reclaim 7" in facts
        assert "8.00 GiB: context, libraries, other code" in facts
        assert "1.00 MiB requested: the memory that the program uses grows" in facts
        silent = AgentSnapshot(up=False, problem="silent", why="it is connected but sends no reports")
        shown.snapshot = replace(insight(), serial=2, time=NOW + 1, agents={7: silent})
        await page.until("document.querySelector('#rows .details').innerText.includes('silent')")
        assert await page.texts("#rows .used-inside") == [""]
        assert "in use" not in await page.text("#rows .details")


async def test_reservations_are_told(look: Looking) -> None:
    """The card says for whom its GPU is reserved and whether they hold it; a search finds the others."""
    shown = Shown(insight())
    async with look(shown) as page:
        assert await page.text(".reserved") == (
            "Reserved by kubelet for pod ml/train-0 (holds nothing here), "
            "pod ml/x (whether it holds memory is unknown)."
        )
        await find(page, "unreserved")
        await page.click("#rows tr .disclose")
        assert "its owner has not reserved this GPU" in await page.text("#rows .details")
        shown.snapshot = replace(incident(2), time=NOW + 2)
        await page.until("document.querySelector('.reserved').hidden")
        assert await page.text("#empty") == "No holder matches."


async def test_limits_are_told(look: Looking) -> None:
    """The card says what owners may take by their cgroups and what of it is taken, as far as it is known."""
    limits = (
        OwnerLimit("user", "ada", "/user.slice/ada", 80 * GIB, 20 * GIB, 0, None),
        OwnerLimit("pod", "a/b", "/kubepods/b", 4 * GIB, None, 0, None),
        OwnerLimit("pod", "a/none", "/kubepods/none", 0, 0, 0, None),
        OwnerLimit("pod", "a/free", None, None, None, 0, 2 * GIB),
    )
    first = device(0, [holding(7, 20 * GIB)])
    shown = Shown(snapshot(reread(replace(first, limits=limits), partition=100 * GIB)))
    async with look(shown) as page:
        assert await page.text(".limits") == (
            "Limited by cgroup: user ada may take 80.0 GiB, and 20.0 GiB (25%) of it is taken "
            "(/user.slice/ada); pod a/b may take 4.00 GiB, and how much of it is taken is unknown "
            "(/kubepods/b); pod a/none may take 0 B, and 0 B of it is taken (/kubepods/none). The exporter "
            "itself is in a partition of 100 GiB: NVML shows no more than that of this GPU."
        )
        shown.snapshot = snapshot(first, serial=2)
        await page.until("document.querySelector('.limits').hidden")


async def test_the_keyboard_reaches_everything(look: Looking) -> None:
    """Tab leads from the skip link through every control, and Enter opens details; the focus then stays."""
    shown = Shown(incident())
    async with look(shown) as page:
        reached = list[str]()
        named = "(e => e.id || e.dataset.state || e.className || e.textContent)(document.activeElement)"
        while "disclose" not in reached and len(reached) < 40:
            await page.press("Tab")
            reached.append(await page.run(named))
        assert {"skip", "theme", "idle", "find", "gpu", "Memory", "disclose"} <= set(reached), reached
        await page.press("Enter")
        assert len(await page.texts("#rows .details")) == 1
        shown.snapshot = incident(2, grown=100 * GIB)
        await page.until("document.querySelector('#rows').innerText.includes('120 GiB')")
        assert await page.run("document.activeElement.className") == "disclose"


async def test_dark_and_light(look: Looking) -> None:
    """The page follows the system's theme; the button chooses the other one permanently."""
    async with look(Shown(incident())) as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        light, dark = "rgb(244, 246, 248)", "rgb(13, 17, 23)"
        assert await page.run(ground) == light
        await page.prefer(prefers_color_scheme="dark")
        assert await page.run(ground) == dark
        await page.click("#theme")
        assert await page.run(ground) == light
        await page.go(await page.run("location.href"))
        assert await page.run(ground) == light


def eight() -> Snapshot:
    """Make eight GPUs as a lab has them: holders on some, and 14 MiB on each that nobody has."""
    orphan = replace(holding(9, 3 * GIB, State.ORPHANED), working=False)
    held = {
        0: [holding(7, 60 * GIB, State.IDLE), holding(8, 12 * GIB, sm=0.5, last_active=NOW)],
        2: [holding(10, 70 * GIB, sm=0.9, last_active=NOW)],
        5: [holding(11, 20 * GIB, State.STOPPED), orphan],
    }
    people = [
        *(CAROL, process(8), process(10), process(11, user="dora")),
        process(9, user="a-person-with-a-long-name", command="train_with_a_very_long_name_indeed.py"),
    ]
    devices = [device(gpu, held.get(gpu, []), unattributed=14 * MIB) for gpu in range(8)]
    return snapshot(*devices, processes=people)


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("width", [360, 390, 768, 1024, 1360, 1920])
async def test_nothing_is_cut_at_any_width(look: Looking, width: int, theme: str) -> None:
    """The button for details is inside the table, what to do ends before it, and is in the details too."""
    async with look(Shown(eight())) as page:
        await page.prefer(prefers_color_scheme=theme)
        await page.size(width, 900, mobile=width < 500)
        assert await page.run("document.documentElement.scrollWidth") <= width
        fits = "(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.scroller'))"
        assert await page.run(fits), "the table needs no sideways scrolling"
        edges = await page.run(
            "[...document.querySelectorAll('#rows tr')].map(row => {"
            " const right = e => e.getBoundingClientRect().right;"
            " const todo = row.querySelector('.column-todo'), press = row.querySelector('.disclose');"
            " return [right(todo), todo.scrollWidth - todo.clientWidth, press.getBoundingClientRect().left,"
            " right(press), right(document.querySelector('.scroller'))]; })"
        )
        assert len(edges) == 5
        for todo, over, left, press, table in edges:
            assert (press <= table, todo <= left, over <= 0) == (True, True, True)
        commands = "[...document.querySelectorAll('#rows .column-todo code')]"
        lines = set(await page.run(f"{commands}.map(e => e.getClientRects().length)"))
        assert lines == ({1} if width > 960 else {0}), "a command is not broken"
        names = "[...document.querySelectorAll('#rows .column-owner .first')]"
        cut = await page.run(f"{names}.map(e => e.scrollWidth - e.clientWidth)")
        assert max(cut) <= 0, "no name of an owner is cut"
        hints = await page.texts("#rows .hint")
        assert bool(await page.texts("#rows .column-todo")) == (width > 960)
        assert len(hints) == (0 if width > 960 else 3), "a narrow row says that there is something to do"
        await page.click("#rows tr:nth-child(2) .disclose")
        assert "vramledger end --pid 7" in await page.text("#rows .details")


async def test_a_click_on_a_row_opens_its_details(look: Looking) -> None:
    """Anywhere on the row, and again to close them; the button opens them once and not twice."""
    async with look(Shown(eight())) as page:
        await page.click("#rows tr:nth-child(2) .column-pid")
        assert "vramledger end --pid 7" in await page.text("#rows .details")
        opened = await page.run("document.querySelector('[aria-expanded=true]').ariaLabel")
        assert opened == "Details of pid 7"
        await page.click("#rows tr:nth-child(2) .column-owner")
        assert await page.texts("#rows .details") == []
        await page.click("#rows tr:nth-child(2) .disclose")
        assert len(await page.texts("#rows .details")) == 1


async def test_holders_come_before_the_cards_of_empty_gpus(look: Looking) -> None:
    """Who reads from the top, also on a phone, meets the holders before GPUs that nobody holds."""
    async with look(Shown(eight())) as page:
        await page.size(390, 844, mobile=True)
        assert [text[:5] for text in await page.texts("#devices h3")] == ["GPU 0", "GPU 2", "GPU 5"]
        free = [f"GPU {each}" for each in (1, 3, 4, 6, 7)]
        assert [text[:5] for text in await page.texts("#free h3")] == free
        top = "document.querySelector('{}').getBoundingClientRect().top"
        holders, below = [await page.run(top.format(each)) for each in ("#holders", "#free")]
        assert holders < min(below, 1000)


async def test_a_gpu_that_needs_a_look_stays_above(look: Looking) -> None:
    """Without a holder, but with much memory of nobody, or with hidden processes: it is not empty."""
    hidden = (HiddenHolder(77, 1, "cuda", "stray.py", "bob", (1,)),)
    held, nobodys = device(0, [holding(8, GIB)]), device(1, [], unattributed=9 * GIB)
    devices = [held, nobodys, device(2, [], hidden=hidden), device(3, [])]
    async with look(Shown(snapshot(*devices, processes=[process(8)]))) as page:
        assert [text[:5] for text in await page.texts("#devices h3")] == ["GPU 0", "GPU 1", "GPU 2"]
        assert [text[:5] for text in await page.texts("#free h3")] == ["GPU 3"]


async def test_a_few_mib_of_nobody_have_no_loud_colour(look: Looking) -> None:
    """14 MiB of 140 GiB are in the figures, and in no bar; 9 GiB are in both."""
    devices = device(0, [holding(8, GIB)], unattributed=14 * MIB), device(1, [], unattributed=9 * GIB)
    async with look(Shown(snapshot(*devices))) as page:
        bars, legends = (
            f"[...document.querySelectorAll('{each}.part-unattributed')]"
            for each in (".card .segment", ".legend ")
        )
        slight, much = await page.run(f"{bars}.map(e => e.getBoundingClientRect().width)")
        assert slight < 1
        assert much > 10
        first, second = await page.run(f"{legends}.map(e => getComputedStyle(e).backgroundColor)")
        assert first == "rgba(0, 0, 0, 0)" != second
        assert "unattributed14.0 MiB" in await page.texts(".card .legend div")


async def test_the_first_idle_minutes_of_a_chart_are_idle(look: Looking) -> None:
    """While it was not known the holding was drawn as active; once it is known, it was idle since then."""
    began = NOW - 300

    def shot(serial: int, state: State) -> Snapshot:
        held = replace(holding(7, 60 * GIB, state), since=began)
        return replace(snapshot(device(0, [held]), serial=serial), time=NOW + 10 * serial)

    drawn = "[...document.querySelectorAll('.card .area')].map(e => e.classList[1])"
    shown = Shown(shot(1, State.ACTIVE))
    async with look(shown) as page:
        await page.until(f"{drawn}.includes('part-active')", "the holding as active")
        shown.snapshot = shot(2, State.IDLE)
        await page.until(f"{drawn}.includes('part-idle')", "the holding as idle")
        assert "part-active" not in await page.run(drawn)


async def test_a_lost_connection_says_so_and_recovers(browser: str) -> None:
    """When the exporter ends the page says that its data is old; later the page continues."""
    async with tab(browser) as page:
        async with served(Shown(incident()), LOOPBACK) as client:
            await page.go(f"http://127.0.0.1:{client.port}/")
            await page.until("document.querySelector('#rows tr') !== null")
        await page.until("document.querySelector('#status').textContent === 'Connection lost'")
        assert "Connection lost." in await page.text("#notices")
        assert await page.run("document.body.classList.contains('stale')")
        async with served(Shown(incident(5, grown=GIB)), port=client.port):
            await page.until("document.querySelector('#status').textContent === 'Live'")
            await page.until("document.querySelector('#rows').innerText.includes('21.0 GiB')")
            assert not await page.run("document.body.classList.contains('stale')")
            assert await page.text("#notices") == ""


async def test_hostile_names_are_text(look: Looking) -> None:
    """Every name from a program, pod, device or recording is shown unchanged, and is never markup."""
    async with look(Shown(hostile())) as page:
        await page.click("#rows tr .disclose")
        await page.click(".extras summary")
        seen = HOSTILE.replace("\u202e", "\ufffd")  # it would reverse the direction of the words beside it
        assert (await column(page, "owner"))[0] == seen
        assert seen in (await page.texts(".notice.loud"))[0]
        assert seen in (await page.texts(".card h3"))[0]
        assert seen in (await page.texts("#rows .details"))[0]
        assert seen in (await page.texts(".extras li"))[1]
        assert (await page.run("document.title")).endswith(" · vramledger")
        assert await page.run("document.querySelectorAll('main img, main script').length") == 0


async def test_the_page_replaces_what_a_terminal_does_not_get(look: Looking) -> None:
    """One rule says which characters of a name are shown: here, and in what commands print."""
    name = "a\u3164\ufe0f\u2800\u00a0b\u0301\u0302\u0302\u0302 c\U000e0101\u202ed"
    async with look(Shown(snapshot(device(0, [holding(7)], name=name)))) as page:
        assert printable(name, "\ufffd") in (await page.texts(".card h3"))[0]


@pytest.mark.parametrize(
    ("shot", "ready", "says"),
    [
        (Snapshot(), False, "The first sample has not finished yet."),
        (failed("no-driver", "load <nvidia>"), True, "No GPU data (no-driver). load <nvidia>"),
        (replace(incident(), source="replay", recording="lively"), True, "RECORDING This is lively"),
        (replace(snapshot(device(0)), host_pid_namespace=False), True, "not in the host's PID namespace"),
    ],
    ids=["first", "failed", "recording", "blind"],
)
async def test_what_must_not_be_overlooked(look: Looking, shot: Snapshot, says: str, *, ready: bool) -> None:
    """No sample yet, no driver, a recording and hidden holders each have a notice at the top."""
    async with look(Shown(shot, ready)) as page:
        await page.until(f"document.querySelector('#notices').innerText.includes({says!r})", says)


async def test_devices_without_a_ledger_say_why(look: Looking) -> None:
    """A lost device, a divided GPU and a GPU without figures show the reason in place of their ledger."""
    readings = (DeviceReading(0, "GPU-0", error="lost"), DeviceReading(1, "GPU-1", divided=True))
    devices = [DeviceSnapshot(each, up=each.error is None) for each in (*readings, DeviceReading(2, "GPU-2"))]
    async with look(Shown(snapshot(*devices))) as page:
        await page.until("document.querySelectorAll('.card').length === 3")
        assert await page.texts(".card .note") == [
            "This device does not answer (lost). Its present state is not known.",
            "Divided into MIG instances, which hold the memory.",
            "The driver reports no memory figures for it.",
        ]
        assert await page.texts(".bar") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
async def test_no_accessibility_rule_is_broken(look: Looking, theme: str, width: int) -> None:
    """axe-core finds no violation, with details open and a filter set, in both themes and on a phone."""
    async with look(Shown(replace(incident(), source="replay", recording="lively"))) as page:
        await page.size(width, 900, mobile=width < 600)
        await page.prefer(prefers_color_scheme=theme)
        await page.click("#rows tr .disclose")
        await page.click("[data-state=idle].state-button")
        await page.click(".extras summary")
        assert await violations(page) == []


async def test_many_holders_are_all_there(look: Looking) -> None:
    """8 GPUs with 64 holders each: every one has its row."""
    async with look(Shown(crowd(8, 64))) as page:
        await page.until("document.querySelectorAll('#rows tr').length === 512")
        assert await page.text("#count") == "512 holders"
