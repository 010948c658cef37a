"""What ``vramledger fit`` reads, what a program needs, and which devices have room for it."""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from tests.support.builders import GIB, MIB, TOTAL, agent, device, holding, process, snapshot
from tests.support.sure import sure
from tests.support.wrong_values import WRONG, places, with_value
from vramledger.accounting.holders.policies import CONTEXT_BYTES
from vramledger.commands import fit
from vramledger.commands.fit_input import Busy, DeviceUse, FrameworkUse, LedgerSample, Program, read_ledger
from vramledger.commands.fit_verdict import (
    AFTER,
    NO,
    PERHAPS,
    TIGHT,
    UNKNOWN,
    YES,
    MemoryNeed,
    Offer,
    assess_need,
    assign_devices,
    copies_by_compute,
    limit_advice,
    make_offer,
)
from vramledger.errors import RecordingError, StartupError
from vramledger.model.reading import CgroupLimit, Owner
from vramledger.model.snapshot import DeviceSnapshot, Grade, Reservation, ReservationStatus, State
from vramledger.views.ledger_json import snapshot_json

PROGRAM = Program(7, "train.py", ("user", "ada"))
CGROUP = "/kubepods/b"
POD = Program(7, "train.py", ("pod", "a/b"), limited_by=(CGROUP,))
CARD = 24_265 * MIB


def ledger(*devices: DeviceSnapshot, **more: Any) -> LedgerSample:  # noqa: ANN401 as for a snapshot
    """Return the ledger of some devices, as the command reads it."""
    return read_ledger(snapshot_json(snapshot(*devices, **more)), "the sample")


def need(gib: float, *, most: float | None = None, whole_life: bool = True) -> MemoryNeed:
    """Return a need that is known, with a tenth more for planning; with ``most``, one that is not."""
    (seen,) = ledger(device(0, [holding(7)])).uses[7]
    judged = assess_need(seen._replace(whole_life=whole_life))
    if most is not None:
        return judged._replace(bytes=None, planned=None, most=int(most * GIB))
    return judged._replace(bytes=int(gib * GIB), planned=int(gib * 1.1 * GIB))


def limited(
    maximum: int | None, used: int | None, *holders: tuple[int, int], state: State = State.ACTIVE
) -> DeviceSnapshot:
    """Return a device on which a cgroup is limited, GiB; None where that is not known or not so."""
    limit = CgroupLimit(CGROUP, 0, maximum and maximum * GIB, used and used * GIB)
    return changed(device(0, [holding(pid, gib * GIB, state) for pid, gib in holders]), limits=(limit,))


def offer(need: MemoryNeed, *devices: DeviceSnapshot, program: Program = PROGRAM, live: bool = True) -> Offer:
    """Return what the first of some devices offers."""
    return make_offer(need, ledger(*devices).devices[0], program, live=live)


def offer_to_pod(judged: MemoryNeed, *devices: DeviceSnapshot, live: bool = True) -> Offer:
    """Return what the first of some devices offers to a program of the pod."""
    return offer(judged, *devices, program=POD, live=live)


def answered(seen: fit.Seen, need: MemoryNeed, *offers: Offer) -> fit.Fit:
    """Return the answer for a program with one need."""
    return fit.Fit(seen, (need,), (offers,), "here", of_this_host=True, headroom=0.1)


def changed(one: DeviceSnapshot, **reading: Any) -> DeviceSnapshot:  # noqa: ANN401 any field of a reading
    """Return a device of which the driver or the kernel says something else."""
    return replace(one, reading=structs.replace(one.reading, **reading))


def test_free_memory_decides() -> None:
    """A device has room with headroom, without it, or not at all."""
    one = device(0, [holding(8, 100 * GIB)])
    free = (ledger(one).devices[0].free or 0) / GIB
    verdicts = [offer(need(wanted), one).verdict for wanted in (free / 1.2, free / 1.05, free + 1)]
    assert verdicts == [YES, TIGHT, NO]


def test_its_own_memory_is_free_when_it_is_started_again() -> None:
    """Where the program runs now, what it holds counts as room; a pid of another time is another program."""
    one = device(0, [holding(7, 130 * GIB)])
    assert [offer(need(100), one, live=live).verdict for live in (True, False)] == [YES, NO]


@pytest.mark.parametrize("state", sorted(set(State) - {State.ORPHANED, State.UNKNOWN}))
def test_only_what_end_can_free_is_evictable(state: State) -> None:
    """Memory of a holder that does not work would be room; of one that works, or that no signal ends, not."""
    found = offer(need(50), device(0, [holding(8, 130 * GIB, state)]))
    freed = state in (State.IDLE, State.ZOMBIE, State.STOPPED)
    assert found.verdict == (AFTER if freed else NO)
    assert [each.command for each in found.evict] == ["vramledger end --pid 8"] * freed


def test_who_is_evicted() -> None:
    """Nobody whose idleness is inferred; the largest holdings first, and no more than is needed."""
    idle = replace(holding(8, 130 * GIB, State.IDLE), working=None)
    assert offer(need(50), device(0, [idle])).verdict == NO
    several = [holding(pid, gib * GIB, State.IDLE) for pid, gib in ((8, 10), (9, 60), (10, 50))]
    found = offer(need(70), device(0, several))
    assert [each.command.rpartition(" ")[2] for each in found.evict] == ["9"]


@pytest.mark.parametrize(("consents", "verdict"), [((), NO), (("reclaim",), AFTER)])
def test_a_cache_is_evictable_with_consent(consents: tuple[str, ...], verdict: str) -> None:
    """What empty_cache() would free counts only where the program accepts the request."""
    shot = snapshot(device(0, [holding(8, 130 * GIB)]), processes=[process(8)])
    ((uuid, known),) = agent(shot.devices[0].reading.uuid).pools.items()
    torch = next(each for each in known if each.framework == "torch")
    torch = torch._replace(figures={**torch.figures, "reclaimable": 100 * GIB})
    said = agent(uuid)
    said = replace(said, pools={uuid: (torch,)}, report=structs.replace(sure(said.report), consents=consents))
    (one,) = read_ledger(snapshot_json(replace(shot, agents={8: said})), "the sample").devices
    found = make_offer(need(90), one, PROGRAM, live=True)
    assert found.verdict == verdict
    assert [each.command for each in found.evict] == ["vramledger reclaim 8"] * bool(consents)


@pytest.mark.parametrize(
    ("granted", "allowed"), [((), False), ((("pod", "ml/other"),), False), ((("user", "ada"),), True)]
)
def test_a_scheduler_says_who_gets_its_devices(granted: tuple[tuple[str, str], ...], allowed: bool) -> None:
    """A free device that a scheduler manages is not ours unless the program's owner has a reservation."""
    reservations = tuple(Reservation(*each, "slurm", held=False) for each in granted)
    status = ReservationStatus(reservations, (), ("slurm",))
    found = offer(need(10), replace(device(0), reservation_status=status))
    assert (found.verdict, found.allowed, found.usable) == (YES, allowed, allowed)
    assert ("slurm" in found.reserved) == (not granted)


def test_a_divided_gpu_is_counted_by_its_instances() -> None:
    """The GPU that MIG divides, and a second compute instance on the same memory, are not counted again."""
    whole = replace(changed(device(0), divided=True), ledger=None)
    first = changed(device(0, uuid="MIG-1"), mig_profile="1g.18gb")
    second = replace(device(0, uuid="MIG-2"), memory_counted_under="MIG-1", holdings=(holding(7),))
    found = ledger(whole, first, second)
    assert [(each.uuid, each.name) for each in found.devices] == [("MIG-1", "NVIDIA H200 MIG 1g.18gb MIG-1")]
    assert found.devices[0].holdings == {7: 512 * MIB}, "a holder on either instance has of this memory"
    assert len(found.uses[7]) == 1
    assert make_offer(need(1), found.devices[0], PROGRAM, live=True).runs_here


def test_a_device_that_does_not_answer_is_not_full() -> None:
    """A lost device has an unknown verdict, not a negative one."""
    lost = device(0)
    lost = replace(lost, up=False, ledger=None, reading=lost.reading.without_data("lost"))
    found = offer(need(10), lost)
    assert (found.verdict, found.room, found.copies_now) == (UNKNOWN, None, None)
    assert "lost" in ledger(lost).devices[0].problem


def test_an_upper_bound_is_enough_but_less_proves_nothing() -> None:
    """A program that was watched since its start fits where what it held is free; elsewhere it may fit."""
    one = device(0, [holding(8, 100 * GIB)])
    assert [offer(need(0, most=most), one).verdict for most in (20, 80)] == [YES, PERHAPS]


@pytest.mark.parametrize("most", [1, 20, 80])
@pytest.mark.parametrize("state", [State.ACTIVE, State.IDLE])
def test_what_was_seen_of_a_part_of_a_life_decides_nothing(most: float, state: State) -> None:
    """A program that was not watched since its start may fit, whatever it held; nobody is evicted for it."""
    found = offer(need(0, most=most, whole_life=False), device(0, [holding(8, 100 * GIB, state)]))
    assert (found.verdict, found.evict, found.usable) == (PERHAPS, (), False)
    assert (found.copies_now, found.copies_empty) == (None, None)


@pytest.mark.parametrize(("known", "status"), [(True, fit.DOES_NOT_FIT), (False, fit.CANNOT_TELL)])
def test_an_upper_bound_that_is_not_free_now_is_no_refusal(known: bool, status: int) -> None:
    """With only an upper bound of the need, memory that others would have to free first decides nothing."""
    seen = ledger(device(0, [holding(7, GIB), holding(8, 130 * GIB, State.IDLE)]))
    judged = need(50) if known else need(0, most=50)
    found = make_offer(judged, seen.devices[0], PROGRAM, live=True)
    assert found.verdict == AFTER
    assert answered(fit.Seen(PROGRAM, (), seen, ""), judged, found).status == status


@pytest.mark.parametrize(("wanted", "verdict"), [(0.9, YES), (0.98, TIGHT), (1.1, NO), (18, NO)])
def test_a_cgroup_leaves_less_than_is_free(wanted: float, verdict: str) -> None:
    """A program has no more room than its owner's cgroup may still take, whatever the device has free."""
    found = offer_to_pod(need(wanted), limited(16, 15, (8, 15)))
    assert (found.verdict, found.room) == (verdict, GIB)
    assert found.copies_empty == (0 if wanted == 18 else int(16 / (wanted * 1.1)))


def test_the_room_of_a_cgroup() -> None:
    """Its own memory counts in it, a lowered limit leaves nothing, and nobody is evicted without need."""
    assert offer_to_pod(need(15), limited(16, 15, (7, 15))).verdict == TIGHT
    assert offer_to_pod(need(14), limited(16, 15, (7, 15)), live=False).verdict == NO
    assert offer_to_pod(need(20), limited(16, 15, (7, 30))).room == 16 * GIB, "never more than the limit"
    assert offer_to_pod(need(1), limited(16, 20, (8, 20))).room == 0
    idle = limited(16, 0, (8, 130), state=State.IDLE)
    assert offer_to_pod(need(12), idle).verdict == AFTER
    assert (offer_to_pod(need(18), idle).verdict, offer_to_pod(need(18), idle).evict) == (NO, ())


@pytest.mark.parametrize(("wanted", "verdict"), [(1, PERHAPS), (12, PERHAPS), (18, NO)])
def test_an_unknown_part_of_a_limit_is_not_free(wanted: float, verdict: str) -> None:
    """Where it is not known what a cgroup has taken, the program may fit up to the limit, and not beyond."""
    found = offer_to_pod(need(wanted), limited(16, None, (8, 1)))
    assert (found.verdict, found.copies_now, found.usable) == (verdict, None, False)


def test_limits_that_may_exist_are_a_doubt() -> None:
    """Known on another device only, of an unknown cgroup, or newer than the file."""
    first, other = limited(16, 15, (7, 15)), device(1)
    assert offer_to_pod(need(18), other, first).verdict == PERHAPS
    free = PROGRAM._replace(limited_by=())
    assert make_offer(need(18), ledger(first, other).devices[1], free, live=True).verdict == YES
    other = limited(None, 0)
    verdicts = [offer_to_pod(need(18), other, first, live=live).verdict for live in (True, False)]
    assert verdicts == [YES, PERHAPS]
    assert offer(need(18), changed(device(0), limits=())).verdict == PERHAPS
    assert offer(need(18), limited(16, 1, (8, 1)), program=free, live=False).verdict == PERHAPS


def test_limits_that_could_not_be_read_are_a_doubt() -> None:
    """A failed query of limits is not the absence of limits, for a live program or for another one."""
    failed = changed(device(0, [holding(7, GIB)]), failed=("limits",))
    for live in (True, False):
        assert offer_to_pod(need(18), failed, live=live).verdict == PERHAPS
        assert offer(need(18), failed, live=live).verdict == PERHAPS
    assert offer(need(18), device(0), live=False).verdict == YES


def test_the_limit_that_decides_is_named() -> None:
    """A NO is due to a limit that is known, also one that was read of a sibling instance."""
    program = POD._replace(limited_by=(f"{CGROUP}/c", CGROUP))
    found = offer(need(10), limited(16, 15, (8, 15)), program=program, live=False)
    assert (found.verdict, sure(found.limit).cgroup) == (NO, CGROUP)
    second = replace(changed(limited(16, 15, (8, 15)), uuid="MIG-2"), memory_counted_under="MIG-1")
    assert offer_to_pod(need(18), device(0, uuid="MIG-1"), second).verdict == NO


def test_a_limit_counts_only_for_the_programs_below_its_cgroup() -> None:
    """Of two programs of one owner only the one in the limited cgroup has less room."""
    placed = [
        replace(one, facts=one.facts and structs.replace(one.facts, cgroup=(f"0::{path}",)))
        for one, path in ((process(7), f"{CGROUP}/c"), (process(8), "/user.slice"), (process(9), ""))
    ]
    seen = ledger(limited(16, 15, (7, 15), (8, 1), (9, 1)), processes=placed)
    offers = [make_offer(need(18), seen.devices[0], seen.programs[pid], live=True) for pid in (7, 8, 9)]
    assert [each.verdict for each in offers] == [NO, YES, PERHAPS]
    assert [seen.programs[pid].limited_by for pid in (7, 8, 9)] == [(CGROUP,), (), None]


@pytest.mark.parametrize(
    ("maximum", "used", "verdict"), [(20, 19, NO), (8, 0, NO), (100, 50, YES), (100, None, PERHAPS)]
)
def test_the_least_room_of_nested_limits_counts(maximum: int, used: int | None, verdict: str) -> None:
    """A limit above that of its own cgroup counts too, and one of which the use is not known is a doubt."""
    one = limited(16, 2, (7, 1))
    above = CgroupLimit("/kubepods", 0, maximum * GIB, used and used * GIB)
    both = changed(one, limits=(*(one.reading.limits or ()), above))
    assert offer(need(10), both, program=POD._replace(limited_by=(CGROUP, "/kubepods"))).verdict == verdict


def test_a_program_of_unknown_cgroup_is_promised_nothing() -> None:
    """Where cgroups are limited and nobody knows the program's, its room is not known: the text says it."""
    seen, judged = ledger(limited(16, 15, (8, 15))), need(1)
    doubt = make_offer(judged, seen.devices[0], PROGRAM, live=False)
    found = answered(fit.Seen(PROGRAM, (), seen, ""), judged, doubt)
    assert (doubt.verdict, found.status) == (PERHAPS, fit.CANNOT_TELL)
    assert "it is not known whether its own is" in "\n".join(fit.fit_lines(found))


def test_the_limit_of_a_cgroup_is_named() -> None:
    """The line and the JSON of a device say which cgroup leaves less than is free."""
    seen, judged = ledger(limited(16, 15, (8, 15))), need(18)
    found = answered(fit.Seen(POD, (), seen, ""), judged, make_offer(judged, seen.devices[0], POD, live=True))
    text = "\n".join(fit.fit_lines(found))
    said = json.loads(json.dumps(fit.fit_json(found)))["needs"][0]["devices"][0]
    assert "NO: 1.00 GiB free; limited by its cgroup /kubepods/b: 15.00 GiB of 16.00 GiB are taken" in text
    assert said["cgroup_limit"] == {"cgroup": "/kubepods/b", "maximum": 16 * GIB, "used": 15 * GIB}
    assert found.status == fit.DOES_NOT_FIT


def test_copies_are_counted_without_the_drivers_reserve() -> None:
    """The empty GPU has what the driver does not keep, and a device offers the ledger's free memory."""
    found = offer(need(1)._replace(planned=TOTAL // 4), device(0))
    assert (found.copies_now, found.copies_empty) == (3, 3)
    (one,) = ledger(device(0, unattributed=14 * MIB)).devices
    assert one.free == (one.capacity or 0) - 14 * MIB


def test_each_need_gets_a_device_of_its_own() -> None:
    """A program on two GPUs fits only if two different ones have room, however they must be assigned."""
    small, large = ledger(device(0, [holding(8, 100 * GIB)]), device(1)).devices
    both = [[make_offer(need(gib), one, PROGRAM, live=True) for one in (large, small)] for gib in (20, 90)]
    assert assign_devices(both)
    assert not assign_devices([*both, both[0]])


def test_owners_of_a_pod_are_compared_by_type_and_name() -> None:
    """A process whose owner is unknown is compared by its user."""
    known = process(7)
    facts = structs.replace(sure(known.facts), owner=Owner("pod", "ml/train-0", pod="train-0"))
    seen = ledger(device(0, [holding(7)]), processes=[replace(known, facts=facts)])
    assert seen.programs[7].owner == ("pod", "ml/train-0")
    assert ledger(device(0, [holding(7)])).programs[7].owner == ("user", "ada")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n", b"nonsense", b"[" * 100_000, b"{}", b"[]", b"7", b"\x1f\x8b\x00", b"\x00" * 100,
        b'{"format": "vramledger-recording", "version": 1}\n{}',
        b'{"format": "vramledger-recording", "version": 99}',
        b'{"version": 1, "devices": []}', b'{"version": 2}', b'{"version": 2, "devices": []}',
        b'{"version": 2, "devices": {}}', b'{"version": 2, "devices": [7]}',
        b'{"version": 2, "devices": [{"up": "yes"}]}',
        b'{"version": 2, "devices": [{"up": true, "memory": {"total": -1}}]}',
        b'{"version": 2, "devices": [{"up": true, "memory": {"total": true}}]}',
        b'{"version": 2, "devices": [{"up": true, "holdings": [{"pid": 99999999999999999999}]}]}',
        b'{"version": 2, "devices": [{"up": true, "holdings": [{"agent": {"frameworks": 3}}]}]}',
        b'{"version": 2, "devices": [{"holdings": [{"pid": "7"}]}]}',
        b'{"version": 2, "watched_since": NaN, "devices": []}',
        b'{"requested": 1, "pool": []}', b'{"requested": 1, "pool": {}, "framework": ["torch"]}',
        b'{"requested": 1, "pool": {"allocated": -1}, "framework": "torch"}',
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    """Whatever a file holds, it is an error in one line that names the file."""
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises((RecordingError, StartupError), match=r"file\.json") as raised:
        fit.read_file(path, None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("asked", [62 * GIB, None])
@pytest.mark.parametrize(
    ("framework", "pool"),
    [
        ("jax", {"in_use": 20 * GIB, "in_use_peak": 20 * GIB, "pool": 60 * GIB, "limit": 60 * GIB}),
        ("tensorflow", {"in_use": 19 * GIB, "in_use_peak": 20 * GIB}),
        ("jax", {}),
        ("cupy", {"in_use": 20 * GIB, "pool": 22 * GIB}),
        ("torch", {"allocated": 20 * GIB, "allocated_peak": 20 * GIB, "reserved": 22 * GIB}),
    ],
)
def test_reports_are_read(framework: str, pool: dict[str, int], asked: int | None, tmp_path: Path) -> None:
    """What was in use as the allocation failed, if known, is needed at least; nothing certainly fits."""
    path = tmp_path / "oom-1.json"
    content = {"pid": 7, "framework": framework, "ordinal": None, "requested": asked, "pool": pool}
    path.write_text(json.dumps({"version": 1, "verdict": "unknown", **content}))
    seen = fit.read_file(path, None)
    need = assess_need(seen.uses[0])
    roomy = offer(need, device(0), program=seen.program, live=False)
    found = answered(seen, need, roomy)
    text = "\n".join(fit.fit_lines(found))
    assert need.bytes == (20 * GIB + CONTEXT_BYTES if pool else None)
    assert (need.wanted is None, need.enough, roomy.verdict) == (not (asked and pool), None, PERHAPS)
    assert found.status == fit.CANNOT_TELL
    assert "wanted       not known: an allocation failed" in text or asked is not None
    assert json.loads(json.dumps(fit.fit_json(found)))["needs"][0]["failed"]


def test_a_failure_of_unknown_size_in_a_ledger_counts() -> None:
    """A program that has failed does not fit for certain, also if nobody knows with how many bytes."""
    document = _document()
    (agent_of_7,) = [each["agent"] for each in document["devices"][0]["holdings"] if each["pid"] == 7]
    agent_of_7["last_oom"] = {"framework": "torch", "requested": None, "on_this_device": True}
    need = assess_need(fit.choose_program([read_ledger(document, "file")], 7, "").uses[0])
    assert (need.failed, need.enough) == (True, None)


def sample(pid: int, started: float | None, peak: int, *uuids: str) -> LedgerSample:
    """Return a sample in which a program holds memory on some devices."""
    uses = [DeviceUse(each, 0, "H200", 100, peak, peak, None, "", "", (), whole_life=False) for each in uuids]
    return LedgerSample((), {pid: Program(pid, started=started)}, {pid: tuple(uses)}, "")


def test_which_program_is_meant() -> None:
    """Not an earlier one under the pid, on the devices of the newest sample, and one of several."""
    seen = fit.choose_program([sample(7, 100.0, 50, "A"), sample(7, 900.0, 3, "A")], 7, "here")
    assert [use.peak for use in seen.uses] == [3]
    seen = fit.choose_program([sample(7, 1.0, 9, "A", "B"), sample(7, 1.0, 3, "B")], 7, "here")
    assert [(use.uuid, use.peak) for use in seen.uses] == [("B", 9)]
    ledgers = [sample(7, 1.0, 9, "A"), sample(8, 1.0, 9, "A")]
    with pytest.raises(StartupError, match=r"2 programs .*7, 8.*--pid"):
        fit.choose_program(ledgers, None, "here")
    assert fit.choose_program(ledgers[:1], None, "here").program.pid == 7


def test_a_long_recording_takes_no_more_memory() -> None:
    """The highest of any number of samples is kept, not the samples; programs are counted up to a limit."""
    tracemalloc.start()
    seen = fit.choose_program(
        (sample(7, 1.0, 9999 - each, "A", str(each)) for each in range(9999)), 7, "here"
    )
    with pytest.raises(StartupError, match="more than 1000 programs"):
        fit.choose_program((sample(each, 1.0, 9, "A") for each in range(10**6)), None, "here")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ([use.peak for use in seen.uses], peak < 2**21) == ([9999, 1], True)


def _document() -> dict[str, Any]:
    """Return a ledger with everything that is read: a program with an agent, others, and a scheduler."""
    shot = snapshot(
        device(0, [holding(7, 8 * GIB, sm=0.5), holding(8, 9 * GIB, State.IDLE)], activity={"sm": 0.1}),
        device(1, [holding(7, GIB)], utilization={"gpu": 0.4}, activity={"sm": 0.2}),
    )
    shot = replace(shot, agents={7: agent(shot.devices[0].reading.uuid)}, watched_since=0.0)
    document: dict[str, Any] = json.loads(json.dumps(snapshot_json(shot)))
    document["devices"][1] |= {
        "cgroup_limits": [{"cgroup": "/ada", "maximum": GIB, "used": 0}],
        "schedulers": ["slurm"],
        "reservations": [{"owner_type": "user", "owner": "ada"}],
    }
    document["devices"][0]["holdings"][0]["limited_by"] = ["/ada"]
    return document


@given(place=st.sampled_from(sorted(places(_document()), key=str)), value=st.sampled_from(WRONG))
def test_any_value_of_a_saved_ledger_may_be_wrong(place: tuple[Any, ...], value: object) -> None:
    """With any wrong value the whole answer is given, as text and as JSON, or the file is refused."""
    try:
        seen = fit.choose_program(
            [read_ledger(with_value(_document(), place, value), "file")], 7, "from file"
        )
    except (RecordingError, StartupError):
        return
    needs, devices = tuple(assess_need(uses) for uses in seen.uses), sure(seen.ledger).devices
    offers = tuple(tuple(make_offer(need, one, seen.program, live=True) for one in devices) for need in needs)
    found = fit.Fit(seen, needs, offers, "here", of_this_host=True, headroom=0.1)
    assert found.status in (0, 1, 3)
    assert all(line.isprintable() for line in fit.fit_lines(found))
    json.dumps(fit.fit_json(found), allow_nan=False)


def use(*frameworks: FrameworkUse, held: int | None = 22_885 * MIB, **more: object) -> DeviceUse:
    """Return what was seen in one sample on a card of 24 GiB."""
    known = {
        "uuid": "GPU-0", "gpu": 0, "name": "NVIDIA A10", "capacity": CARD, "held": held, "peak": held,
        "overhead": None, "framework": "tensorflow", "policy": "preallocate", "frameworks": frameworks,
        "whole_life": False,
    }  # fmt: skip
    return DeviceUse(**{**known, **more})  # type: ignore[arg-type]


def counted(name: str, peak: int | None, *, ordinal: int | None = 0) -> FrameworkUse:
    return FrameworkUse(name, ordinal, peak, None)


def test_a_preallocation_is_not_a_need() -> None:
    """What a pool used and the context, measured where it can be, and never more than the holding."""
    need = assess_need(use(counted("tensorflow", 181 * MIB)))
    assert need.bytes == 181 * MIB + CONTEXT_BYTES == 1205 * MIB
    assert need.grade is Grade.INFERRED
    assert "assumed" in need.why
    assert need.most == 22_885 * MIB
    need = assess_need(use(counted("jax", GIB), overhead=518 * MIB, framework="jax", policy="fraction"))
    assert (need.bytes, need.grade) == (GIB + 518 * MIB, Grade.PROVEN)
    need = assess_need(use(counted("tensorflow", 300 * MIB), held=534 * MIB, policy="growth"))
    assert need.bytes == 534 * MIB


def test_peaks_of_a_need() -> None:
    """The highest of all samples; those of all frameworks add up, with one context, or are not known."""
    seen = [
        use(counted("torch", 9 * GIB), overhead=500 * MIB),
        use(counted("torch", GIB), overhead=600 * MIB),
        use(counted("torch", 2 * GIB), overhead=None),
    ]
    assert assess_need(seen[2].after(seen[1].after(seen[0]))).bytes == 9 * GIB + 600 * MIB
    need = assess_need(use(counted("torch", GIB), counted("jax", 2 * GIB), overhead=700 * MIB))
    assert need.bytes == 3 * GIB + 700 * MIB
    several = counted("torch", GIB), counted("cupy", None)
    need = assess_need(use(*several, overhead=500 * MIB, policy="caching"))
    assert (need.bytes, need.most) == (None, 22_885 * MIB)


def test_what_bounds_a_need() -> None:
    """The charge of a whole life; a counted peak may have been reset; nothing known is not zero."""
    need = assess_need(use(framework="torch", policy="caching", whole_life=True))
    assert (need.bytes, need.enough, need.grade) == (None, 22_885 * MIB, Grade.SEEN)
    need = assess_need(use(counted("torch", GIB), overhead=518 * MIB, framework="torch", policy="caching"))
    assert "since its start or its last reset" in need.why
    need = assess_need(use(held=None, peak=None))
    assert (need.bytes, need.most, need.enough) == (None, None, None)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("policy", ["caching", "preallocate", "fraction", "limit", ""])
def test_what_a_program_holds_is_no_bound_of_its_need(framework: str, policy: str) -> None:
    """Who took a set size, or was not watched since its start, may need more or less; no limit is advised."""
    need = assess_need(use(framework=framework, policy=policy))
    assert (need.bytes, need.planned, need.most, need.enough) == (None, None, 22_885 * MIB, None)
    assert need.grade is Grade.INFERRED
    assert "vramledger run" in need.why
    assert list(limit_advice(need, CARD)) == []


def test_a_failed_allocation_is_part_of_what_is_wanted() -> None:
    """After an out-of-memory error there is no amount that is certainly enough, and no limit to advise."""
    failure: dict[str, Any] = {"failed": True, "failed_request": 3 * GIB, "used_at_failure": 7 * GIB}
    need = assess_need(use(counted("torch", 8 * GIB), overhead=GIB, **failure))
    assert (need.bytes, need.wanted, need.enough) == (9 * GIB, 11 * GIB, None)
    assert list(limit_advice(need, CARD)) == []


def test_a_device_that_is_only_listed_is_not_used() -> None:
    """A device where the framework used nothing is not needed; on one that is too small no limit helps."""
    assert assess_need(use(counted("tensorflow", 1280))).unused
    assert not assess_need(use()).unused
    assert list(limit_advice(assess_need(use(counted("torch", 20 * GIB), overhead=GIB)), 8 * GIB)) == []


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "rmm"])
@pytest.mark.parametrize("peak", [MIB, 181 * MIB, 7 * GIB + 1, 20 * GIB])
def test_a_limit_is_never_below_the_need(framework: str, peak: int) -> None:
    """Each limit, in whatever unit the framework takes it, leaves at least the peak with its headroom."""
    need = assess_need(use(counted(framework, peak, ordinal=3), overhead=GIB, framework=framework))
    wanted = peak + max(int(peak * 0.1), 64 * MIB)
    limits = {
        "torch": (r"fraction\(([\d.]+), 3\)", CARD),
        "jax": (r"MEM_FRACTION=([\d.]+)$", CARD),
        "tensorflow": (r"\[3\].*memory_limit=(\d+)\)", MIB),
        "rmm": (r"maximum_pool_size=(\d+)\)", 1),
    }
    pattern, unit = limits[framework]
    found = [re.search(pattern, each.text) for each in limit_advice(need, CARD)]
    (limit,) = (float(each[1]) * unit for each in found if each is not None)
    assert wanted <= limit <= wanted + CARD / 1000


@pytest.mark.parametrize(
    ("mean", "copies"), [(1.0, 1), (0.5, 2), (0.34, 2), (0.1, 10), (1e-320, 1_000_000), (0.0, None)]
)
def test_a_program_that_is_busy_leaves_time_for_few(mean: float, copies: int | None) -> None:
    """A busy share gives the copies that have time; one that did nothing gives no number."""
    assert copies_by_compute(Busy(mean, mean, 1)) == copies


def test_busy_samples_that_are_missing_are_not_zero() -> None:
    """A sample without a figure changes neither the mean nor the number of samples."""
    seen = [use(time_busy=each and Busy(each, each, 1)) for each in (0.4, None, 0.8)]
    busy = sure(assess_need(seen[2].after(seen[1].after(seen[0]))).use.time_busy)
    assert busy.mean == pytest.approx(0.6)
    assert (busy.highest, busy.samples) == (0.8, 2)
    assert assess_need(use()).use.time_busy is None
