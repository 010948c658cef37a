"""What situations are made of: series, values over time, changes of labels, and holders."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.support.alerts.nodes import Holder, Values, uuid, value_at
from vramledger.model.reading import Rank

MIB = 1 / 1024
"""In GiB, as all sizes of holders."""

Relabel = Callable[[float, Mapping[str, str]], Mapping[str, str]]


def series(name: str, **labels: object) -> str:
    """Return a series of a node, by its name without the prefix, as ``Node.extra`` takes it."""
    own = "".join(f',{label}="{value}"' for label, value in labels.items())
    return f"vramledger_{name}{{NODE{own}}}"


def on_gpu(name: str, gpu: int = 0, **labels: object) -> str:
    return series(name, **{"gpu": gpu, "uuid": uuid(gpu), **labels})


STAMP = series("sample_timestamp_seconds")
FREE = on_gpu("device_memory_bytes", state="free")
LAST_OOM = series("framework_last_oom_timestamp_seconds", pid=9, framework="jax", verdict="too_big")
BOBS_LAST_OOM = series("owner_last_oom_timestamp_seconds", owner_type="user", owner="bob", framework="torch")
RESERVED: dict[str, Values] = {on_gpu("device_reservation_info", owner_type="slurm", owner="12"): 1}
UNUSED: dict[str, Values] = {
    on_gpu("device_reservations", use=use): count
    for use, count in {"held": 0, "unheld": 1, "unknown": 0}.items()
}
STANDS_STILL: dict[str, Values] = {STAMP: lambda minute: 60 * min(minute, 5)}


def failing(group: str) -> str:
    """Return how many evaluations of a group of rules failed."""
    return f'prometheus_rule_evaluation_failures_total{{NODE,rule_group="/etc/x.yml;{group}"}}'


# --- values over time, by the minute


def grows(
    rate: float, base: float = 10, start: float = 0, last: float = math.inf
) -> Callable[[float], float]:
    """Return values that rise by ``rate`` a minute, from a minute on, and stay at ``last``."""
    return lambda minute: min(last, base + rate * max(0.0, minute - start))


def sawtooth(minute: float) -> float:
    """Return a healthy training's allocated GiB: 8 to 30, with a period that scrapes never match."""
    return 19 + 11 * math.sin(minute * 60 * 2 * math.pi / 7.3)


def until(minute: float, values: Values) -> Values:
    return lambda now: value_at(values, now) if now < minute else None


def gone(begin: float, end: float, values: Values = 1) -> Callable[[float], float | None]:
    return lambda minute: None if begin <= minute < end else value_at(values, minute)


def away(begin: float, end: float, every: float = math.inf) -> Callable[[float], bool]:
    """Return when an exporter does not answer: between two minutes, or two minutes of each so many."""
    return lambda minute: begin <= minute % every < end


def loses(minute: float) -> bool:
    """Return whether a scrape is lost: one of nine."""
    return round(minute * 4) % 9 == 5


def relapsing(begin: float, end: float, period: float, short: float = 1) -> Values:
    """Return 1, which is 0 for a while, and then at the end of each period for some minutes."""
    return lambda m: float(m < begin or (m >= end and (m - end) % period < period - short))


# --- labels


def with_labels(**labels: str) -> Relabel:
    return lambda _, given: {**given, **labels}


def from_minute(begin: float, change: Relabel, end: float = math.inf) -> Relabel:
    """Return the change of labels from one minute to another."""
    return lambda minute, given: change(minute, given) if begin <= minute < end else given


def owned_by(**labels: str) -> Relabel:
    """Return labels in which whoever has an owner has another one."""
    return lambda _, given: {**given, **labels} if given.get("owner") else given


def forgotten(_: float, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels as a restarted exporter gives them for a process that it has never seen alive."""
    nobody = {"owner_type": "", "owner": "", "user": "", "command": ""}
    return {**given, **nobody} if "command" in given else given


def source(**labels: str) -> Relabel:
    """Return labels of a source of a node that has another one, beside it."""
    return lambda _, given: {**given, **labels, "instance": given["instance"].removesuffix("b")}


# --- holders


def torch(  # noqa: PLR0913 each is one figure
    allocated: Values = 10, reserved: float = 0, *, overhead: float = 0.5, retries: Values = 0,
    ooms: Values = 0, split: Values = 0, pid: int = 7, owner: str = "ann", gpu: int = 0,
) -> Holder:  # fmt: skip
    """Return a torch program of a user, whose agent reports these GiB and counts."""

    def pool(minute: float) -> float:
        return max(value_at(allocated, minute) or 0.0, reserved)

    agent: dict[str, Values] = {
        "torch_allocated_bytes": allocated, "torch_reserved_bytes": pool, "torch_inactive_split_bytes": split,
        "torch_alloc_retries_total": retries, "torch_ooms_total": ooms,
    }  # fmt: skip
    return Holder(pid, lambda m: pool(m) + overhead, gpu=gpu, owner=owner, user=owner, agent=agent)


def jax(held: float, in_use: Values, *, outside: float = 0.5, pid: int = 7, sm: float = 0.5) -> Holder:
    """Return a JAX program whose pool is all that it holds but what is ``outside``, taken at its start."""
    figures: dict[str, Values] = {"in_use": in_use, "in_use_peak": in_use, "pool": held - outside}
    agent = {f"framework_{name}_bytes": value for name, value in figures.items()}
    return Holder(pid, held, sm=sm, framework="jax", policy="preallocate", agent=agent)


TRAINER = Holder(9, 30, owner="bob", user="bob")
ORPHAN = Holder(7, 10, "orphaned", since=0)
DEAD = replace(ORPHAN, state="dead")
IDLE = Holder(7, 30, "idle", since=-61, sm=None)
NOTEBOOK = replace(IDLE, gib=5, notebook="a.ipynb")
LEAK = torch(grows(0.25))
SHORT = torch(retries=grows(0.5, 0), pid=8)
PREALLOCATED = Holder(7, 80, framework="tensorflow", policy="preallocate")


def pieces(count: int, gib: float, *, users: bool = False, **changes: object) -> list[Holder]:
    """Return idle programs, none of which holds much, of one user or each of its own."""
    held = [replace(IDLE, pid=100 + number, gib=gib, **changes) for number in range(count)]  # type: ignore[arg-type]
    return [replace(each, owner=f"u{each.pid}", user=f"u{each.pid}") for each in held] if users else held


def told_when(holder: Holder, told: Callable[[float], bool], up: Values) -> Holder:
    """Return a program whose agent tells its figures at some minutes only."""

    def at(values: Values) -> Values:
        return lambda minute: value_at(values, minute) if told(minute) else None

    return replace(holder, agent={name: at(values) for name, values in holder.agent.items()}, agent_up=up)


def job_of(name: str, state: str) -> list[Holder]:
    """Return a job of two ranks on two GPUs: the first is in this state, and the second waits for it."""
    ranks = [Rank(number, 2, name) for number in range(2)]
    return [
        Holder(7, 30, state, since=0, gpu=1, sm=None, rank=ranks[0]), Holder(8, 30, rank=ranks[1], waiting=0)
    ]  # fmt: skip
