"""Declare the facts about holders that pass from a collector to the metrics without being named in between.

Each has a type whose first two fields are ``pid`` and ``start``, a field in what is read and one in what is
known, and its row in :data:`HOLDER_FACTS`. Flags, recordings, storage, replay and accounting follow from
that. Its values are numbers: a recording is masked, and nobody would mask a text here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct


class KvCache(NamedTuple):
    """What the vLLM server of a holder says of its KV cache; a value that it does not say is None.

    Attributes:
        pid: the holder.
        start: its start time in clock ticks since boot.
        usage: the share of the cache's blocks that running requests have.
        memory: the bytes of the cache on each GPU.
        tokens: how many tokens fit into the cache.
    """

    pid: int
    start: int
    usage: float | None
    memory: int | None
    tokens: int | None

    def within(self, held: int) -> KvCache | None:
        """Return what can be true of a holder of so many bytes: its cache is a part of them.

        A server is told a size before it takes it. So at its start, and for its processes that have no cache,
        the size is not that of the holding.
        """
        fits = self.memory is not None and self.memory <= held
        known = self if fits else self._replace(memory=None)
        return known if known[2:] != (None, None, None) else None


class Ties(NamedTuple):
    """What ties a holder, whose launcher may have ended, to those who may want it; or that it is frozen.

    Attributes:
        pid: the holder.
        start: its start time in clock ticks since boot.
        adopted: another process than its parent has started it, and that one has ended.
        worker: it is a worker by strong signs of its own, which it has not inherited.
        severed: its pipes and sockets, without its standard streams, whose other end no process has any more.
        live: those whose other end a process has that was not left behind with it, or another host.
        listening: anybody may still connect to it.
        fellows: how many processes were left behind with it: by the same dead session, group or launcher.
        mates: how many other processes of its group live.
        unread: how many processes or sockets could not be read, where an other end may be.
        frozen: its cgroup is frozen, as that of a paused container is.
    """

    pid: int
    start: int
    adopted: bool
    worker: bool
    severed: int = 0
    live: int = 0
    listening: bool = False
    fellows: int = 0
    mates: int = 0
    unread: int = 0
    frozen: bool = False

    @property
    def abandoned(self) -> bool:
        """Whether nobody can reach it any more: what connected it is dead, and nothing else does."""
        dead = self.adopted and self.worker and self.severed > 0
        return dead and not (self.live or self.listening or self.unread)


class ReadHolderFacts(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What was read of holders; the fields of a reading.

    Attributes:
        kv_caches: what the vLLM servers of holders say of their KV caches, with ``--collector.vllm``.
        ties: what ties those whose launcher may have ended, or who are frozen; the others have none.
    """

    kv_caches: tuple[KvCache, ...] = ()
    ties: tuple[Ties, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHolderFacts:
    """The same of those that certainly are holders, by pid; the fields of a snapshot."""

    kv_caches: Mapping[int, KvCache] = field(default_factory=dict)
    ties: Mapping[int, Ties] = field(default_factory=dict)


class HolderFact(NamedTuple):
    """A fact about holders.

    Attributes:
        field: its name in :class:`ReadHolderFacts` and :class:`KnownHolderFacts`.
        kind: its type; a method ``within(bytes)`` may leave out what a holder of so many bytes cannot have.
        collector: the name of its collector, a flag: ``--collector.NAME``.
        on: whether the collector runs unless told otherwise.
        help: what it gives.
        module: the module of the collector, below ``vramledger.readers``; its ``make_collector`` takes the
            :class:`vramledger.readers.hosts.host.Host`.
    """

    field: str
    kind: Any
    collector: str
    on: bool
    help: str
    module: str


HOLDER_FACTS = (
    HolderFact(
        "kv_caches",
        KvCache,
        "vllm",
        on=False,
        help="how full the KV cache of a holder is, as its vLLM server on this host says over HTTP",
        module="vllm",
    ),
    HolderFact(
        "ties",
        Ties,
        "ties",
        on=True,
        help="what connects a holder, whose launcher may have ended, to other processes",
        module="hosts.ties",
    ),
)
