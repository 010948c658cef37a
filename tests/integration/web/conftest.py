"""A web configuration file, and the certificate that it may name."""

from pathlib import Path

import pytest

from tests.support.certificates import Authority
from vramledger.web.access import access_control


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a web configuration file a hundred times a second."""
    monkeypatch.setattr(access_control, "_POLL_INTERVAL", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Name a web configuration file."""
    return tmp_path / "web.yml"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return an authority that has signed a server's certificate, ``server.pem`` beside the file."""
    made = Authority(tmp_path)
    made.sign("server")
    return made
