"""The rank that a program knows only after its start, read without a call that may wait."""

import sys
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import pytest

from vramledger_agent.session import rank_entry

C10D = "torch.distributed.distributed_c10d"
KINDS = "torch._C._distributed_c10d"
MEETING = {"MASTER_ADDR": "n0", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}


class ProcessGroup:
    """PyTorch's class of groups, as far as it is read."""

    def __init__(self, rank: int, size: int) -> None:
        self._numbers = rank, size

    def rank(self) -> int:
        return self._numbers[0]

    def size(self) -> int:
        return self._numbers[1]


class ManagedGroup(ProcessGroup):
    """A group of the program's own class, which waits for other nodes before it tells its size."""

    def size(self) -> NoReturn:
        raise AssertionError("the program's code was called")


class PrefixStore(SimpleNamespace):
    """PyTorch's store in another store."""


class TCPStore(SimpleNamespace):
    """PyTorch's store at an address."""


class FileStore(SimpleNamespace):
    """PyTorch's store in a file."""


class HashStore(SimpleNamespace):
    """PyTorch's store inside a process."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without a rank in the environment, and without frameworks."""
    for name in (*MEETING, "PMIX_NAMESPACE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, C10D, raising=False)


def put_group(monkeypatch: pytest.MonkeyPatch, group: object, store: object = None) -> None:
    """Put PyTorch's modules in place with a default group that has met in a store."""
    module, kinds = ModuleType(C10D), ModuleType(KINDS)
    world = SimpleNamespace(default_pg=group, pg_map={} if store is None else {group: ("nccl", store)})
    vars(module).update(_world=world)
    vars(kinds).update({each.__name__: each for each in (ProcessGroup, PrefixStore, TCPStore, FileStore)})
    monkeypatch.setitem(sys.modules, C10D, module)
    monkeypatch.setitem(sys.modules, KINDS, kinds)


def put_environment(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """Set the variables as a program does after its start."""
    for name, value in {**MEETING, **changes}.items():
        monkeypatch.setenv(name, value)


def found() -> tuple[object, ...] | None:
    """Return number, size and job of what is reported."""
    entry = rank_entry()
    return None if entry is None else tuple(entry.values())


def wrapped(store: object, times: int = 2) -> object:
    """Wrap a store in others, as PyTorch does."""
    for _ in range(times):
        store = PrefixStore(underlying_store=store)
    return store


def test_variables_that_a_program_sets_itself_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read as it is now; a rendezvous on localhost is left to the exporter to name."""
    put_environment(monkeypatch)
    assert found() == (1, 2, "n0:29500")
    put_environment(monkeypatch, MASTER_ADDR="127.0.0.1", RANK="0")
    assert found() == (0, 2, ":29500")


def test_an_environment_of_another_kind_gives_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may replace ``os.environ`` with a dictionary of anything."""
    monkeypatch.setattr("os.environ", {**MEETING, "RANK": 1})
    assert found() is None


@pytest.mark.parametrize(
    ("store", "job"),
    [
        (wrapped(TCPStore(host="n0", port=31000)), "n0:31000"),
        (TCPStore(host="localhost", port=31000), ":31000"),
        (wrapped(FileStore(path="/" + "x" * 500)), ":" + "x" * 128),
        (wrapped(HashStore()), ""),
        (wrapped(TCPStore(host="n0", port=31000), times=50), ""),
        (None, ""),
    ],
)
def test_the_default_group_tells_a_rank(monkeypatch: pytest.MonkeyPatch, store: object, job: str) -> None:
    """The group is right where the environment differs, and its store names the job where it can."""
    put_environment(monkeypatch, WORLD_SIZE="4")  # of the node that started it
    put_group(monkeypatch, ProcessGroup(5, 16), store)
    assert found() == (5, 16, job)


def test_a_group_without_a_name_takes_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where group and environment agree on the rank, the environment names the job of a group of MPI."""
    put_environment(monkeypatch)
    put_group(monkeypatch, ProcessGroup(1, 2))
    assert found() == (1, 2, "n0:29500")


@pytest.mark.parametrize("group", [None, ProcessGroup(0, 1), ManagedGroup(0, 16)])
def test_a_group_that_tells_nothing_leaves_environ(monkeypatch: pytest.MonkeyPatch, group: object) -> None:
    """No group, a group of one, and a group of the program's own class, which is not asked."""
    put_group(monkeypatch, group, TCPStore(host="n0", port=31000))
    assert found() is None
    put_environment(monkeypatch)
    assert found() == (1, 2, "n0:29500")


@pytest.mark.parametrize(
    ("address", "job"),
    [("n0:1234", "n0:1234"), ("[fe80::1]:1234", "fe80::1:1234"), ("localhost:1234", ":1234"), (None, "")],
)
def test_a_cluster_of_jax_has_ranks(monkeypatch: pytest.MonkeyPatch, address: str | None, job: str) -> None:
    """``jax.distributed.initialize()`` keeps what it was given; before it was called there is no rank."""
    state = SimpleNamespace(client=None, process_id=3, num_processes=4, coordinator_address=address)
    module = ModuleType("jax._src.distributed")
    vars(module).update(global_state=state)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert found() is None
    state.client = object()
    assert found() == (3, 4, job)
