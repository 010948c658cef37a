"""What schedulers, pods and servers say of a holder, from their sockets to the page."""

import json
from pathlib import Path
from typing import Any

from tests.support.certificates import Authority
from tests.support.exporter import QUICK, run, serving
from tests.support.kubelet import allocatable, devices, kubelet, listed, pod
from tests.support.kubernetes_api import write_account
from tests.support.players.stage import Stage
from tests.support.pod_lists import listed_pod, serve_pods
from tests.support.standin.library import GIB, StandIn
from tests.support.vllm_server import metrics_page, serve_vllm
from vramledger.kubernetes.kubelet import SOCKET


def test_reserved_by_one_and_held_by_another(standin: StandIn, stage: Stage, directory: Path) -> None:
    """The page and ``check`` say which pod has reserved the GPU, and who holds it without a reservation."""
    pid = stage.start().pid
    standin.device(0).set_processes([(pid, GIB)])
    ids = [standin.device(number).uuid for number in (0, 1)]
    asked: list[str] = []

    def given(_: Any) -> bytes:  # noqa: ANN401 gRPC's own
        asked.append("List")
        return listed(pod("train-0", devices("nvidia.com/gpu", ids[0])))

    offer = allocatable(devices("nvidia.com/gpu", *ids))
    flag = f"--path.rootfs={directory}"
    with kubelet(directory / SOCKET, List=given, GetAllocatableResources=lambda _: offer):
        with serving(*QUICK, flag, "--no-collector.reservations", driver=standin.env()) as exporter:
            assert exporter.next_sample().up
        assert asked == [], "switched off, no scheduler is read"
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


def test_labels_of_a_pod_with_a_reservation(standin: StandIn, directory: Path, tmp_path: Path) -> None:
    """The allowed labels of the pod that has the GPU are on the page, of no other pod."""
    authority = Authority(tmp_path)
    account = write_account(tmp_path / "account", authority.pair)
    given = listed(pod("train-0", devices("nvidia.com/gpu", standin.device(0).uuid)))
    pods = [
        listed_pod("train-0", {"team": "vision", "app.kubernetes.io/name": "train", "customer": "x"}),
        listed_pod("web-0", {"team": "web"}),
    ]
    with (
        kubelet(directory / SOCKET, List=lambda _: given, GetAllocatableResources=lambda _: allocatable()),
        serve_pods(authority.sign("kubelet"), *pods) as server,
    ):
        flags = (
            *(f"--path.rootfs={directory}", "--pods.labels=team,app.kubernetes.io/name", "--pods.node=gpu-7"),
            *(f"--pods.kubelet=127.0.0.1:{server.port}", f"--pods.credentials={account}"),
        )
        with serving(*QUICK, *flags, driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("pod_labels_info"), "the labels")
            named = {"label_app_kubernetes_io_name": "train", "label_team": "vision"}
            named |= {"namespace": "ml", "pod": "train-0"}
            assert page.values("pod_labels_info") == {tuple(named.items()): 1}
            assert page.value("collector_success", collector="pods") == 1
        assert {path for path, _ in server.asked} == {"/pods"}

        server.asked.clear()
        with serving(*QUICK, flags[0], driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("device_reservation_info"), "the reservation")
            assert page.value("collector_success", collector="pods") is None
        assert server.asked == []


def test_the_kv_cache_of_an_engine(standin: StandIn, tmp_path: Path) -> None:
    """Only with the flag the server is asked; then its figures are part of the holding's."""
    with serve_vllm(tmp_path / "server") as server:
        server.say(metrics_page(0.03125, 55 * GIB, 412_000))
        standin.device(0).set_processes([(server.engine, 70 * GIB)])
        pid = str(server.engine)
        with serving(*QUICK, driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("process_memory_bytes"), "the holder")
            assert page.value("collector_success", collector="vllm") is None
        assert server.asked() == []

        with serving(*QUICK, "--collector.vllm", driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("process_kv_cache_usage_ratio"), "the figures")
            assert page.value("process_kv_cache_usage_ratio", pid=pid) == 0.03125
            assert page.value("process_kv_cache_bytes", pid=pid) == 55 * GIB
            assert page.value("process_kv_cache_tokens", pid=pid) == 412_000
            assert page.value("collector_success", collector="vllm") == 1
            why = run("show", "--why", pid, driver=exporter.found)
            assert "55.00 GiB of what it holds, 412,000 tokens, 3.1% in use by requests" in why.stdout
            listed = run("show", "--json", driver=exporter.found)
            (holding,) = json.loads(listed.stdout)["devices"][0]["holdings"]
            assert holding["kv_cache"] == {"usage": 0.03125, "memory": 55 * GIB, "tokens": 412_000}
