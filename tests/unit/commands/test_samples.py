"""How a command gets its samples: whom it waits for, and how often."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from vramledger import __version__, cli
from vramledger.accounting.tracker import HoldingTracker
from vramledger.commands import samples
from vramledger.commands.arguments import sampling_config
from vramledger.commands.samples import follow_exporter
from vramledger.config import SamplingConfig
from vramledger.errors import UsageError
from vramledger.serving.control_client import NoExporterError


def test_an_exporter_that_ends_before_a_sample_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter that starts and ends again and again keeps no command waiting."""
    asked = []

    async def request(path: Path, token: str | None, wait: float) -> tuple[object, bytes]:
        asked.append((token, wait))
        if len(asked) % 2 == 0:
            raise NoExporterError(str(path))
        return SimpleNamespace(program=__version__, token=str(len(asked)), wait=0.0, idle_after=600.0), b""

    blank = SimpleNamespace(snapshot=HoldingTracker(idle_after=600.0).blank, growth={})
    monkeypatch.setattr(samples, "request_snapshot", request)
    monkeypatch.setattr(samples, "read_answer", lambda _: blank)

    async def first() -> None:
        await anext(follow_exporter(Path("/control.sock")))

    with pytest.raises(NoExporterError):
        asyncio.run(asyncio.wait_for(first(), 60.0))
    assert len(asked) == 2


def config(*arguments: str) -> SamplingConfig:
    """Return what the sampler of a command gets."""
    return sampling_config(cli.parser().parse_args(arguments))


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ([], 5.0),
        (["--sample.interval=100ms"], 0.5),
        (["--sample.interval=2s"], 5.0),
        (["--sample.calm-interval=1s"], 1.0),
        (["--sample.interval=10s", "--sample.calm-interval=5s"], 5.0),
    ],
)
def test_an_exporter_samples_a_calm_host_each_fifth_time(flags: list[str], seconds: float) -> None:
    """Five intervals and five seconds at most, unless the flag says how many."""
    assert config("serve", *flags).calm_interval == pytest.approx(seconds)


@pytest.mark.parametrize("command", ["show", "check", "capture out"])
def test_a_command_takes_each_sample(command: str) -> None:
    """What a person or a recording waits for is never left out."""
    assert config(*command.split()).calm_interval == 0.0


def test_a_calm_exporter_is_not_silent_for_long() -> None:
    """Above five seconds nobody would know any more that it lives; the message names the other flag."""
    with pytest.raises(UsageError, match=r"at most 5s.*--sample\.interval"):
        config("serve", "--sample.calm-interval=6s")
