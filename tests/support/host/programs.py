"""Programs as they were measured on H200s, one line each: how they take memory, work, and fail.

Each is asked once a sample for what it does at its age.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.support.host.agents import Pools
from tests.support.host.model import CONTEXT, MIB, Program, Use

SEGMENT = 2 * MIB
CUBLAS = 164 * MIB
"""What torch's libraries take above an empty context with the first product: 682 MiB in all."""

Demand = Callable[[float], float]
"""Bytes that a program needs by its age; it may remember how often it was called."""

Report = Callable[[float, int], Pools]
"""The agent's report by the program's age and the bytes that it holds."""


@dataclass(slots=True)
class Torch:
    """A program on torch's caching allocator."""

    demand: Demand  # bytes in tensors by age
    work: Demand = lambda _: 0.8  # share of time with kernels, by age
    seen: float = 0.9  # share of seconds with work that leave a utilisation sample
    # what the allocator reserves above the highest allocation so far, as a share: fragments
    spread: Demand = lambda _: 0.04
    behind: Demand = lambda _: 0.0  # bytes taken behind torch's back, by age
    limit: float = math.inf  # bytes that it can reserve at most; a demand beyond it is an OOM
    spiky: float = 1.0  # how far above ``demand`` the highest moment since the last sample was
    reserved: int = 0
    allocated_peak: int = 0
    retries: int = 0
    ooms: int = 0
    allocations: int = 0

    def use(self, age: float) -> Use:
        allocated = int(self.demand(age))
        need = max(allocated, int(min(allocated * self.spiky, self.limit)))
        wanted = -int(-need * (1 + self.spread(age)) // SEGMENT) * SEGMENT
        if wanted > self.limit:
            self.retries += 1
            wanted = int(self.limit) // SEGMENT * SEGMENT
            if allocated > self.limit:
                self.ooms += 1
                allocated = int(self.limit * 0.98)
        self.reserved = max(self.reserved, wanted)
        self.allocated_peak = max(self.allocated_peak, allocated)
        work = self.work(age)
        self.allocations += int(1000 * work)
        split = int((self.reserved - allocated) * 0.6)
        figures = {
            "reserved": self.reserved, "allocated": allocated, "active": allocated,
            "requested": int(allocated * 0.99), "inactive_split": split, "reserved_peak": self.reserved,
            "allocated_peak": self.allocated_peak, "reclaimable": self.reserved - allocated - split,
            "largest_free_block": int((self.reserved - allocated) * 0.3),
            "private_pools": self.reserved // 50, "alloc_retries": self.retries, "ooms": self.ooms,
            "allocations": self.allocations,
        }  # fmt: skip
        return Use(
            CONTEXT + CUBLAS + self.reserved + int(self.behind(age)), work, self.seen, {"torch": figures}
        )


@dataclass(slots=True)
class Held:
    """A program that holds the bytes of ``demand``, without an agent."""

    demand: Demand
    work: Demand = lambda _: 0.8
    seen: float = 0.9
    report: Report = lambda _age, _memory: {}

    def use(self, age: float) -> Use:
        memory = int(self.demand(age)) // MIB * MIB
        return Use(memory, self.work(age), self.seen, self.report(age, memory))


@dataclass(slots=True)
class Fixed:
    """A program that does what a test has set, until the test sets something else."""

    memory: int
    work: float = 0.0

    def use(self, _: float) -> Use:
        return Use(self.memory, self.work)


def steady(size: float) -> Demand:
    return lambda _: size


def idle(_: float) -> float:
    return 0.0


def sawtooth(random: Random, base: float, activations: float, step: float, warm: float = 60.0) -> Demand:
    """Need a model and the activations of a training step, which come and go; little at first.

    No two steps take equally long (a thirtieth more or less), so a slow beat with the scrapes does not last.
    """
    cycles, last = random.random(), 0.0

    def demand(age: float) -> float:
        nonlocal cycles, last
        steps, last = max(0.0, age - last) / step, age
        cycles += max(0.0, random.gauss(steps, math.sqrt(steps) / 30))
        here = cycles % 1.0
        wave = activations * (1 - abs(2 * here - 1)) * random.uniform(0.9, 1.0)
        return min(1.0, 0.3 + 0.7 * age / warm) * base + (wave if age > warm / 4 else 0.0)

    return demand


def with_evaluations(demand: Demand, size: float, every: float, lasting: float) -> Demand:
    """Need more at times: evaluations, or the copy that a checkpoint makes."""
    return lambda age: demand(age) + (size if age % every < lasting and age > every else 0.0)


def with_leak(demand: Demand, rate: float, since: float) -> Demand:
    """Need more and more from some moment on, ``rate`` bytes a second."""
    return lambda age: demand(age) + max(0.0, age - since) * rate


def with_stairs(demand: Demand, size: float, every: float, since: float) -> Demand:
    """Keep something each time: an evaluation's outputs with their graph, an uncollected cycle."""
    return lambda age: demand(age) + size * max(0, math.floor((age - since) / every))


def lengths(random: Random, low: float, high: float) -> Demand:
    """Need what a batch of sequences of any length needs: mostly little, seldom much."""
    return lambda _: low + (high - low) * random.betavariate(1.2, 4.0)


def climbing(top: float, slowly: float) -> Demand:
    """Fragment more and more, and ever slower: reserved memory climbs while nothing leaks."""
    return lambda age: top * (1 - math.exp(-age / slowly))


def in_bursts(random: Random, busy: float, quiet: float) -> Demand:
    """Work for a while, rest for a while, at random; ``busy`` and ``quiet`` are mean seconds."""
    until, working = 0.0, False

    def work(age: float) -> float:
        nonlocal until, working
        while age >= until:
            working = not working
            until += max(1.0, random.expovariate(1 / (busy if working else quiet)))
        return 0.9 if working else 0.0

    return work


def until(moment: float, before: Demand, after: Demand) -> Demand:
    return lambda age: before(age) if age < moment else after(age)


def tensorflow(in_use: Demand, framework: str = "tensorflow") -> Report:
    """Report the figures of TensorFlow's memory_info: the only number of the real need."""
    peak = 0

    def report(age: float, memory: int) -> Pools:
        nonlocal peak
        now = int(in_use(age))
        peak = max(peak, now)
        return {framework: {"in_use": now, "in_use_peak": peak, "limit": memory - CONTEXT}}

    return report


def jax(in_use: Demand) -> Report:
    """Report the figures of JAX: TensorFlow's, and the pool, which is as large as its limit."""
    report = tensorflow(in_use, "jax")
    return lambda age, memory: {"jax": {**report(age, memory)["jax"], "pool": memory - CONTEXT}}


def notebook(random: Random, size: float, think: float) -> Torch:
    """A person at a notebook: cells that run for a moment, and pauses in between."""
    results = 0.3 + 0.7 * random.random()
    return Torch(lambda age: size * min(1.0, results + age / 7200), in_bursts(random, 15, think), seen=0.8)


@dataclass(slots=True)
class WithPools:
    """A program with further, small pools of other frameworks, within its memory."""

    program: Program
    pools: Pools

    def use(self, age: float) -> Use:
        use = self.program.use(age)
        return use._replace(pools={**use.pools, **self.pools})


@dataclass(slots=True)
class Steps:
    """Play the uses of a list by age: a published case, figure by figure."""

    uses: list[tuple[float, Use]] = field(default_factory=list)

    def use(self, age: float) -> Use:
        return [use for since, use in self.uses if since <= age][-1]
