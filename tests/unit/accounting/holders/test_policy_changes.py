"""The verdict on framework and policy over time: from the memory pattern, cached, without many series."""

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.host.model import GIB, MIB
from tests.support.host.one_holder import SHELL, OneHolder
from tests.support.sure import sure
from vramledger.accounting.holders import policies
from vramledger.accounting.holders.processes import SETTLED_AFTER
from vramledger.metrics import processes
from vramledger.model.reading import Owner, ProcessFacts, Rank
from vramledger.model.snapshot import Policy, ProcessSnapshot
from vramledger.views.ledger_json import snapshot_json
from vramledger.views.table import render_table


def facts(host: OneHolder, *libraries: str, **changes: object) -> tuple[ProcessFacts, ...]:
    """Return the facts of the holder with these libraries."""
    return (replace(ProcessFacts(7, host.holder.start, user="ann", libraries=libraries), **changes),)


def appear(host: OneHolder, framework: str, memory: int = 518 * MIB) -> None:
    """Let the holder start while the exporter watches, with the libraries of a framework."""
    host.holder.begin = inf
    host.sample()
    host.holder.framework = framework
    host.holder.begin = host.now
    host.program.memory = memory
    host.sample()


def process(host: OneHolder, **changes: Any) -> ProcessSnapshot:  # noqa: ANN401 any field of a reading
    """Take a sample of the holder."""
    return host.sample(**changes).processes[7]


def test_a_jump_that_was_seen_is_evidence() -> None:
    """A context, then nearly everything in one sample: TensorFlow preallocates."""
    host = OneHolder()
    appear(host, "tensorflow")
    assert process(host).policy.policy == "unknown"
    host.program.memory = 78 * GIB
    assert process(host).policy[:3] == ("tensorflow", "preallocate", "pattern")


@pytest.mark.parametrize("gap", [False, True])
def test_a_holding_that_was_there_before_us_did_not_jump(*, gap: bool) -> None:
    """At the first sample, and after a gap, the bytes may be old: the same holding proves nothing."""
    host = OneHolder()
    host.holder.framework = "cuda"
    if gap:
        host.holder.begin = inf
        host.sample()
        host.now += 60
        host.holder.begin = host.now
    host.program.memory = 73 * GIB
    assert process(host).policy[:2] == ("cuda", "unknown")


def test_the_first_bytes_of_a_holder_that_came_are_a_jump() -> None:
    """A holder that the last sample did not list has taken all its bytes since then."""
    host = OneHolder()
    appear(host, "cuda", memory=73 * GIB)
    assert process(host).policy[:2] == ("cuda", "preallocate")


def test_without_change_nothing_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a new verdict only when facts or bytes have changed."""
    host = OneHolder()
    appear(host, "torch")
    judged: list[object] = []

    def judge(*_: object, **__: object) -> Policy:
        judged.append(_)
        return Policy()

    monkeypatch.setattr(policies, "classify", judge)
    host.sample()
    host.sample()
    assert judged == []
    host.program.memory = 2 * GIB
    host.sample()
    host.sample(facts=facts(host, "libtorch_cuda"))
    assert len(judged) == 2


def test_a_settled_verdict_becomes_a_label_and_stays() -> None:
    """For a minute the info has no framework; then it has one, and no later pattern changes the series."""
    host = OneHolder()
    appear(host, "jax")
    for size in (1, 2, 3):
        host.program.memory = size * GIB
        host.sample()
    assert process(host).policy[:3] == ("jax", "growth", "pattern")
    seen = [process(host).settled for _ in range(int(SETTLED_AFTER) + 10)]
    host.program.memory = 63 * GIB
    later = [process(host) for _ in range(int(SETTLED_AFTER) + 10)]
    assert later[-1].policy[:3] == ("jax", "fraction", "pattern")
    assert list(dict.fromkeys([*seen, *(each.settled for each in later)])) == [
        ("", ""), ("jax", ""), ("jax", "growth"),
    ]  # fmt: skip


def test_what_the_environment_says_needs_no_second_minute() -> None:
    """A policy from the environment, or one that never changes, is a label as soon as the framework is."""
    host = OneHolder()
    appear(host, "torch")
    seen = [process(host).settled for _ in range(int(SETTLED_AFTER) + 5)]
    assert list(dict.fromkeys(seen)) == [("", ""), ("torch", "caching")]


def test_a_driver_without_framework_may_become_one() -> None:
    """A program that loads torch an hour after its first context gets that framework then."""
    host = OneHolder()
    appear(host, "cuda")
    for _ in range(int(SETTLED_AFTER) + 5):
        host.sample()
    assert process(host).settled == ("cuda", "")
    assert process(host, facts=facts(host, "libtorch_cuda")).settled == ("torch", "caching")


def test_an_environment_that_was_read_once_is_remembered() -> None:
    """What a program overwrites with its title stays known: signs, rank, service, notebook."""
    host = OneHolder()
    appear(host, "torch")
    read = facts(
        host,
        "libtorch_cuda",
        signs=("LOCAL_RANK", "title"),
        rank=Rank(1, 4, "run"),
        service_main=True,
        owner=Owner("user", "ann", notebook="a.ipynb"),
    )
    host.sample(facts=read)
    (blind,) = facts(host, "libtorch_cuda", signs=("title",), denied=("environ",), owner=Owner("user", "ann"))
    after = sure(process(host, facts=(blind,)).facts)
    assert (after.signs, after.rank, after.service_main) == (read[0].signs, read[0].rank, True)
    assert (after.owner, after.denied) == (read[0].owner, ())


def test_a_parents_signs_that_were_read_once_are_remembered() -> None:
    """What the same parent may have passed on stays known."""
    host = OneHolder()
    appear(host, "torch")
    host.sample(facts=facts(host, parent=SHELL._replace(signs=("LOCAL_RANK",))))
    after = process(host, facts=facts(host, parent=SHELL._replace(signs=None))).facts
    other = process(host, facts=facts(host, parent=SHELL._replace(pid=401, signs=None))).facts
    assert sure(sure(after).parent).signs == ("LOCAL_RANK",)
    assert sure(sure(other).parent).signs is None


def test_a_later_look_that_sees_nothing_takes_nothing_away() -> None:
    """A holder that has ended, or is stuck, keeps the framework that was seen."""
    host = OneHolder()
    appear(host, "torch")
    settings = (("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync"),)
    host.sample(facts=facts(host, "libtorch_cuda", settings=settings))
    for blind in (facts(host), facts(host, libraries=None, denied=("environ", "maps"))):
        assert process(host, facts=blind).policy[:2] == ("torch", "cuda_malloc_async")


def test_another_process_with_the_pid_is_judged_by_itself() -> None:
    """A process that gets the pid later inherits nothing of a verdict."""
    host = OneHolder()
    appear(host, "torch")
    host.holder.end = host.now
    host.reuse_pid(GIB)
    host.holder.framework = "tensorflow"
    assert process(host).policy[:2] == ("tensorflow", "unknown")


def test_everyone_shows_the_same_verdict() -> None:
    """Page, document and table name framework and policy; the document also has the evidence."""
    host = OneHolder()
    appear(host, "torch")
    shot = host.sample()
    page = {family.name: samples for family, samples in processes.collect(shot, 0)}
    labels = [each for each, _ in page["vramledger_framework_policy_info"]]
    assert labels == [("7", "torch", "caching", "default")]
    devices = snapshot_json(shot)["devices"]
    assert isinstance(devices, list)
    assert isinstance(devices[0], dict)
    holdings = devices[0]["holdings"]
    assert isinstance(holdings, list)
    held = holdings[0]
    assert isinstance(held, dict)
    assert (held["framework"], held["policy"], held["policy_source"]) == ("torch", "caching", "default")
    assert "cache" in str(held["policy_why"])
    assert " FRAMEWORK " in render_table(shot)
    assert " torch/caching " in render_table(shot)


def test_a_table_without_frameworks_has_no_column_for_them() -> None:
    """If no holder's libraries are known the lines are as short as before."""
    host = OneHolder()
    shot = host.sample()
    assert "FRAMEWORK" not in render_table(shot)
    assert "STATE" in render_table(shot)
