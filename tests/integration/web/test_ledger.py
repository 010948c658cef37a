"""The ledger as JSON, for programs other than Prometheus."""

from __future__ import annotations

import json
from typing import Any

from tests.support.builders import MIB, Shown, device, failed, holding, process, snapshot
from tests.support.serving import LOOPBACK, run, served


def ask(shown: Shown) -> Any:  # noqa: ANN401 a JSON document
    """Get the ledger of one snapshot."""
    answers: list[Any] = []

    async def test() -> None:
        async with served(shown, LOOPBACK) as client:
            answer = await client.ask("/api/v1/ledger")
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "application/json"
            answers.append(json.loads(answer.body))

    run(test)
    return answers[0]


def test_the_ledger_tells_every_holding_with_its_evidence() -> None:
    """A holding has its bytes, its state, since when, why, and its holder."""
    ledger = ask(Shown(snapshot(device(0, [holding(101, 5 * MIB)]), processes=[process(101)])))

    assert isinstance(ledger, dict)
    (shown,) = ledger["devices"]
    (held,) = shown["holdings"]
    assert (held["pid"], held["memory"]) == (101, 5 * MIB)
    assert held["why"]
    assert held["user"]


def test_a_failed_sample_has_no_devices() -> None:
    """After a failure the ledger names it, and shows no old data."""
    ledger = ask(Shown(failed()))

    assert isinstance(ledger, dict)
    assert ledger["up"] is False
    assert ledger["failure"]
    assert ledger["devices"] == []
