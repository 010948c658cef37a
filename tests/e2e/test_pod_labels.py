"""Labels of pods, from a kubelet's two interfaces to the page, the JSON and the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.certificates import Authority
from tests.support.exporter import QUICK, run, serving
from tests.support.kubelet import allocatable, devices, kubelet, listed, pod
from tests.support.kubernetes_api import write_account
from tests.support.pod_lists import listed_pod, serve_pods
from tests.support.standin.library import StandIn
from vramledger.kubernetes.kubelet import SOCKET


@pytest.fixture
def rootfs() -> Iterator[Path]:
    """Return a root with a short path, because a Unix socket's path may have only 107 bytes."""
    with TemporaryDirectory(prefix="v") as directory:
        yield Path(directory)


def test_labels_of_a_pod_with_a_reservation(standin: StandIn, rootfs: Path, tmp_path: Path) -> None:
    """The allowed labels of the pod that has the GPU are on the page, of no other pod."""
    authority = Authority(tmp_path)
    account = write_account(tmp_path / "account", authority.pair)
    given = listed(pod("train-0", devices("nvidia.com/gpu", standin.device(0).uuid)))
    pods = [
        listed_pod("train-0", {"team": "vision", "app.kubernetes.io/name": "train", "customer": "x"}),
        listed_pod("web-0", {"team": "web"}),
    ]
    with (
        kubelet(rootfs / SOCKET, List=lambda _: given, GetAllocatableResources=lambda _: allocatable()),
        serve_pods(authority.sign("kubelet"), *pods) as server,
    ):
        flags = (
            f"--path.rootfs={rootfs}",
            "--pods.labels=team,app.kubernetes.io/name",
            "--pods.node=gpu-7",
            f"--pods.kubelet=127.0.0.1:{server.port}",
            f"--pods.credentials={account}",
        )
        with serving(*QUICK, *flags, driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("pod_labels_info"), "the labels")
            labels = {
                "label_app_kubernetes_io_name": "train",
                "label_team": "vision",
                "namespace": "ml",
                "pod": "train-0",
            }
            assert page.values("pod_labels_info") == {tuple(labels.items()): 1}
            assert page.value("collector_success", collector="pods") == 1
        assert {path for path, _ in server.asked} == {"/pods"}

        server.asked.clear()
        server.status = 403
        with serving(*QUICK, *flags, driver=standin.env()) as exporter:
            page = exporter.until(
                lambda page: page.value("collector_success", collector="pods") == 0, "the failure"
            )
            assert page.up
            assert page.values("pod_labels_info") == {}

        server.asked.clear()
        with serving(*QUICK, flags[0], driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("device_reservation_info"), "the reservation")
            assert page.value("collector_success", collector="pods") is None
        assert server.asked == []


@pytest.mark.repeats(kept=3)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--pods.labels=team",), "needs the name of this node"),
        (("--pods.labels=team", "--pods.node=../secrets"), "needs the name of this node"),
        (("--pods.labels=te am", "--pods.node=n"), "is not the name of a label"),
        (("--pods.labels=", "--pods.node=n"), "is not the name of a label"),
        (("--pods.labels=*", "--pods.node=n"), "is not the name of a label"),
        ((f"--pods.labels={'a' * 64}", "--pods.node=n"), "is not the name of a label"),
        ((f"--pods.labels={','.join(map(str, range(21)))}", "--pods.node=n"), "21 labels are too many"),
        (("--pods.labels=a", "--pods.node=n", "--pods.kubelet=a/b"), "is not the address of a kubelet"),
        (("--pods.labels=a", "--pods.node=n", "--pods.kubelet=a:0"), "is not the address of a kubelet"),
    ],
)
def test_wrong_flags_are_refused(standin: StandIn, flags: tuple[str, ...], told: str) -> None:
    """A wrong name or address is one line that says what to write."""
    answer = run("serve", *flags, driver=standin.env())

    assert answer.returncode == 2
    assert told in answer.stderr
    assert "Traceback" not in answer.stderr
