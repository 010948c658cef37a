"""Published cases, with their figures, through the recording rules and alerts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.alerts.nodes import Holder, Node, uuid
from tests.support.alerts.promtool import expect, firing, firing_labels
from tests.support.host.model import GIB

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

MIB = 1 / 1024
OVERHEAD = 500 * MIB
"""Memory outside the pool; how the need is divided between the two changes no sum."""


def backend(held: float, need: float, sm: float = 0.04, policy: str = "preallocate") -> Holder:
    """Return a program that holds and needs so many MiB by the driver's figures.

    The cases are TensorFlow's, whose agent tells no pool: without one, what is outside of it is not known. So
    the figures are those that JAX's agent would tell.
    """
    return Holder(
        7,
        held * MIB,
        sm=sm,
        command="mnist.py",
        framework="jax",
        policy=policy,
        agent={
            "framework_in_use_bytes": need * MIB - OVERHEAD,
            "framework_in_use_peak_bytes": need * MIB - OVERHEAD,
            "framework_pool_bytes": held * MIB - OVERHEAD,
        },
    )


def test_mnist_job(tmp_path: Path) -> None:
    """An MNIST job takes 94 % of a 24,265 MiB card and needs a nineteenth: 20 fit by memory, 25 by SMs."""
    node = Node([backend(22885, 1205)], total=24265 * MIB)
    figures = {
        "round(100 * vramledger_device:memory_used:ratio)": 94,
        "round(vramledger_process:hoarding_factor:ratio)": 19,
        "1 + vramledger_process:more_jobs_fit:floor": 20,
        "floor(1 / vramledger_process:sm_utilization_ratio:avg15m)": 25,
    }

    assert expect(tmp_path, node.series(20), 20, figures) == ""


@pytest.mark.parametrize(
    ("held", "need", "factor", "jobs"),
    [(47853, 7000, 6.8, 6), (47853, 2400, 19.9, 20), (47853, 1600, 29.9, 30), (7000, 7000, 1, 6)],
    ids=["against-growth", "against-a-limit-of-2400", "against-a-limit-of-1600", "with-growth"],
)
def test_backend(held: float, need: float, factor: float, jobs: int, tmp_path: Path) -> None:
    """A backend on a 48,000 MiB card holds 47,853 by default, and needs only 7,000, 2,400 or 1,600."""
    node = Node([backend(held, need)], total=48000 * MIB)
    figures = {
        "round(vramledger_process:hoarding_factor:ratio, 0.1)": factor,
        "1 + vramledger_process:more_jobs_fit:floor": jobs,
    }

    assert expect(tmp_path, node.series(10), 10, figures) == ""


def test_backend_gives_nothing_back_until_it_ends(tmp_path: Path) -> None:
    """Its tensors are freed, the pool stays and counts as hoarded after an hour; its end frees everything."""
    held = replace(
        backend(47853, 7000),
        gib=lambda minute: 47853 * MIB if minute < 90 else None,
        state=lambda minute: "active" if minute < 20 else "idle",
        since=lambda minute: -600 if minute < 20 else 10,
        sm=None,
    )
    in_use = {**held.agent, "framework_in_use_bytes": lambda minute: 6 if minute < 10 else 0}
    node = Node([replace(held, agent=in_use)], total=48000 * MIB)
    series = node.series(110)

    idle, ended = firing_labels(tmp_path, series, [80, 110])

    assert {labels["alertname"] for labels in idle} == {"GpuMemoryHoarded", "GpuMemoryNearlyFull"}
    assert ended == []
    assert expect(tmp_path, series, 110, {"vramledger_device:memory_used:ratio": 0}) == ""


def test_resnet_that_keeps_the_first_iterations_gradients(tmp_path: Path) -> None:
    """A training whose second iteration also holds the first one's gradients peaks once: no leak."""

    def allocated(minute: float) -> float:
        return 6 if minute < 1 else 12

    holder = Holder(
        7,
        lambda minute: allocated(minute) + 0.5,
        agent={
            "torch_allocated_bytes": allocated,
            "torch_allocated_peak_bytes": allocated,
            "torch_reserved_bytes": allocated,
        },
    )
    series = Node([holder], total=48).series(60)

    assert expect(tmp_path, series, 60, {"vramledger_process:peak_need_bytes:sum / 2^30": 12.5}) == ""
    assert firing_labels(tmp_path, series, [60]) == [[]]


def test_a_framework_without_a_peak_needs_its_pool(tmp_path: Path) -> None:
    """A program's need is the sum over its frameworks; CuPy reports no peak, so its whole pool counts."""
    device = f'NODE,gpu="0",uuid="{uuid(0)}",pid="7"'
    cupy = {f'vramledger_framework_pool_bytes{{{device},framework="cupy"}}': 2.0 * GIB}
    torch = {"torch_allocated_peak_bytes": 6, "torch_reserved_bytes": 9}
    series = Node([Holder(7, 9.5, agent=torch)], extra=cupy).series(10)

    assert expect(tmp_path, series, 10, {"vramledger_process:peak_need_bytes:sum / 2^30": 8.5}) == ""


def test_resnet_that_keeps_every_iterations_gradients(tmp_path: Path) -> None:
    """If each iteration keeps the memory of all earlier ones, the minimum rises, and the alert says leak."""

    def allocated(minute: float) -> float:
        return 6 + 0.2 * minute

    holder = Holder(
        7,
        lambda minute: allocated(minute) + 0.5,
        agent={"torch_allocated_bytes": allocated, "torch_reserved_bytes": allocated},
    )
    [alert] = firing(tmp_path, Node([holder], total=48).series(50), 50)

    assert alert.name == "GpuMemoryLeakSuspected"
    assert "pid 7" in alert.annotations["description"]
