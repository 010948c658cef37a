"""Labels of pods from a kubelet and from an API server, over TLS."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority, Pair
from tests.support.kubernetes_api import write_account
from tests.support.pod_lists import PodServer, listed_pod, pod_list, serve_pods
from tests.support.waiting import wait_until
from vramledger.config import ListenAddress, PodConfig
from vramledger.kubernetes import api_client
from vramledger.kubernetes.api_client import ClusterError
from vramledger.kubernetes.pods import PodApi, parse_pods

LABELS = ("app.kubernetes.io/name", "team")
TRAIN = listed_pod("train-0", {"team": "vision", "app.kubernetes.io/name": "train", "secret": "x"})
TRAINED = {("ml", "train-0"): {"team": "vision", "app.kubernetes.io/name": "train"}}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Make the cluster's authority."""
    return Authority(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    """Make the certificate of a server of the cluster."""
    return authority.sign("server")


@pytest.fixture
def account(authority: Authority, tmp_path: Path) -> Path:
    """Make the files of a service account."""
    return write_account(tmp_path / "account", authority.pair)


@pytest.fixture
def server(pair: Pair) -> Iterator[PodServer]:
    """Serve one pod that trains."""
    with serve_pods(pair, TRAIN) as found:
        yield found


def api(account: Path, *, kubelet: int | None = None, server: int | None = None) -> PodApi:
    """Return both sources, each on a port of loopback or not there."""
    address = None if kubelet is None else ListenAddress("127.0.0.1", kubelet)
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server)}
    return PodApi(PodConfig(LABELS, "gpu-7", address, account), environ if server is not None else {})


def test_the_kubelet_tells_its_pods(server: PodServer, account: Path) -> None:
    """The kubelet is asked once, and only the labels on the allow-list are taken, none from specs."""
    assert api(account, kubelet=server.port, server=1).read() == TRAINED
    assert [path for path, _ in server.asked] == ["/pods"]


def test_the_api_server_tells_the_metadata_of_the_nodes_pods(server: PodServer, account: Path) -> None:
    """The API server is asked for the metadata of this node's pods alone, out of its memory."""
    assert api(account, server=server.port).read() == TRAINED
    ((path, accept),) = server.asked
    assert path == "/api/v1/pods?fieldSelector=spec.nodeName%3Dgpu-7&resourceVersion=0"
    assert accept.startswith("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")


@pytest.mark.parametrize(
    ("status", "body"),
    [(403, b"Forbidden (user=x, verb=get, resource=nodes)"), (200, b"<html>"), (200, b"[]"), (200, b"{}")],
)
def test_a_kubelet_refuses(server: PodServer, pair: Pair, account: Path, status: int, body: bytes) -> None:
    """A kubelet that refuses, or answers something else, leads to the API server."""
    with serve_pods(pair) as kubelet:
        kubelet.status, kubelet.body = status, body
        assert api(account, kubelet=kubelet.port, server=server.port).read() == TRAINED
        assert len(kubelet.asked) == 1


def test_a_stranger_gets_no_token(account: Path, server: PodServer, tmp_path: Path) -> None:
    """A server whose certificate the cluster's authority has not signed gets no request, so no token."""
    stranger = Authority(tmp_path, "stranger").sign("stranger-server")
    with serve_pods(stranger, listed_pod("train-0", {"team": "evil"})) as kubelet:
        assert api(account, kubelet=kubelet.port, server=server.port).read() == TRAINED
        assert kubelet.asked == []


def test_nobody_tells(pair: Pair, account: Path) -> None:
    """The error names each source and what it said."""
    with serve_pods(pair) as kubelet, serve_pods(pair) as server:
        kubelet.status = server.status = 403
        kubelet.body = server.body = b"  not\n you " + b"x" * 5000
        with pytest.raises(ClusterError) as raised:
            api(account, kubelet=kubelet.port, server=server.port).read()
    message = str(raised.value)
    assert f"the kubelet at 127.0.0.1:{kubelet.port}: 403 not you xxx" in message
    assert f"the API server at 127.0.0.1:{server.port}: 403" in message
    assert len(message) < 800


def test_without_a_token_nobody_is_asked(server: PodServer, tmp_path: Path) -> None:
    """Without the files of a service account there is an error, and no request."""
    with pytest.raises(ClusterError, match="No such file"):
        api(tmp_path / "none", kubelet=server.port).read()
    with pytest.raises(ClusterError, match="KUBERNETES_SERVICE_HOST"):
        api(tmp_path / "none").read()
    assert server.asked == []


def test_an_endless_answer_is_unread(
    server: PodServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer above the limit is an error and not the first part of a list."""
    monkeypatch.setattr(api_client, "MAX_BYTES", len(server.body) - 1)
    with pytest.raises(ClusterError, match="longer than"):
        api(account, server=server.port).read()
    monkeypatch.setattr(api_client, "MAX_BYTES", len(server.body))
    assert api(account, server=server.port).read() == TRAINED


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [(HEAD + b"A: ", b"x"), (HEAD + b"\r\n", b"x"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
)
def test_an_answer_in_drops_ends_in_time(
    server: PodServer, account: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes, piece: bytes
) -> None:
    """Who sends a little at a time, for ever, is given up at one moment; the connection is closed."""
    monkeypatch.setattr(api_client, "LONGEST", 0.5)
    server.begin, server.piece = begin, piece
    with pytest.raises(ClusterError, match=r"takes too long|timed out"):
        api(account, server=server.port).read()
    wait_until(lambda: not server.piece, "the end of the connection")


def test_the_newest_token_is_used(server: PodServer, account: Path) -> None:
    """The token is read for each request, because the kubelet renews it."""
    source = api(account, server=server.port)
    good = (account / "token").read_text(encoding="ascii")
    (account / "token").write_text("expired", encoding="ascii")
    with pytest.raises(ClusterError, match="401"):
        source.read()
    (account / "token").write_text(good + "\n", encoding="ascii")
    assert source.read() == TRAINED


def parsed(*pods: Any) -> Any:  # noqa: ANN401 also what is not a pod
    """Read a list of pods."""
    return parse_pods(pod_list(*pods), frozenset({"team", "metadata", "name"}))


OLD, NEW = (
    listed_pod("web-0", {"team": team}, made=f"2026-01-01T00:00:0{second}Z")
    for second, team in ((0, "old"), (9, "new"))
)
READ = {
    "a pod without any label has none": ([listed_pod("a"), listed_pod("b", {})], {"a": {}, "b": {}}),
    "an empty list is a list": ([], {}),
    "a label is called like a field": (
        [listed_pod("a", {"metadata": "m", "name": "n", "items": ""})], {"a": {"metadata": "m", "name": "n"}},
    ),
    "of two pods with one name the newer counts": ([OLD, NEW], {"web-0": {"team": "new"}}),
    "in any order": ([NEW, OLD], {"web-0": {"team": "new"}}),
}  # fmt: skip


@pytest.mark.parametrize(("pods", "known"), READ.values(), ids=READ)
def test_labels_of_a_list(pods: list[object], known: dict[str, dict[str, str]]) -> None:
    """The list gives the wanted labels of each pod."""
    assert parsed(*pods) == {("ml", name): labels for name, labels in known.items()}
    assert parse_pods(b'{"kind":"PodList","items":null}', frozenset()) == {}


NO_PODS: list[object] = [7, None, "pod", [], {"metadata": None}, {"metadata": []}, {"items": {}}]


@pytest.mark.parametrize("odd", [*NO_PODS, listed_pod("train-0", {"team": 7})])
def test_an_odd_pod_hides_no_other(odd: object) -> None:
    """What is not a pod, or not a label, is left out, and the others are read."""
    found = parsed(odd, listed_pod("b", {"team": "vision"}))
    assert found.pop(("ml", "b")) == {"team": "vision"}
    assert all(labels == {} for labels in found.values())


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 100_000, b'"items"', b'{"items": "pods"}', b"7"])
def test_what_is_no_list_is_an_error(body: bytes) -> None:
    """An answer that is not a list of pods is never an empty list."""
    with pytest.raises(ClusterError):
        parse_pods(body, frozenset({"team"}))
