"""Which holders have the KV cache that a server tells."""

from tests.support.builders import MIB, device, holding
from vramledger.accounting.tracker import join_holder_facts
from vramledger.model.holder_facts import KvCache
from vramledger.model.reading import ProcessRow, Reading

ROW = ProcessRow(101, 10100, "S", 1, 101, 101, 0, 1)
CACHE = KvCache(101, 10100, 0.25, 512 * MIB, 1000)


def join(
    *told: KvCache, row: ProcessRow = ROW, sizes: tuple[int | None, ...] = (512 * MIB,), reused: bool = False
) -> dict[int, KvCache]:
    """Join with one holder, who has these bytes on its devices."""
    devices = [device(index, [holding(101, size)]) for index, size in enumerate(sizes)]
    reading = Reading(1.0, 1.0, kv_caches=told)
    joined: dict[int, KvCache] = join_holder_facts(reading, {101: row}, devices, {101} if reused else ()).get(
        "kv_caches", {}
    )
    return joined


def test_a_holder_has_the_cache_that_is_told_of_it() -> None:
    """The figures belong to the process that was asked about, and to no later one with its pid."""
    assert join(CACHE) == {101: CACHE}
    assert join(CACHE, row=ROW._replace(start=10101)) == {}
    assert join(CACHE, reused=True) == {}
    assert join(CACHE._replace(pid=102)) == {}
    assert join(CACHE, sizes=()) == {}
    assert join() == {}


def test_a_cache_is_not_larger_than_what_its_process_holds() -> None:
    """A size above the largest holding is not known; use and tokens stay."""
    unsized = CACHE._replace(memory=None)
    assert join(CACHE, sizes=(512 * MIB - 1,)) == {101: unsized}
    assert join(CACHE, sizes=(None,)) == {101: unsized}
    assert join(CACHE, sizes=(1, 512 * MIB)) == {101: CACHE}
    assert join(KvCache(101, 10100, None, 512 * MIB, None), sizes=(1,)) == {}
