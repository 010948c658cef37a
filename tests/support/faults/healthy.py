"""Healthy scenarios: a day each of work that should page no one, varied by seed."""

from random import Random

from tests.support.faults.scene import DAY, HOUR, MINUTE, Scenario, Scene, card, process, rough, share, uuid
from tests.support.host import programs
from tests.support.host.model import CONTEXT, GIB, MIB, Fault, Process
from tests.support.host.programs import Held, Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import Owner


def _trainer(random: Random, room: float) -> Torch:
    base = room * random.uniform(0.2, 0.7)
    activations = min(base * random.uniform(0.3, 1.0), room * 0.9 - base)
    demand = programs.sawtooth(random, base, activations, random.uniform(0.2, 40), random.uniform(30, 300))
    return Torch(demand, spread=lambda _: 0.03, seen=random.choice([0.78, 0.95]), spiky=1.1, limit=room)


def training(random: Random) -> Scene:
    """A training's sawtooth, all day."""
    gpu = card(random)
    return Scene([gpu], [process(random, _trainer(random, share(gpu, 1)))], weather=rough(random))


def full_training(random: Random) -> Scene:
    """A training that was made to fit: nearly the whole card, steadily."""
    gpu = card(random)
    room = share(gpu, random.uniform(0.93, 0.985))
    demand = programs.sawtooth(random, room * 0.6, room * 0.36, random.uniform(0.5, 10))
    return Scene([gpu], [process(random, Torch(demand, limit=room))], weather=rough(random))


def warming_up(random: Random) -> Scene:
    """Memory that grows for long and levels off: lazily made optimizer state, caches that fill."""
    gpu = card(random)
    room = share(gpu, random.uniform(0.5, 0.8))
    slowly = random.uniform(10 * MINUTE, 50 * MINUTE)
    grown = programs.climbing(room * 0.6, slowly)
    wave = programs.sawtooth(random, room * 0.25, room * 0.1, random.uniform(0.5, 10))
    program = Torch(lambda age: wave(age) + grown(age), limit=share(gpu, 1))
    return Scene([gpu], [process(random, program)], weather=rough(random))


def evaluations(random: Random) -> Scene:
    """A training with evaluations and checkpoints, each of which needs more for a while."""
    gpu = card(random)
    room = share(gpu, 0.85)
    demand = programs.sawtooth(random, room * 0.4, room * 0.2, random.uniform(0.5, 20))
    demand = programs.with_evaluations(
        demand, room * random.uniform(0.1, 0.2), random.uniform(10, 60) * MINUTE, random.uniform(60, 400)
    )
    demand = programs.with_evaluations(demand, room * 0.15, random.uniform(20, 120) * MINUTE, 25)
    return Scene([gpu], [process(random, Torch(demand, limit=room * 1.15))], weather=rough(random))


def variable_lengths(random: Random) -> Scene:
    """Sequences of any length: reserved memory climbs for hours, allocated does not, nothing leaks."""
    gpu = card(random)
    room = share(gpu, random.uniform(0.35, 0.8))
    climb = programs.climbing(2.4, random.uniform(2 * MINUTE, 90 * MINUTE))
    program = Torch(programs.lengths(random, room * 0.1, room * 0.25), spread=climb, limit=room, seen=0.78)
    return Scene([gpu], [process(random, program)], weather=rough(random))


def language_server(random: Random) -> Scene:
    """An LLM server that takes most of the card for its KV cache on purpose, and gets requests."""
    gpu = card(random, size=random.choice([81_559, 143_771]))
    size = share(gpu, random.uniform(0.85, 0.95))
    load = programs.until(90, lambda age: size * 0.3 * max(0.1, age / 90), programs.steady(size))
    program = Held(load, programs.in_bursts(random, 20, random.uniform(2, 60)))
    owner = Owner("pod", "serving/llama-0", namespace="serving", pod="llama-0")
    server = process(random, program, framework="vllm", command="vllm", owner=owner, agent=False)
    return Scene([gpu], [server], weather=rough(random))


def tensorflow_server(random: Random) -> Scene:
    """TensorFlow Serving by its default: all of its own card, and in use."""
    gpu = card(random)
    size = share(gpu, 1.0)
    need = size * random.uniform(0.3, 0.8)
    work = programs.in_bursts(random, 10, random.uniform(5, 90))
    report = programs.tensorflow(programs.lengths(random, need * 0.6, need))
    program = Held(programs.steady(size), work, report=report)
    server = process(random, program, framework="tensorflow", command="tensorflow_model_server")
    return Scene([gpu], [server], weather=rough(random))


def jax_alone(random: Random) -> Scene:
    """JAX by its default: three quarters of its own card, in use."""
    gpu = card(random)
    size = gpu.total * 0.75 + CONTEXT
    need = size * random.uniform(0.4, 0.9)
    program = Held(programs.steady(size), report=programs.jax(programs.lengths(random, need * 0.5, need)))
    return Scene([gpu], [process(random, program, framework="jax")], weather=rough(random))


def bursty_inference(random: Random) -> Scene:
    """A server with bursts of work and quiet in between, some minutes at most."""
    gpu = card(random)
    size = share(gpu, random.uniform(0.1, 0.4))
    work = programs.in_bursts(random, 5, random.uniform(20, 100))
    program = Torch(programs.steady(size), work, seen=0.8, limit=size * 2)
    return Scene([gpu], [process(random, program, command="serve.py")], weather=rough(random))


def notebook_in_use(random: Random) -> Scene:
    """A person at a notebook: cells, thought, a lunch break; closed in the evening."""
    gpu = card(random)
    size = share(gpu, random.uniform(0.05, 0.3))
    begin, lunch = random.uniform(0.5, 3) * HOUR, random.uniform(3, 5) * HOUR
    at_work = programs.notebook(random, size, random.uniform(60, 240))
    cells = at_work.work
    at_work.work = lambda age: 0.0 if lunch < age < lunch + 45 * MINUTE else cells(age)
    owner = Owner("user", "ada", notebook="kernel-7")
    person = process(
        random, at_work, begin=begin, end=begin + 8 * HOUR, owner=owner, user="ada", command="ipykernel"
    )
    return Scene([gpu], [person], weather=rough(random))


def restarts(random: Random) -> Scene:
    """A job that a scheduler or its author starts again and again."""
    gpu = card(random)
    jobs, at = [], 60.0
    while at < DAY * HOUR:
        length = random.uniform(15, 70) * MINUTE
        job = process(random, _trainer(random, share(gpu, 1)), begin=at, end=at + length, user="grace")
        jobs.append(job)
        at += length + random.uniform(5, 300)
    return Scene([gpu], jobs, weather=rough(random))


def small_jobs(random: Random) -> Scene:
    """Many short jobs of several users, two or three at a time."""
    gpu = card(random)
    jobs = []
    for _ in range(3):
        at = random.uniform(0, 300)
        while at < DAY * HOUR:
            length = random.uniform(1, 15) * MINUTE
            program = Torch(programs.steady(share(gpu, random.uniform(0.02, 0.25))))
            jobs.append(process(random, program, begin=at, end=at + length))
            at += length + random.uniform(5, 300)
    return Scene([gpu], jobs, weather=rough(random))


def tiny_kernels(random: Random) -> Scene:
    """Small kernels at times, which the driver's samples miss in 97 of 100 seconds."""
    gpu = card(random)
    program = Torch(
        programs.steady(share(gpu, random.uniform(0.05, 0.3))), lambda _: 0.02, random.uniform(0.02, 0.04)
    )
    return Scene([gpu], [process(random, program, command="agent_rl.py")], weather=rough(random))


def mig(random: Random) -> Scene:
    """A GPU in MIG mode: instances hold the memory; the driver reports no utilisation by process there."""
    parent = card(random, size=143_771, divided=True)
    ((_, name),) = parent.uuids
    cards = [parent]
    for number in (7, 8, 9):
        instance = card(
            random, size=18_000, parent=name, profile="1g.18gb", instance=number,
            name=f"{parent.name} MIG 1g.18gb",
        )  # fmt: skip
        instance.uuids = ((0.0, "MIG-" + uuid(random)[4:]),)
        cards.append(instance)
    jobs = [process(random, _trainer(random, share(cards[place], 1)), index=place) for place in (1, 2)]
    return Scene(cards, jobs, weather=rough(random))


def mps(random: Random) -> Scene:
    """Clients of MPS, whose work the driver counts for the server: theirs is unknown, never none."""
    gpu = card(random)
    server = process(
        random, Held(programs.steady(66 * MIB)), user="root", command="nvidia-cuda-mps-server", agent=False,
        framework="cuda",
    )  # fmt: skip
    clients = [
        process(
            random, Torch(programs.steady(share(gpu, random.uniform(0.1, 0.25)))), kinds="CM", agent=False
        )
        for _ in range(3)
    ]
    return Scene([gpu], [server, *clients], weather=rough(random))


def ranks(random: Random) -> Scene:
    """Four ranks of a distributed training on four cards, alive below their launcher."""
    size = random.choice([81_559, 143_771])
    cards = [card(random, index, size=size) for index in range(4)]
    owner = Owner("slurm", "4711", slurm_job="4711")
    jobs = [
        process(
            random, _trainer(random, share(each, 1)), index=each.index, owner=owner, user="barbara",
            signs=("LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
        )
        for each in cards
    ]  # fmt: skip
    return Scene(cards, jobs, weather=rough(random))


def shared_well(random: Random) -> Scene:
    """Two programs share one card on purpose: torch, and TensorFlow with memory growth."""
    gpu = card(random)
    size = share(gpu, 0.25)
    report = programs.tensorflow(programs.steady(size * 0.8))
    growing = Held(programs.climbing(size, 4 * MINUTE), programs.in_bursts(random, 10, 20), report=report)
    settings = (("TF_FORCE_GPU_ALLOW_GROWTH", "true"),)
    other = process(random, growing, framework="tensorflow", begin=600.0, settings=settings)
    return Scene([gpu], [process(random, _trainer(random, share(gpu, 0.6))), other], weather=rough(random))


def nobody(random: Random) -> Scene:
    """A host with two unused cards."""
    return Scene([card(random, 0), card(random, 1)], [], weather=rough(random))


def bad_weather(random: Random) -> Scene:
    """A training with an exporter that loses scrapes, restarts often and has a wrong clock."""
    gpu = card(random)
    restarts = tuple(sorted(random.uniform(0, DAY * HOUR) for _ in range(8)))
    weather = Weather(0.05, tuple((at - random.uniform(5, 45), at) for at in restarts), restarts)
    job = process(random, _trainer(random, share(gpu, 1)))
    return Scene([gpu], [job], weather=weather, faults=[Fault("clock", number=random.uniform(-90, 90))])


def pid_reused(random: Random) -> Scene:
    """A pid that one owner's job and then another owner's job has, again and again."""
    gpu = card(random)
    pid, at, jobs = random.randint(2000, 30_000), 0.0, []
    while at < DAY * HOUR:
        length = random.uniform(20, 200) * MINUTE
        program = Torch(programs.steady(share(gpu, random.uniform(0.1, 0.8))))
        job = process(random, program, begin=at, end=at + length)
        job.pid = pid
        jobs.append(job)
        at += length + random.uniform(0, 20)
    return Scene([gpu], jobs, weather=rough(random))


def replaced(random: Random) -> Scene:
    """A host that is switched off, gets another card in the same place, and continues."""
    gpu = card(random)
    moment = random.uniform(4, 12) * HOUR
    back = moment + random.uniform(60, 1200)  # a virtual machine gets another card within a minute
    gpu.uuids = (*gpu.uuids, (back, uuid(random)))
    jobs = [
        process(random, _trainer(random, share(gpu, 1)), end=moment),
        process(random, _trainer(random, share(gpu, 1)), begin=back + 300),
    ]
    weather = Weather(down=((moment, back + 10),), restarts=(back + 5,))
    return Scene([gpu], jobs, weather=weather)


def comings_and_goings(random: Random) -> Scene:
    """States that last a moment and are not faults: a zombie, a worker after its launcher, a ^Z."""
    gpu = card(random)
    jobs: list[Process] = []
    at = 300.0
    while at < DAY * HOUR:
        length = random.uniform(10, 60) * MINUTE
        end = at + length + 30
        fates = {random.choice(["zombie", "orphaned", "stopped", "dead"]): end - random.uniform(2, 25)}
        program, signs = _trainer(random, share(gpu, 1)), ("multiprocessing",)
        jobs.append(process(random, program, begin=at, end=end, signs=signs, fates=fates))
        at = end + random.uniform(20, 600)
    return Scene([gpu], jobs, weather=rough(random))


def after_hours(random: Random) -> Scene:
    """A small server without requests at night: it holds little, on a card with much free memory."""
    gpu = card(random, size=random.choice([81_559, 143_771]))
    work = programs.in_bursts(random, 10, 60)
    program = Torch(
        programs.steady(random.uniform(0.5, 1.5) * GIB),
        lambda age: work(age) if age % (24 * HOUR) < 14 * HOUR else 0.0,
    )
    return Scene([gpu], [process(random, program, command="serve.py")], weather=rough(random))


def slow_load(random: Random) -> Scene:
    """A large model that loads for many minutes, most of the card, then is level; without an agent."""
    gpu = card(random)
    jobs, at = [], 300.0
    while at < DAY * HOUR:
        size, lasting = share(gpu, random.uniform(0.85, 0.95)), random.uniform(6, 25) * MINUTE
        end = at + random.uniform(1, 4) * HOUR
        load = programs.until(lasting, _ramp(size, lasting), programs.steady(size))
        program = Held(load, programs.in_bursts(random, 20, random.uniform(5, 60)))
        jobs.append(process(random, program, begin=at, end=end, command="serve.py", agent=False))
        at = end + random.uniform(60, 900)
    return Scene([gpu], jobs, weather=rough(random))


def _ramp(size: float, lasting: float) -> programs.Demand:
    return lambda age: size * max(0.05, age / lasting)


def cache_climb(random: Random) -> Scene:
    """A cache that climbs to its limit, ever slower; only the driver's figure is known.

    From outside it is what a leak is, which GpuMemoryGrowing says: a warning is right, a page is not.
    """
    gpu = card(random)
    jobs, at = [], 60.0
    while at < DAY * HOUR:
        size, slowly = share(gpu, random.uniform(0.5, 0.9)), random.uniform(2, 90) * MINUTE
        climb, lengths = programs.climbing(size, slowly), programs.lengths(random, 0.0, size * 0.01)
        end = at + random.uniform(3, 8) * HOUR
        program = Held(_together(climb, lengths))
        jobs.append(process(random, program, begin=at, end=end, agent=False))
        at = end + random.uniform(60, 900)
    return Scene([gpu], jobs, weather=rough(random))


def _together(one: programs.Demand, other: programs.Demand) -> programs.Demand:
    return lambda age: GIB / 2 + one(age) + other(age)


ALLOWED = {cache_climb: frozenset({"GpuMemoryGrowing"})}

HEALTHY = [
    Scenario(build.__name__.replace("_", "-"), build, allows=ALLOWED.get(build, frozenset()))
    for build in (
        training, full_training, warming_up, evaluations, variable_lengths, language_server,
        tensorflow_server, jax_alone, bursty_inference, notebook_in_use, restarts, small_jobs, tiny_kernels,
        mig, mps, ranks, shared_well, nobody, bad_weather, pid_reused, replaced, comings_and_goings,
        after_hours, slow_load, cache_climb,
    )
]  # fmt: skip
