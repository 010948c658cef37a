"""When reads hang, only that process lacks facts, and only few threads are lost."""

import pwd
import threading

import pytest

from tests.support.procs import FakeProc, known
from tests.support.waiting import wait_until
from vramledger.model.reading import ProcessFacts
from vramledger.readers.bounded import BoundedReader
from vramledger.readers.hosts.host import Host
from vramledger.sampling.holder_watch import FactsReader


def _collect(reader: FactsReader, facts: dict[int, ProcessFacts], *pids: int) -> bool:
    facts.update({each.pid: each for each in reader.collect(0.005)})
    return facts.keys() >= set(pids)


@pytest.mark.parametrize("name", ["cmdline", "environ", "maps"])
def test_a_hanging_read_costs_that_process_its_name_only(proc: FakeProc, name: str) -> None:
    """Other processes get all facts, the stuck one gets what cannot hang, and all when its read returns."""
    reader = FactsReader(Host(proc.root), stuck_after=0.02)
    stuck, healthy = proc.add(42), proc.add(43)
    path = proc.hang(42, name)
    facts: dict[int, ProcessFacts] = {}
    reader.request(stuck)
    reader.request(healthy)
    wait_until(lambda: _collect(reader, facts, 42, 43), "the facts")
    assert (facts[43].command, facts[43].denied) == ("train.py", ())
    assert (facts[42].command, facts[42].denied) == ("python3", ("cmdline", "environ", "maps"))
    assert reader.stuck == 1
    reader.request(stuck)  # its parent has changed: it must not block a second thread
    facts.clear()
    wait_until(lambda: _collect(reader, facts, 42), "the facts")
    assert reader.stuck == 1
    facts.clear()
    late = {
        "cmdline": b"python3\0late.py\0",
        "environ": b"LOCAL_RANK=1\0",
        "maps": b"7f-8f r-xp 0 0:1 2 /x/libcuda.so.1\n",
    }
    path.write_bytes(late[name])
    wait_until(lambda: _collect(reader, facts, 42), "the facts")
    assert facts[42].denied == ()
    assert (facts[42].command, facts[42].signs, facts[42].libraries) in {
        ("late.py", (), ()), ("train.py", ("LOCAL_RANK",), ()), ("train.py", (), ("libcuda",)),
    }  # fmt: skip
    assert reader.stuck == 0


def test_threads_lost_to_hanging_reads_are_few(proc: FakeProc) -> None:
    """Only a few threads are lost, however many reads hang, and every process is answered."""
    reader = FactsReader(Host(proc.root), stuck_after=0.02, max_stuck=2)
    pids = range(50, 56)
    facts: dict[int, ProcessFacts] = {}
    paths = []
    for pid in pids:
        row = proc.add(pid)
        paths.append(proc.hang(pid, "cmdline"))
        reader.request(row)
    wait_until(lambda: _collect(reader, facts, *pids), "the facts")
    assert reader.stuck == 2
    assert all(each.denied == ("cmdline", "environ", "maps") for each in facts.values())
    for path in paths[:2]:
        path.write_bytes(b"x\0")
    wait_until(lambda: _collect(reader, facts) and reader.stuck == 0, "the lost threads")


def test_threads_are_few_when_the_harmless_reads_hang_too() -> None:
    """If the reads that should not hang do, no more threads are lost, and all continues afterwards."""
    now = 0.0
    begun, gate = threading.Semaphore(0), threading.Event()

    def hang() -> str:
        begun.release()
        gate.wait()
        return "late"

    guard: BoundedReader[str] = BoundedReader(stuck_after=1.0, max_stuck=2, clock=lambda: now)
    others = threading.active_count()
    for key in range(10):
        guard.submit(key, hang, hang)
    for lost in (1, 2, 3):
        assert begun.acquire(timeout=20)
        now += 1.0
        assert guard.collect(0.0) == []
        assert guard.stuck == lost
    now += 1.0
    guard.submit("one more", hang, hang)
    assert guard.collect(0.0) == []
    assert (guard.stuck, guard.busy, threading.active_count() - others) == (3, False, 3)

    gate.set()
    done: list[str] = []

    def finished() -> bool:
        done.extend(guard.collect(0.005))
        return len(done) == 12  # the first task both ways, and the ten others

    wait_until(finished, "what was asked for")
    assert guard.stuck == 0


def test_the_outline_never_asks_the_name_service(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory service that is down (LDAP, SSSD) cannot hang the basic read: it uses known names."""
    host = Host(proc.root)
    row = proc.add(42)
    root = pwd.getpwuid(0)
    asked: list[int] = []

    def ask(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        return root

    monkeypatch.setattr(pwd, "getpwuid", ask)
    assert (known(host.basic_facts(row)).user, asked) == ("0", [])
    assert (known(host.facts(row)).user, asked) == ("root", [0])
    assert (known(host.basic_facts(row)).user, asked) == ("root", [0])


def test_processes_that_end_have_no_facts(proc: FakeProc) -> None:
    """A process that has ended before its turn gets no answer."""
    reader = FactsReader(Host(proc.root))
    row = proc.add(42)
    proc.stat(42).unlink()
    reader.request(row)
    reader.request(proc.add(43))
    facts: dict[int, ProcessFacts] = {}
    wait_until(lambda: _collect(reader, facts, 43), "the facts")
    assert set(facts) == {43}
