"""The commit that was installed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import vramledger
from vramledger.metrics.sampling import revision


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The installer's record beside a package in another place; nothing is cached before or after."""
    monkeypatch.setattr(vramledger, "__file__", str(tmp_path / "vramledger" / "__init__.py"))
    beside = tmp_path / f"vramledger-{vramledger.__version__}.dist-info"
    beside.mkdir()
    revision.cache_clear()
    yield beside / "direct_url.json"
    revision.cache_clear()


def test_the_commit_is_the_installers(record: Path) -> None:
    """Installed from a repository, the exporter reports the commit."""
    vcs = {"vcs": "git", "commit_id": "9b175d3aa0", "requested_revision": "main"}
    record.write_text(json.dumps({"url": "https://example.org/vramledger.git", "vcs_info": vcs}))
    assert revision() == "9b175d3aa0"


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"vcs_info": []}', '{"dir_info": {"editable": true}}']
)
def test_without_a_record_there_is_no_commit(record: Path, text: str | None) -> None:
    """From a folder, an index or an invalid file there is no commit, and no error."""
    if text is not None:
        record.write_text(text)
    assert revision() == ""
