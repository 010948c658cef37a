"""The fleet on which the cost of the dashboards is measured."""

from __future__ import annotations

from tests.support.dashboards.database import Samples
from tests.support.dashboards.nodes import HOURS, NOW
from tests.support.dashboards.scale import copy_nodes
from tests.support.host.model import EPOCH


def test_copies_have_what_the_rules_recorded() -> None:
    """Scrapes and rules have other moments; both are in each copy, once in each span, for all the hours."""
    samples = Samples()
    scraped, recorded = (
        {"__name__": name, "instance": "a", "uuid": "b"} for name in ("scraped", "rec:orded")
    )
    for number in range(int(HOURS * 120)):
        at = EPOCH + 30.0 * number
        samples.add("a", at, {tuple(sorted(scraped.items())): 1.0})
        if number % 4 == 0:
            samples.add("rules", at, {tuple(sorted(recorded.items())): 2.0})

    copies = copy_nodes(samples, 2, 2 * HOURS, 60.0).points

    counts = {(dict(labels)["__name__"], dict(labels)["instance"]): len(v) for labels, v in copies.items()}
    assert counts == {
        ("scraped", "a-0"): 2 * HOURS * 60,
        ("scraped", "a-1"): 2 * HOURS * 60,
        ("rec:orded", "a-0"): 2 * HOURS * 30,
        ("rec:orded", "a-1"): 2 * HOURS * 30,
    }
    assert max(at for values in copies.values() for at, _ in values) <= NOW
