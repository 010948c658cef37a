"""The JSON for other programs: the documents match the schemas that are served with them."""

import gzip
import json
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.builders import MIB, Shown, agent, crowd, device, failed, holding, process, snapshot
from tests.support.serving import LOOPBACK, served
from vramledger.model.reading import DeviceReading, HiddenHolder
from vramledger.model.snapshot import AgentSnapshot, Reservation, ReservationStatus, Snapshot, State


async def ask(shown: Shown, *paths: str, **headers: str) -> list[Any]:
    found: list[Any] = []
    async with served(shown, LOOPBACK) as client:
        for path in paths:
            answer = await client.ask(path, **headers)
            kind = "application/schema+json" if "/schema/" in path else "application/json"
            assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
            packed = answer.headers.get("Content-Encoding") == "gzip"
            found.append(json.loads(gzip.decompress(answer.body) if packed else answer.body))
    return found


def closed(schema: Any) -> Any:  # noqa: ANN401 a JSON document
    """Return a schema that allows only what it describes."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: closed(value) for key, value in schema.items()}
    return {**strict, "additionalProperties": False} if "properties" in schema else strict


def rich() -> Snapshot:
    """Make a snapshot with everything that a ledger can have."""
    held = [holding(7, None, State.DEAD), holding(8, 5, State.IDLE), holding(9, sm=0.5, last_active=1.0)]
    hidden = (HiddenHolder(70, 1, "cuda", "stray.py", None, (0,)),)
    lost = replace(device(1), up=False, ledger=None, reading=DeviceReading(1, "GPU-1", error="lost"))
    reserved = Reservation("pod", "ml/train-0", "kubelet", held=None)
    status = ReservationStatus((reserved,), (8,), ("kubelet",))
    first = replace(device(0, held, hidden=hidden, reserved=None), reservation_status=status)
    shot = snapshot(first, lost, processes=[process(8), process(9)])
    silent = AgentSnapshot(up=False, problem="silent", why="it is connected but sends no reports")
    return replace(shot, agents={8: silent, 9: agent(first.reading.uuid)})


@pytest.mark.parametrize(
    "shot", [rich(), crowd(2, 7), failed(), Snapshot()], ids=["rich", "crowd", "failed", "none"]
)
@pytest.mark.parametrize("name", ["ledger", "history", "leftovers"])
async def test_what_is_served_fits_its_schema(shot: Snapshot, name: str) -> None:
    """Each document has every member of its schema, and no other."""
    import jsonschema  # noqa: PLC0415 not in every process that collects the tests

    paths = (f"/api/v1/{name}", f"/api/v1/schema/{name}")
    document, schema = await ask(Shown(shot), *paths, Accept_Encoding="gzip")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(closed(schema)).validate(document)


async def test_a_holding_says_what_to_do_and_how_it_grew() -> None:
    """The ledger has a remedy for each holding that needs one, and no growth for a new holding."""
    (ledger,) = await ask(Shown(rich()), "/api/v1/ledger")

    told = {each["pid"]: (each["what_to_do"], each["growth"]) for each in ledger["devices"][0]["holdings"]}
    assert "nvidia-smi --gpu-reset -i 0" in told[7][0]
    assert "vramledger end --pid 8" in told[8][0]
    assert told[9] == (None, None)


async def test_an_unknown_schema_is_not_there() -> None:
    """Only the documents that exist have a schema."""
    async with served(Shown()) as client:
        assert (await client.ask("/api/v1/schema/nothing")).status == 404


async def test_the_ledger_tells_every_holding_with_its_evidence() -> None:
    """A holding has its bytes, its state, since when, why, and its holder."""
    found = snapshot(device(0, [holding(101, 5 * MIB)]), processes=[process(101)])
    [ledger] = await ask(Shown(found), "/api/v1/ledger")

    (shown,) = ledger["devices"]
    (held,) = shown["holdings"]
    assert (held["pid"], held["memory"]) == (101, 5 * MIB)
    assert all((held["why"], held["user"]))


async def test_a_failed_sample_has_no_devices() -> None:
    """After a failure the ledger names it, and shows no old data."""
    [ledger] = await ask(Shown(failed()), "/api/v1/ledger")

    assert (ledger["up"], ledger["devices"]) == (False, [])
    assert ledger["failure"]
