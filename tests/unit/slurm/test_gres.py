"""Slurm's numbers of GPUs, from slurmd's own words and from gres.conf."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramledger.slurm.names import devices_of, parse_capabilities, parse_gres

MIG_MINORS = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu1/gi2/access 30\n"

SLURMD_22 = """\
slurmd: Gres Name=shard Type=(null) Count=4 Index=2 ID=1918986455 File=/dev/nvidia2 (null)
slurmd: Gres Name=mps Type=(null) Count=0 Index=2 ID=7565421 File=/dev/nvidia2 (null)
slurmd: Gres Name=gpu Type=(null) Count=1 Index=2 ID=7696487 File=/dev/nvidia2 (null)
slurmd: Gres Name=gpu Type=h200 Count=1 Index=0 ID=7696487 File=/dev/nvidia0 (null)
"""
SLURMD_26 = """\
[2026-11-22T11:41:04.230] Node configuration differs from hardware: CPUs=16:2(hw)
[2026-11-22T11:41:04.230] Gres Name=gpu Type=(null) Count=1 Index=3 ID=7 File=/dev/nvidia3 Links=(null)
"""


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (SLURMD_22, ("nvidia2", "nvidia0")),
        (SLURMD_26, ("nvidia3",)),
        ("Name=gpu File=/dev/nvidia[0-1,3],/dev/nvidia10", ("nvidia0", "nvidia1", "nvidia3", "nvidia10")),
        ("AutoDetect=off\nname=GPU file=/dev/nvidia4 # the first\n#Name=gpu File=/dev/nvidia5", ("nvidia4",)),
        ("NodeName=a Name=gpu File=/dev/nvidia0\nNodeName=b Name=gpu File=/dev/nvidia0", ("nvidia0",)),
        (
            "Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap12,/dev/nvidia-caps/nvidia-cap13",
            ("nvidia0/gi1/ci0",),
        ),
        ("Name=gpu MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap30", ("nvidia1/gi2",)),
        ("Name=gpu MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap99", None),
        ("NodeName=a Name=gpu File=/dev/nvidia0\nNodeName=b Name=gpu File=/dev/nvidia1", None),
        ("NodeName=a Name=gpu File=/dev/nvidia0\nName=gpu File=/dev/nvidia0", None),
        ("AutoDetect=nvml", None),
        ("AutoDetect=nvml\nName=gpu Type=h200 File=/dev/nvidia0", None),
        ("Include other.conf\nName=gpu File=/dev/nvidia0", None),
        ("Name=gpu Count=4", None),
        ("Name=gpu Count=4 File=(null)", None),
        ("Name=gpu File=/dev/nvidia[0-999999999]", None),
        ("", None),
    ],
)
def test_the_devices_of_slurms_numbers(text: str, devices: tuple[str, ...] | None) -> None:
    """The order of the lines is the order of the numbers; what the text does not say is not guessed."""
    assert parse_gres(text, parse_capabilities(MIG_MINORS)) == devices


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("0", ("nvidia2",)),
        ("1,0", ("nvidia3", "nvidia2")),
        ("0-1", ("nvidia2", "nvidia3")),
        ("GPU-1-2,MIG-3", ("GPU-1-2", "MIG-3")),
        ("2", None),
        ("1-0", None),
        ("0,", None),
        ("٣", None),
        ("", None),
    ],
)
def test_the_devices_of_a_job(written: str, devices: tuple[str, ...] | None) -> None:
    """If one number of a job is not known, its devices are not known."""
    assert devices_of(written, ("nvidia2", "nvidia3")) == devices


@given(st.text(alphabet="Namegpu File=/dev/nvidia[0123456789-,]\n#()", max_size=300))
def test_any_text_gives_devices_or_none(text: str) -> None:
    """Whatever is in the file, a result has device names only, and not more than a node can have."""
    found = parse_gres(text)
    assert found is None or 0 < len(found) <= 1024
