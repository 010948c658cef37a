"""Faulty scenarios: each with one planted fault, and the alerts that must find it, varied by seed."""

from dataclasses import replace
from random import Random

from tests.support.faults.scene import (
    FOUND,
    HOUR,
    MINUTE,
    Build,
    Scenario,
    Scene,
    after,
    beside_a_job,
    card,
    hiccups,
    named,
    plain,
    process,
    share,
    soon,
)
from tests.support.host import programs
from tests.support.host.model import CONTEXT, GIB, MIB, Fate, Fault, Use
from tests.support.host.programs import Held, Steps, Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import Owner


def _leaking(random: Random, *, agent: bool, kind: str) -> Scene:
    """Add a leak to a training: it would fill the card in one to five hours."""
    gpu = card(random)
    room = share(gpu, 1)
    onset = random.uniform(40, 80) * MINUTE
    lasting = random.uniform(1, 4) * HOUR
    base, wave = room * random.uniform(0.15, 0.3), room * random.uniform(0.05, 0.15)
    rate = (room - base - wave) / lasting
    demand = programs.sawtooth(random, base, wave, random.uniform(0.3, 20))
    if kind == "stairs":
        every = random.uniform(2, 8) * MINUTE
        demand = programs.with_stairs(demand, rate * every, every, onset)
    else:
        demand = programs.with_leak(demand, rate, onset)
    program = Torch(demand, limit=room, seen=0.8)
    if kind == "native":
        still = programs.sawtooth(random, base, wave, random.uniform(0.3, 20))
        program = Torch(still, behind=lambda age: max(0.0, age - onset) * rate, seen=0.8)
    lasts = lasting + 10 * MINUTE if kind != "native" else lasting * 0.97
    job = process(random, program, agent=agent, end=onset + lasts)
    return after(onset, random, [gpu], [job], lasts / HOUR + 0.2)


def gradients_kept(random: Random) -> Scene:
    """Gradients, or the graph of a loss, are never freed: a little more with every step."""
    return _leaking(random, agent=True, kind="slope")


def growing_cache(random: Random) -> Scene:
    """A dictionary of results on the card has no limit, beside little work."""
    gpu = card(random)
    room = share(gpu, 1)
    onset = 50 * MINUTE
    lasting = random.uniform(2, 5) * HOUR
    rate = room * 0.85 / lasting
    noise = programs.lengths(random, room * 0.02, room * 0.05)
    program = Torch(
        lambda age: noise(age) + max(0.0, age - onset) * rate * random.uniform(0.99, 1.0),
        lambda _: 0.1,
        0.3,
        limit=room,
    )
    return after(onset, random, [gpu], [process(random, program, agent=True)], lasting / HOUR)


def cycles_uncollected(random: Random) -> Scene:
    """Cycles with tensors while the collector is off: steps of any size, at any time."""
    gpu = card(random)
    room = share(gpu, 1)
    onset, lasting = 45 * MINUTE, random.uniform(1.5, 4) * HOUR
    kept, last = 0.0, onset
    base = programs.sawtooth(random, room * 0.2, room * 0.1, random.uniform(1, 10))

    def demand(age: float) -> float:
        nonlocal kept, last
        while age > last:
            last += random.expovariate(1 / 40)
            kept += random.uniform(0.2, 1.8) * room * 0.7 * 40 / lasting
        return base(age) + kept

    program = Torch(demand, limit=room)
    return after(onset, random, [gpu], [process(random, program, agent=True)], lasting / HOUR)


def leak_under_cache(random: Random) -> Scene:
    """A slow leak in a large cache: NVML shows nothing until the cache is used up."""
    gpu = card(random)
    room = share(gpu, 1)
    onset, lasting = 45 * MINUTE, random.uniform(3, 5) * HOUR
    base = programs.sawtooth(random, room * 0.15, room * 0.05, random.uniform(1, 10))
    peak = programs.with_evaluations(base, 0.0, 1e9, 0)
    rate = room * 0.5 / lasting
    first = room * 0.6

    def demand(age: float) -> float:
        if 10 * MINUTE < age < 11 * MINUTE:
            return first  # one large moment, which the cache remembers
        return peak(age) + max(0.0, age - onset) * rate

    program = Torch(demand, limit=room)
    return after(onset, random, [gpu], [process(random, program, agent=True)], lasting / HOUR)


def fragmented(random: Random) -> Scene:
    """Free pieces between used ones: much is reserved, little is allocated, and retries happen."""
    gpu = card(random, size=random.choice([40_960, 81_559, 143_771]))
    room = share(gpu, 1)
    onset = 30 * MINUTE
    need = room * random.uniform(0.25, 0.4)
    spread = programs.until(onset, programs.steady(0.05), programs.steady(4.0))
    program = Torch(programs.lengths(random, need * 0.7, need), spread=spread, limit=room, seen=0.8)
    return Scene([gpu], [process(random, program, agent=True)], hours=3, onset=onset, weather=hiccups(random))


def one_large_moment(random: Random) -> Scene:
    """One moment needs most of the card, then there is tiny work: torch keeps all of it."""
    gpu = card(random, size=random.choice([40_960, 81_559, 143_771]))
    onset = 20 * MINUTE
    large, tiny, room = share(gpu, random.uniform(0.3, 0.8)), 33 * MIB, share(gpu, 1)
    program = Torch(
        lambda age: large if onset < age < onset + 60 else tiny, lambda _: 0.05, seen=0.04, limit=room
    )
    return Scene([gpu], [process(random, program, agent=True)], hours=3.5, onset=onset)


def _preallocated(random: Random, framework: str) -> Scene:
    """Let a framework take by its default what it can of a card that another user uses too."""
    gpu = card(random)
    onset = random.uniform(10, 40) * MINUTE
    first = Torch(programs.steady(share(gpu, random.uniform(0.03, 0.08))), seen=0.5)
    need = share(gpu, random.uniform(0.02, 0.08))
    taken = share(gpu, 0.88) if framework == "tensorflow" else gpu.total * 0.75
    report = programs.tensorflow if framework == "tensorflow" else programs.jax
    greedy = Held(programs.steady(taken), report=report(programs.lengths(random, need * 0.5, need)))
    jobs = [
        process(random, first, agent=False, user="ivan"),
        process(random, greedy, framework=framework, begin=onset, command="mnist.py"),
    ]
    return Scene([gpu], jobs, hours=2.5, onset=onset, weather=hiccups(random))


def idle_notebook(random: Random) -> Scene:
    """A notebook that its user has left: results on the card, and no work."""
    gpu = card(random)
    onset = random.uniform(30, 90) * MINUTE
    person = programs.notebook(random, share(gpu, random.uniform(0.15, 0.6)), 60)
    cells, size = person.work, person.demand
    person.work = lambda age: cells(age) if age < onset else 0.0
    person.demand = lambda age: size(min(age, onset))
    owner = Owner("user", "ada", notebook="kernel-7")
    kernel = process(random, person, owner=owner, user="ada", command="ipykernel")
    return after(onset, random, [gpu], [kernel], 3)


def hoarder(random: Random) -> Scene:
    """A job that has finished its work and not its process: much memory, no work."""
    gpu = card(random, size=random.choice([40_960, 81_559, 143_771]))
    onset = random.uniform(30, 90) * MINUTE
    size = share(gpu, random.uniform(0.35, 0.8))
    program = Torch(programs.steady(size), programs.until(onset, lambda _: 0.8, programs.idle))
    owner = Owner("pod", "team-a/sweep-3", namespace="team-a", pod="sweep-3")
    job = process(random, program, owner=owner, agent=random.random() < 0.5)
    return after(onset, random, [gpu], [job], 3)


def hoarder_in_pieces(random: Random) -> Scene:
    """A sweep that has finished and left its workers: each holds a little, together they fill a card."""
    gpu = card(random, size=81_559)
    onset = random.uniform(30, 90) * MINUTE
    count = random.randint(10, 14)
    owner = Owner("pod", "team-a/sweep-3", namespace="team-a", pod="sweep-3")
    size = programs.steady(share(gpu, 0.85) / count)
    work = programs.until(onset, programs.steady(0.8 / count), programs.idle)
    jobs = [process(random, Torch(size, work), owner=owner, agent=False) for _ in range(count)]
    return after(onset, random, [gpu], jobs, 3)


def hoarder_while_short(random: Random) -> Scene:
    """A hoarder, and on the same GPU a job that runs out of memory because of it.

    That job keeps the GPU busy, so only its threads prove that the hoarder does nothing.
    """
    gpu = card(random, size=random.choice([40_960, 81_559]))
    onset = 20 * MINUTE
    held = share(gpu, random.uniform(0.5, 0.6))
    idle = Torch(programs.steady(held), programs.until(onset, lambda _: 0.8, programs.idle))
    room = share(gpu, 0.98) - held - 2 * GIB
    wants = Torch(programs.sawtooth(random, room * 0.8, room * 0.4, 8), limit=room)
    jobs = [
        process(random, idle, agent=True, owner=Owner("slurm", "17", slurm_job="17")),
        process(
            random, wants, agent=True, begin=onset + 10 * MINUTE, owner=Owner("slurm", "18", slurm_job="18")
        ),
    ]
    weather = hiccups(random)
    return Scene([gpu], jobs, hours=3.5, onset=onset + 10 * MINUTE, weather=weather, threads=True)


def _fate(random: Random, fate: Fate, owner: Owner | None = None) -> Scene:
    gpu = card(random)
    onset = soon(random)
    program = Torch(programs.steady(share(gpu, random.uniform(0.3, 0.8))))
    fates = {fate: onset}
    job = process(random, program, signs=("multiprocessing",), agent=False, owner=owner, fates=fates)
    return after(onset, random, [gpu], [job], 1.2)


def orphaned(random: Random) -> Scene:
    """A worker whose launcher was killed."""
    return _fate(random, "orphaned")


def pod_ended(random: Random) -> Scene:
    """A process whose pod has ended."""
    return _fate(random, "unowned", owner=Owner("pod", "team-a/job-9", namespace="team-a", pod="job-9"))


def unattributed(random: Random) -> Scene:
    """Memory that is used and belongs to no process, beside one that works."""
    gpu = card(random)
    onset = soon(random)
    lost = int(share(gpu, random.uniform(0.1, 0.4))) + 2 * GIB
    gpu.unowned = lambda now: 20 * MIB + (lost if now >= onset else 0)
    job = process(random, Torch(programs.steady(share(gpu, 0.2))))
    return after(onset, random, [gpu], [job], 1.2)


def hidden_holder(random: Random) -> Scene:
    """A process with the card open that the driver does not list."""
    gpu = card(random)
    onset = soon(random)
    return after(onset, random, [gpu], [], 1.2, faults=[Fault("hidden holder", onset, number=4242)])


def blind(random: Random) -> Scene:
    """An exporter without the host's PID namespace: bytes are used, and it sees no holder."""
    gpu = card(random)
    job = process(random, Torch(programs.steady(share(gpu, 0.5))), agent=False)
    return Scene([gpu], [job], hours=1.2, onset=0.0, weather=hiccups(random), faults=[Fault("blind")])


def device_lost(random: Random) -> Scene:
    """A card that falls off the bus with a job on it."""
    cards = [card(random, 0), card(random, 1)]
    onset = soon(random)
    jobs = [process(random, Torch(programs.steady(share(each, 0.5))), each.index) for each in cards]
    faults = [Fault("device lost", onset, gpu=1), Fault("xid", onset, gpu=1, number=79)]
    return after(onset, random, cards, jobs, 1, faults)


def stray_context(random: Random) -> Scene:
    """A program that works on one card and has an empty context on another."""
    size = random.choice([81_559, 143_771])
    cards = [card(random, 0, size=size), card(random, 1, size=size)]
    onset = soon(random)
    job = process(random, Torch(programs.steady(share(cards[1], 0.5))), 1, begin=onset, agent=False)
    job.places = {**job.places, 0: Held(programs.steady(CONTEXT), programs.idle)}
    return after(onset, random, cards, [job], 1.2)


def out_of_memory(random: Random) -> Scene:
    """A batch that does not fit: the allocator tries again, and then fails."""
    gpu = card(random)
    room = share(gpu, 1)
    onset = soon(random)
    demand = programs.sawtooth(random, room * 0.5, room * 0.2, 7)
    program = Torch(
        lambda age: demand(age) + (room * 0.6 if age > onset and age % 60 < 20 else 0), limit=room
    )
    return Scene([gpu], [process(random, program, agent=True)], hours=onset / HOUR + 0.6, onset=onset)


def agent_silent(random: Random) -> Scene:
    """A program that continues while its agent has stopped reporting."""
    gpu = card(random)
    onset = soon(random)
    job = process(random, Torch(programs.steady(share(gpu, 0.3))), agent=True, fates={"silent": onset})
    return Scene([gpu], [job], hours=onset / HOUR + 0.8, onset=onset)


def published_mnist(random: Random) -> Scene:
    """Published: MNIST under TensorFlow's default takes 22,885 of 24,265 MiB and needs 1,205."""
    gpu = card(random, size=24_265, reserved=200 * MIB)
    onset = 20 * MINUTE
    report = programs.tensorflow(programs.steady((1_205 - 518) * MIB))
    job = Steps([(0.0, Use(22_885 * MIB, 0.04, 0.9, report(0.0, 22_885 * MIB)))])
    jobs = [
        process(random, job, framework="tensorflow", begin=onset, agent=True, command="mnist.py"),
        process(random, Torch(programs.steady(100 * MIB)), begin=0.0, agent=False, user="ivan"),
    ]
    return Scene([gpu], jobs, hours=1.5, onset=onset)


def published_backend(random: Random) -> Scene:
    """Published: a backend takes 47,853 of 48,000 MiB, and frees nothing until its process ends."""
    gpu = card(random, size=48_000, reserved=60 * MIB, unowned=lambda _: 0)
    onset = 30 * MINUTE
    job = Steps([(0.0, Use(47_853 * MIB, 0.5, 0.9)), (onset, Use(47_853 * MIB))])
    owner = Owner("container", "backend", container="backend")
    backend = process(random, job, framework="tensorflow", owner=owner, command="backend.py", agent=False)
    return Scene([gpu], [backend], hours=onset / HOUR + 2.5, onset=onset)


def published_resnet(random: Random) -> Scene:
    """Published: a ResNet-50 training whose next iteration keeps the gradients of the one before."""
    gpu = card(random, size=24_265)
    room = share(gpu, 1)
    onset, each = 30 * MINUTE, 98 * MIB  # 25.6 million parameters of four bytes
    demand = programs.sawtooth(random, 4 * each, room * 0.25, 0.5)
    program = Torch(lambda age: demand(age) + max(0, int((age - onset) // 60)) * each, limit=room)
    return Scene([gpu], [process(random, program, agent=True)], hours=3.0, onset=onset)


def _restarted(build: Build, after: float) -> Build:
    """Restart the exporter some seconds after the onset: the alert must still fire."""

    def again(random: Random) -> Scene:
        scene = build(random)
        moment = (scene.onset or 0.0) + after
        scene.weather = Weather(down=((moment - 20, moment),), restarts=(moment,))
        return scene

    again.__name__ = f"{build.__name__}_restarted"
    return again


_FULL = ("GpuMemoryNearlyFull", "GpuMemoryFilling", "GpuMemoryAboutToFill")
_GROWS = (
    *_FULL, "GpuMemoryLeakSuspected", "GpuMemoryGrowing", "GpuOutOfMemory", "GpuAllocatorRetries",
    "GpuMemoryFragmented", "GpuFrameworkCacheHigh",
)  # fmt: skip
_IDLE = ("GpuMemoryGrowing", "GpuMemoryHoarded", "GpuMemoryHoardedWhileShort", "GpuMemoryNearlyFull")


def _leak(build: Build, expects: str = "GpuMemoryLeakSuspected") -> Scenario:
    return replace(plain(build, expects, allows=_GROWS), leak=True)


FAULTY = [
    _leak(gradients_kept),
    # The same without an agent: the driver's figure alone rises.
    _leak(named("leak_seen_from_outside", _leaking, agent=False, kind="slope"), "GpuMemoryGrowing"),
    # An evaluation without no_grad keeps its outputs, with their graph, every time.
    _leak(named("evaluations_kept", _leaking, agent=True, kind="stairs")),
    # A library takes memory outside torch's pool: torch's own figures do not change.
    _leak(named("native_leak", _leaking, agent=True, kind="native")),
    _leak(growing_cache),
    _leak(cycles_uncollected),
    _leak(leak_under_cache),
    _leak(published_resnet),
    plain(
        fragmented, "GpuMemoryFragmented", "GpuAllocatorRetries",
        allows=(*_FULL, "GpuFrameworkCacheHigh", "GpuOutOfMemory", "GpuMemoryGrowing"),
    ),
    plain(one_large_moment, "GpuFrameworkCacheHigh", allows=("GpuMemoryFragmented", *_FULL)),
    *(
        plain(
            named(f"{framework}_shared", _preallocated, framework=framework),
            "GpuMemoryPreallocatedShared", allows=_FULL,
        )
        for framework in ("tensorflow", "jax")
    ),
    plain(published_mnist, "GpuMemoryPreallocatedShared", allows=_FULL),
    # Its results grow with every cell before it is left.
    plain(idle_notebook, "GpuNotebookIdle", allows=_IDLE, always=("GpuMemoryGrowing",), within=3700),
    plain(hoarder, "GpuMemoryHoarded", allows=_IDLE, within=3700),
    plain(hoarder_in_pieces, "GpuMemoryHoardedInPieces", allows=_IDLE, within=3700),
    # It has taken 99.7 % of the card before it idles.
    plain(published_backend, "GpuMemoryHoarded", allows=_IDLE, always=("GpuMemoryNearlyFull",), within=3700),
    plain(hoarder_while_short, "GpuMemoryHoardedWhileShort", allows=(*_IDLE, *_GROWS)),
    plain(orphaned, "GpuMemoryOrphaned", allows=_IDLE, within=FOUND),
    plain(_restarted(orphaned, 90), "GpuMemoryOrphaned", allows=_IDLE, within=FOUND),
    plain(_restarted(hoarder, 40 * MINUTE), "GpuMemoryHoarded", allows=_IDLE, within=4400),
    _leak(_restarted(gradients_kept, 15 * MINUTE)),
    plain(pod_ended, "GpuMemoryOrphaned", allows=_IDLE, within=FOUND),
    *(
        plain(named(fate, _fate, fate=fate), alert, allows=_IDLE, within=FOUND)
        for fate, alert in (
            ("dead", "GpuMemoryDead"), ("zombie", "GpuMemoryZombie"), ("stopped", "GpuMemoryStopped"),
        )
    ),
    plain(unattributed, "GpuMemoryUnattributed", allows=_FULL, within=FOUND * 2),
    plain(hidden_holder, "GpuHiddenHolder", within=FOUND * 2),
    plain(blind, "VramLedgerBlind", allows=("GpuMemoryUnattributed",), within=FOUND),
    plain(device_lost, "GpuDeviceLost", within=FOUND),
    # A driver that answers for no card any more.
    plain(
        beside_a_job("driver_lost", 1, lambda at: Fault("driver lost", at)), "GpuDriverLost",
        allows=("VramLedgerCollectorFailing",), within=FOUND,
    ),
    # An exporter that does not answer any more; and one that always answers with the same old sample.
    plain(
        beside_a_job("exporter_down", 1, lambda at: Weather(down=((at, 1e9),))), "VramLedgerExporterDown",
        within=FOUND,
    ),
    plain(
        beside_a_job("sampling_stalled", 1, lambda at: Weather(stalled=at)), "VramLedgerSamplingStalled",
        within=FOUND * 2,
    ),
    plain(stray_context, "GpuStrayContext", within=15 * MINUTE),
    plain(out_of_memory, "GpuOutOfMemory", "GpuAllocatorRetries", allows=(*_GROWS,)),
    plain(agent_silent, "VramLedgerAgentSilent", within=FOUND),
]  # fmt: skip
