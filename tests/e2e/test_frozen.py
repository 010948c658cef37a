"""An exporter that is frozen is noticed by those who can restart it: systemd, Docker, Kubernetes."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.exporter import Exporter, serving
from tests.support.secured import USERS, write_config

HEALTHCHECK = Path(__file__).parents[2] / "deploy" / "docker" / "healthcheck.py"


def healthy(port: int) -> bool:
    """Return what the image's healthcheck says of an exporter on this port."""
    url = f"http://127.0.0.1:{port}"
    done = subprocess.run(
        [sys.executable, "-I", HEALTHCHECK], env={"VRAMLEDGER_URL": url}, check=False, capture_output=True
    )
    assert b"Traceback" not in done.stderr
    return done.returncode == 0


@pytest.fixture(params=["", "client_certificates", "passwords", "TLS"])
def exporter(request: pytest.FixtureRequest, nothing: dict[str, str], tmp_path: Path) -> Iterator[Exporter]:
    """Run an exporter without a GPU, open and closed."""
    text = USERS
    if request.param not in ("", "passwords"):
        authority = Authority(tmp_path)
        pair = authority.sign("server")
        text += f"tls_server_config:\n  cert_file: {pair.certificate}\n  key_file: {pair.key}\n"
        if request.param == "client_certificates":
            text += f"  client_ca_file: {authority.pair.certificate}\n"
            text += "  client_auth_type: RequireAndVerifyClientCert\n"
    write_config(tmp_path / "web.yml", text)
    with serving(
        *([f"--web.config.file={tmp_path}/web.yml"] if request.param else []), driver=nothing
    ) as running:
        yield running


@pytest.mark.repeats(kept=2)
def test_the_images_check_finds_a_frozen_exporter(exporter: Exporter) -> None:
    """An exporter that answers is healthy, also for a client that may not read it; a frozen one is not."""
    assert healthy(exporter.port)
    exporter.process.send_signal(signal.SIGSTOP)
    try:
        assert not healthy(exporter.port)
    finally:
        exporter.process.send_signal(signal.SIGCONT)
    assert healthy(exporter.port)


def test_nobody_is_not_healthy() -> None:
    """Where nobody listens the check fails."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert not healthy(port)


def test_systemd_is_told_that_it_runs(nothing: dict[str, str], tmp_path: Path) -> None:
    """Systemd is told when the exporter is ready, and from then on again and again that it runs."""
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(30)
        manager.bind(told["NOTIFY_SOCKET"])
        with serving(driver={**nothing, **told}):
            assert [manager.recv(100) for _ in range(4)] == [b"READY=1", *[b"WATCHDOG=1"] * 3]
