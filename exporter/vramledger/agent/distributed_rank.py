"""Read which rank of a distributed job this process is, where the program itself knows it by now.

A program that ``torch.multiprocessing.spawn`` started gets its rank from its parent, after its start, so no
launcher has written it into the environment that the kernel shows. The default group of
``torch.distributed`` or the cluster of JAX tells it, and before there is one, ``os.environ`` as it is now.

Only attributes are read: no collective, no lock, no call to a store, which would go over the network. A group
or a store of the program's own class is not asked, because its methods are the program's code and may wait.
"""

from __future__ import annotations

import os
import sys

from vramledger.agent_protocol.distributed_ranks import (
    LONGEST_VALUE,
    find_rank,
    is_rank,
    name_file,
    name_rendezvous,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from types import ModuleType

_MAX_STORES = 8
"""Stores wrap each other; we search this number of them for the one with an address."""

Found = tuple[int, int, str]
"""Rank, number of ranks, and job; the job is empty where it is not known."""


def rank_entry() -> dict[str, object] | None:
    """Return the rank for the report, None where nothing tells it.

    A group of one rank says nothing about a job of several, so the environment may tell it still.
    """
    named = find_rank(_read_variable)
    groups = (each for each in (_torch_group(), _jax_cluster()) if each is not None)
    found = next((each for each in groups if is_rank(*each[:2])), named)
    if found is not None and named is not None and not found[2] and found[:2] == named[:2]:
        found = named
    return None if found is None else {"number": found[0], "size": found[1], "job": found[2]}


def _read_variable(name: str) -> str:
    value = os.environ.get(name)
    return value[:LONGEST_VALUE] if isinstance(value, str) else ""  # a program may replace os.environ


def _torch_group() -> Found | None:
    """Return what the default group of PyTorch (2.0 and later) says, None without one."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    group = getattr(world, "default_pg", None)
    kinds = sys.modules.get("torch._C._distributed_c10d")
    if kinds is None or group is None or type(group) is not getattr(kinds, "ProcessGroup", None):
        return None
    known = getattr(world, "pg_map", {}).get(group)
    return int(group.rank()), int(group.size()), "" if known is None else _name_store(kinds, known[1])


def _name_store(kinds: ModuleType, store: object) -> str:
    """Return the job by where its ranks have met; empty where that cannot be read."""
    for _ in range(_MAX_STORES):
        if type(store) is not getattr(kinds, "PrefixStore", None):
            break
        store = getattr(store, "underlying_store", None)
    if type(store) is getattr(kinds, "TCPStore", None):
        return name_rendezvous(str(store.host)[:LONGEST_VALUE], str(int(store.port)))  # type: ignore[attr-defined]
    if type(store) is getattr(kinds, "FileStore", None):
        return name_file(str(store.path))  # type: ignore[attr-defined]
    return ""


def _jax_cluster() -> Found | None:
    """Return what ``jax.distributed.initialize()`` was given, None where it was not called."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if getattr(state, "client", None) is None:
        return None
    address, _, port = str(getattr(state, "coordinator_address", None) or "").rpartition(":")
    job = name_rendezvous(address.strip("[]")[:LONGEST_VALUE], port) if address and port.isdigit() else ""
    return int(state.process_id), int(state.num_processes), job  # type: ignore[union-attr]
