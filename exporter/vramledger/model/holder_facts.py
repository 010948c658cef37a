"""Declare the facts about holders that pass from a collector to the metrics without being named in between.

Each has a type whose first two fields are ``pid`` and ``start``, a field in what is read and one in what is
known, and its row in :data:`HOLDER_FACTS`. Flags, recordings, storage, replay and accounting follow from
that. Its values are numbers: a recording is masked, and nobody would mask a text here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Struct, field


class KvCache(NamedTuple):
    """What the vLLM server of a holder says of its KV cache; a value that it does not say is None."""

    pid: int  # the holder
    start: int  # its start time in clock ticks since boot
    usage: float | None  # the share of the cache's blocks that running requests have
    memory: int | None  # the bytes of the cache on each GPU
    tokens: int | None  # how many tokens fit into the cache

    def within(self, held: int) -> KvCache | None:
        """Return what can be true of a holder of so many bytes: its cache is a part of them.

        A server is told a size before it takes it. So at its start, and for its processes that have no cache,
        the size is not that of the holding.
        """
        fits = self.memory is not None and self.memory <= held
        known = self if fits else self._replace(memory=None)
        return known if known[2:] != (None, None, None) else None


class Ties(NamedTuple):
    """What ties a holder, whose launcher may have ended, to those who may want it; or that it is frozen."""

    pid: int  # the holder
    start: int  # its start time in clock ticks since boot
    adopted: bool  # another process than its parent has started it, and that one has ended
    worker: bool  # it is a worker by strong signs of its own, which it has not inherited
    # its pipes and sockets, without its standard streams, whose other end no process has any more
    severed: int = 0
    live: int = 0  # those whose other end a process has that was not left behind with it, or another host
    listening: bool = False  # anybody may still connect to it
    # how many processes were left behind with it: by the same dead session, group or launcher
    fellows: int = 0
    mates: int = 0  # how many other processes of its group live
    unread: int = 0  # how many processes or sockets could not be read, where an other end may be
    frozen: bool = False  # its cgroup is frozen, as that of a paused container is

    @property
    def abandoned(self) -> bool:
        """Whether nobody can reach it any more: what connected it is dead, and nothing else does."""
        dead = self.adopted and self.worker and self.severed > 0
        return dead and not (self.live or self.listening or self.unread)


class ReadHolderFacts(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What was read of holders; the fields of a reading."""

    # what the vLLM servers of holders say of their KV caches, with ``--collector.vllm``
    kv_caches: tuple[KvCache, ...] = ()
    # what ties those whose launcher may have ended, or who are frozen; the others have none
    ties: tuple[Ties, ...] = ()


class KnownHolderFacts(Struct, frozen=True, kw_only=True):
    """The same of those that certainly are holders, by pid; the fields of a snapshot."""

    kv_caches: Mapping[int, KvCache] = field(default_factory=dict)
    ties: Mapping[int, Ties] = field(default_factory=dict)


class HolderFact(NamedTuple):
    field: str  # its name in :class:`ReadHolderFacts` and :class:`KnownHolderFacts`
    kind: Any  # its type; a method ``within(bytes)`` may leave out what a holder of so many bytes cannot have
    collector: str  # the name of its collector, a flag: ``--collector.NAME``
    on: bool  # whether the collector runs unless told otherwise
    help: str  # what it gives
    # the module of the collector, below ``vramledger.readers``; its ``make_collector`` takes the
    # :class:`vramledger.readers.hosts.host.Host`
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
