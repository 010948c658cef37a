"""The kubelet's pod-resources socket: our own client against gRPC's server and protobuf's messages."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kubelet import allocatable, claim, devices, kubelet, listed, pod
from tests.support.sure import sure
from vramledger.kubernetes.kubelet import (
    CHECKPOINT,
    REGISTRY,
    SOCKET,
    GrpcError,
    call_method,
    parse_allocatable,
    parse_devices,
    parse_grants,
    read_kubelet,
)
from vramledger.model.reading import Grant, Scheduler

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_GPU = "GPU-99999999-2222-3333-4444-555555555555"
MIG = "MIG-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"


@pytest.fixture
def rootfs() -> Iterator[Path]:
    """Return a root with a short path, because a Unix socket's path may have only 107 bytes."""
    with TemporaryDirectory(prefix="v") as directory:
        yield Path(directory)


def test_pods_and_their_devices(rootfs: Path) -> None:
    """One grant for each pod: GPUs, MIG instances, time slices and DRA claims; other devices are ignored."""
    answer = listed(
        pod("train-0", devices("nvidia.com/gpu", GPU, OTHER_GPU)),
        pod("slice-0", devices("nvidia.com/gpu.shared", f"{GPU}::1"), namespace="dev"),
        pod("mig-0", devices("nvidia.com/mig-1g.18gb", MIG)),
        pod("dra-0", claim("gpu.nvidia.com", "gpu-3", "k8s.gpu.nvidia.com/claim=8a1b-gpu-3")),
        pod(
            "cdi-0",
            claim("", "", f"nvidia.com/gpu={GPU}"),
            claim("", "", "k8s.gpu.nvidia.com/claim=8a-gpu-1"),
        ),
        pod("web-0", devices("nvidia.com/rdma_shared", "mlx5_0"), devices("cpu.example/x", "1")),
        pod("net-0", claim("dra.net", "eth0", "example.com/nic=eth0")),
        pod("none-0"),
    )
    offer = allocatable(devices("nvidia.com/gpu", GPU, OTHER_GPU), devices("nvidia.com/hostdev", "x"))
    with kubelet(rootfs / SOCKET, List=lambda _: answer, GetAllocatableResources=lambda _: offer):
        found = read_kubelet(rootfs)

    assert found == Scheduler(
        "kubelet",
        (GPU, OTHER_GPU),
        (
            Grant("pod", "ml/train-0", (GPU, OTHER_GPU)),
            Grant("pod", "dev/slice-0", (f"{GPU}::1",)),
            Grant("pod", "ml/mig-0", (MIG,)),
            Grant("pod", "ml/dra-0", ("gpu-3",)),
            Grant("pod", "ml/cdi-0", (GPU, "gpu-1")),
        ),
    )


def test_a_node_with_many_pods(rootfs: Path) -> None:
    """An answer of several megabytes, in hundreds of frames, is read completely."""
    pods = [pod(f"{'x' * 600}-{each}", devices("nvidia.com/gpu", f"{GPU}::{each}")) for each in range(4000)]
    answer = listed(*pods)
    assert len(answer) > 2_000_000
    with kubelet(rootfs / SOCKET, List=lambda _: answer):
        grants = sure(read_kubelet(rootfs)).grants
    assert (len(grants), grants[-1]) == (4000, Grant("pod", f"ml/{'x' * 600}-3999", (f"{GPU}::3999",)))


def test_an_older_kubelet_offers_nothing(rootfs: Path) -> None:
    """Without GetAllocatableResources the assigned devices are still reported; a node may have none."""
    with kubelet(rootfs / SOCKET, List=lambda _: listed(pod("a", devices("nvidia.com/gpu", GPU)))):
        assert read_kubelet(rootfs) == Scheduler("kubelet", (), (Grant("pod", "ml/a", (GPU,)),))
    offer = {"List": lambda _: listed(pod("a")), "GetAllocatableResources": lambda _: allocatable()}
    with kubelet(rootfs / SOCKET, **offer):
        assert read_kubelet(rootfs) == Scheduler("kubelet", (), ())


def test_no_kubelet(rootfs: Path) -> None:
    """No socket, a plain file, a dead socket and a path that is too long count as no scheduler."""
    path = rootfs / SOCKET
    assert read_kubelet(rootfs) is None
    path.parent.mkdir(parents=True)
    path.write_text("no socket")
    assert read_kubelet(rootfs) is None
    path.unlink()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert read_kubelet(rootfs) is None
    assert read_kubelet(rootfs / ("x" * 120)) is None


def refuse(context: Any) -> bytes:  # noqa: ANN401 gRPC's own
    """Answer like a kubelet that limits the rate, or has the API switched off."""
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    raise AssertionError


def test_a_refusal(rootfs: Path) -> None:
    """A call that the server refuses is an error, not an empty list."""
    with kubelet(rootfs / SOCKET, List=refuse):
        with pytest.raises(GrpcError, match="refused"):
            call_method(str(rootfs / SOCKET), "/v1.PodResourcesLister/List", 10)
        assert read_kubelet(rootfs) is None


def test_an_answer_that_does_not_come(rootfs: Path) -> None:
    """A kubelet that accepts and stays silent takes the timeout and counts as no scheduler."""
    go_on = threading.Event()

    def wait(_: Any) -> bytes:  # noqa: ANN401 gRPC's own
        go_on.wait(60)
        return listed()

    with kubelet(rootfs / SOCKET, List=wait):
        with pytest.raises(GrpcError, match=r"timed out|TimeoutError"):
            call_method(str(rootfs / SOCKET), "/v1.PodResourcesLister/List", 0.2)
        go_on.set()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0\0\0\4\0\0\0\0\0",  # settings, and the end
        b"\0\0\0\7\0\0\0\0\0",  # GOAWAY
        b"\0\0\4\3\0\0\0\0\1\0\0\0\2",  # RST_STREAM
        b"\0\0\5\0\1\0\0\0\1\0\0\0\0\7",  # a message of 7 bytes that has none
        b"\0\0\5\0\1\0\0\0\1\1\0\0\0\0",  # a compressed one
        b"\0\0\0\0\x09\0\0\0\1",  # padding without its length
        os.urandom(4096),
    ],
)  # fmt: skip
def test_what_is_no_kubelet(rootfs: Path, said: bytes) -> None:
    """Any other protocol on the socket is an error in one line, and ends the call."""
    path = rootfs / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(GrpcError):
            call_method(str(path), "/v1.PodResourcesLister/List", 10)
        answering.join(10)


@given(st.binary(max_size=300))
def test_no_message_breaks_the_reading(message: bytes) -> None:
    """Invalid messages give grants of text, or a ValueError, and nothing else."""
    for parse in (lambda data: list(parse_grants(data)), parse_allocatable):
        try:
            parse(message)
        except ValueError:
            continue


@given(st.integers(min_value=0, max_value=400))
def test_a_cut_message_is_noticed_or_shorter(cut: int) -> None:
    """An answer that is cut off gives the pods before the cut, or an error, and no other name."""
    whole = listed(*(pod(f"p-{number}", devices("nvidia.com/gpu", GPU)) for number in range(4)))
    grants = set(parse_grants(whole))
    try:
        found = set(parse_grants(whole[:cut]))
    except ValueError:
        return
    assert found <= grants


def prepared(**parts: Any) -> bytes:  # noqa: ANN401 JSON
    """Return a checkpoint of NVIDIA's DRA driver with prepared devices by version."""
    versions = {
        version: {"checksum": 1, "preparedClaims": {f"claim-{n}": each for n, each in enumerate(claims)}}
        for version, claims in parts.items()
    }
    return json.dumps({"checksum": 7, **versions}).encode()


FULL = {"preparedDevices": [{"devices": [
    {"gpu": {"info": {"uuid": GPU}, "device": {"PoolName": "node", "DeviceName": "gpu-0"}}},
    {"mig": {"info": {"uuid": MIG, "parentUUID": OTHER_GPU}, "device": {"deviceName": "gpu-1-mig-9-4-4"}}},
]}]}  # fmt: skip
LIVE = {"checkpointState": "PrepareCompleted", "preparedDevices": [{"devices": [
    {"mig": {"concrete": {"migUUID": MIG, "parentUUID": GPU, "giId": 2, "ciId": 0},
             "device": {"DeviceName": "gpu-0-mig-19-1", "ShareID": "c1"}}},
]}]}  # fmt: skip


@pytest.mark.parametrize(
    ("checkpoint", "known"),
    [
        (prepared(v1=[FULL]), {"gpu-0": GPU, "gpu-1-mig-9-4-4": MIG}),
        (prepared(v1=[FULL["preparedDevices"]]), {"gpu-0": GPU, "gpu-1-mig-9-4-4": MIG}),
        (prepared(v1=[], v2=[LIVE], v3=[LIVE]), {"gpu-0-mig-19-1": MIG}),
        (prepared(v2=[{"checkpointState": "PrepareStarted", "preparedDevices": None}]), {}),
        (prepared(v2=[{"device": {"deviceName": "gpu-0"}, "info": {"uuid": "GPU-x"}}]), {}),
        (prepared(v2=[{"device": {"deviceName": "gpu-0"}, "a": GPU, "b": OTHER_GPU}]), {}),
        (prepared(v1=[{"device": {"deviceName": "gpu-0"}, "a": GPU}],
                  v2=[{"device": {"deviceName": "gpu-0"}, "a": OTHER_GPU}]), {"gpu-0": OTHER_GPU}),
        (b'{"v1": ' + b"[" * 100_000, {}),
        (b'{"v1": {"preparedClaims": ' + b"[" * 500 + b"]" * 500 + b"}}", {}),
        (b"[]", {}), (b"null", {}), (b"", {}),
        (prepared(v1=[{"device": {"deviceName": 7}}]), {}),
    ],
)  # fmt: skip
def test_what_the_dra_driver_has_prepared(checkpoint: bytes, known: dict[str, str]) -> None:
    """Devices have the UUIDs that the driver's checkpoint gives them; what is unclear is left out."""
    assert parse_devices(checkpoint) == known


@pytest.mark.parametrize("running", [True, False])
def test_claims_name_their_instances_and_every_gpu_is_managed(rootfs: Path, running: bool) -> None:
    """With the driver's checkpoint a pod has the instance of its claim; several pods may share it.

    While the driver is registered with the kubelet, a GPU that was never granted is managed, too.
    """
    answer = listed(
        pod("one", claim("gpu.nvidia.com", "gpu-0-mig-19-1")),
        pod("two", claim("gpu.nvidia.com", "gpu-0-mig-19-1")),
        pod("new", claim("gpu.nvidia.com", "gpu-7")),
    )
    checkpoint = rootfs / CHECKPOINT
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(prepared(v2=[LIVE]))
    (rootfs / REGISTRY).mkdir()
    with socket.socket(socket.AF_UNIX) as registered:
        if running:
            registered.bind(str(rootfs / REGISTRY / "gpu.nvidia.com-reg.sock"))
        with kubelet(rootfs / SOCKET, List=lambda _: answer, GetAllocatableResources=lambda _: allocatable()):
            found = read_kubelet(rootfs)

    assert found == Scheduler(
        "kubelet",
        ("*",) if running else (),
        (Grant("pod", "ml/one", (MIG,)), Grant("pod", "ml/two", (MIG,)), Grant("pod", "ml/new", ("gpu-7",))),
    )
