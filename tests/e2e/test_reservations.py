"""A kubelet has assigned a GPU to a pod, and another process holds it: from the socket to the page."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.exporter import QUICK, run, serving
from tests.support.kubelet import allocatable, devices, kubelet, listed, pod
from tests.support.players.stage import Stage
from tests.support.standin.library import GIB, StandIn
from vramledger.kubernetes.kubelet import SOCKET


@pytest.fixture
def rootfs() -> Iterator[Path]:
    """Return a root with a short path, because a Unix socket's path may have only 107 bytes."""
    with TemporaryDirectory(prefix="v") as directory:
        yield Path(directory)


def test_reserved_by_one_and_held_by_another(standin: StandIn, stage: Stage, rootfs: Path) -> None:
    """The page and ``check`` say which pod has reserved the GPU, and who holds it without a reservation."""
    pid = stage.start().pid
    standin.device(0).set_processes([(pid, GIB)])
    ids = [standin.device(number).uuid for number in (0, 1)]
    given = listed(pod("train-0", devices("nvidia.com/gpu", ids[0])))
    offer = allocatable(devices("nvidia.com/gpu", *ids))
    flag = f"--path.rootfs={rootfs}"
    with kubelet(rootfs / SOCKET, List=lambda _: given, GetAllocatableResources=lambda _: offer):
        with serving(*QUICK, flag, driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.up, "data")
            _, ledger = exporter.get("/api/v1/ledger")
        check = run("check", "--json", "--wait=100ms", flag, driver=standin.env())

    assert page.value("device_reservation_info", gpu=0, owner_type="pod", owner="ml/train-0") == 1
    assert page.value("device_reservations", gpu=0, use="unheld") == 1
    assert page.value("device_unreserved_holders", gpu=0) == 1
    assert page.value("device_unreserved_memory_bytes", gpu=0) == GIB
    assert page.value("device_unreserved_holders", gpu=1) == 0
    assert page.value("device_owners", gpu=0) == 1
    assert [each["unreserved"] for each in json.loads(ledger)["devices"][0]["holdings"]] == [True]
    said = [reason["said"] for reason in json.loads(check.stdout)["devices"][0]["reasons"]]
    assert any(f"pid {pid} player.py" in each and "without a reservation" in each for each in said)
    assert "reserved for pod ml/train-0, which holds nothing" in said


def test_a_kubelet_that_hangs_holds_up_nothing(standin: StandIn, rootfs: Path) -> None:
    """While the kubelet does not answer, sampling continues and there are no reservations."""
    go_on = threading.Event()

    def wait(_: Any) -> bytes:  # noqa: ANN401 gRPC's own
        go_on.wait(60)
        return listed()

    with kubelet(rootfs / SOCKET, List=wait):
        with serving(*QUICK, f"--path.rootfs={rootfs}", driver=standin.env()) as exporter:
            exporter.next_sample()
            page = exporter.next_sample()
        go_on.set()

    assert page.up
    assert page.values("device_reservations") == {}


def test_switched_off(standin: StandIn, rootfs: Path) -> None:
    """With ``--no-collector.reservations`` no scheduler is read."""
    asked = threading.Event()

    def answer(_: Any) -> bytes:  # noqa: ANN401 gRPC's own
        asked.set()
        return listed()

    with (
        kubelet(rootfs / SOCKET, List=answer),
        serving(
            *QUICK, f"--path.rootfs={rootfs}", "--no-collector.reservations", driver=standin.env()
        ) as exporter,
    ):
        exporter.next_sample()

    assert not asked.is_set()
