"""What the storage keeps of a reading: every field, but for those that are named here."""

import json
import typing
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from msgspec.structs import fields, replace

from tests.support.values import values_of
from vramledger.model.reading import DeviceReading, ProcessFacts, Reading, decode
from vramledger.storage.reduction import apply, difference, expand_reading, reduce_reading

NOW = 1000.5

LEFT_OUT: dict[type, frozenset[str]] = {
    Reading: frozenset({"duration"}),
    DeviceReading: frozenset({"duration"}),
    ProcessFacts: frozenset(),
}
"""The fields that no verdict, ledger or text of the past uses."""

IN_PART: dict[str, tuple[object, ...]] = {
    "time": (NOW,),
    "monotonic": (NOW, 0.5),
    "ticks": (100, 250),
    "collectors": ({}, {"nvml": (True, 0.0), "slurm": (False, 0.0)}),
    "hardware": ({}, {"device_power_watts": 310.0, "device_power_limit_watts": 0.0}),
}
"""Values of fields of which a part is left out, that the next one is computed from, or that have bounds."""
KEYS = ("a", "b", "pid", "=", "-", "#", "~m", "")


def cases() -> Iterator[tuple[type, str, Any]]:
    """Yield each field that is stored, with values."""
    for kind, left_out in LEFT_OUT.items():
        hints = typing.get_type_hints(kind)
        for name in (each.name for each in fields(kind)):
            if name in left_out or (kind is Reading and name in ("devices", "facts", "agents")):
                continue  # the last three have tests of their own, field by field
            for value in IN_PART.get(name) or values_of(hints[name]):
                yield kind, name, value


def stored(reading: Reading) -> Reading:
    """Return what is read of a reading that was stored."""
    return decode(json.dumps(expand_reading(json.loads(json.dumps(reduce_reading(reading))), reading.time)))


def test_every_field_is_stored() -> None:
    """A reading has in the past what it had, and nothing known becomes unknown; what is left out is named."""
    blank = Reading(NOW, NOW)
    device, facts = DeviceReading(0, "GPU-1"), ProcessFacts(7, 70)
    tried = list(cases())
    for kind, name, value in tried:
        if kind is Reading:
            reading = replace(blank, **{name: value})
            assert getattr(stored(reading), name) == value, name
        elif kind is DeviceReading:
            reading = replace(blank, devices=(replace(device, **{name: value}),))
            assert stored(reading).devices == reading.devices, name
        else:
            reading = replace(blank, facts=(replace(facts, **{name: value}),))
            assert stored(reading).facts == reading.facts, name
    assert len(tried) > 100


def document(random: Random, depth: int = 3) -> Any:  # noqa: ANN401 whatever JSON has
    """Return any document, also with keys that mean something in a patch."""
    kind = random.randrange(5 if depth else 3)
    if kind == 3:
        return {random.choice(KEYS): document(random, depth - 1) for _ in range(random.randrange(4))}
    if kind == 4:
        return [document(random, depth - 1) for _ in range(random.randrange(4))]
    return random.choice((None, True, False, 0, 1, 1.5, "", "text", -7))


@pytest.mark.parametrize("seed", range(20))
def test_a_patch_makes_the_document_again(seed: int) -> None:
    """Of any two documents, also odd ones, the patch and the first one give the second one, through JSON."""
    random = Random(seed)  # noqa: S311 a test's
    before: dict[str, Any] = {}
    stored: Any = {}
    for _ in range(100):
        after = {random.choice(KEYS): document(random) for _ in range(4)}
        stored = apply(stored, json.loads(json.dumps(difference(before, after))))
        assert stored == after
        assert json.dumps(stored, sort_keys=True) == json.dumps(after, sort_keys=True)
        before = after


def test_what_stays_is_not_written_again() -> None:
    """A patch has the changed value alone, however large the document is."""
    rows = [[pid, 100, "S"] for pid in range(500)]
    assert len(json.dumps(difference({"rows": rows}, {"rows": [*rows[:7], [7, 100, "R"], *rows[8:]]}))) < 60
