"""How long a calm exporter may go without a sample: five intervals, or what is asked for."""

import pytest

from vramledger import cli
from vramledger.commands.arguments import sampling_config
from vramledger.config import SamplingConfig
from vramledger.errors import UsageError


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


@pytest.mark.parametrize("command", ["show", "check", "capture"])
def test_a_command_takes_each_sample(command: str) -> None:
    """What a person or a recording waits for is never left out."""
    arguments = ["capture", "out"] if command == "capture" else [command]
    assert config(*arguments).calm_interval == 0.0


def test_a_calm_exporter_is_not_silent_for_long() -> None:
    """Above five seconds nobody would know any more that it lives; the message names the other flag."""
    with pytest.raises(UsageError, match=r"at most 5s.*--sample\.interval"):
        config("serve", "--sample.calm-interval=6s")
