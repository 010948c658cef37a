"""The settings by which PyTorch's allocator works, and the host memory that it has pinned."""

import re

import pytest

from vramledger_agent.protocol.messages import ALLOCATOR_SETTINGS
from vramledger_agent.torch.allocator import read_pinned, read_settings

MIB = 2**20
DEFAULT = {"expandable_segments": "false", "garbage_collection_threshold": "off"}


@pytest.mark.parametrize(
    ("text", "stats", "expected"),
    [
        ("", None, DEFAULT),
        ("", {"max_split_size": -1}, {**DEFAULT, "max_split_size_mb": "unlimited"}),
        ("", {"max_split_size": 2**64 - 1}, {**DEFAULT, "max_split_size_mb": "unlimited"}),
        ("max_split_size_mb:64", {"max_split_size": 64 * MIB}, {**DEFAULT, "max_split_size_mb": "64"}),
        ("Expandable_Segments : TRUE", None, {**DEFAULT, "expandable_segments": "true"}),
        ("garbage_collection_threshold:0.8", None, {**DEFAULT, "garbage_collection_threshold": "0.8"}),
        ("garbage_collection_threshold:x", None, {"expandable_segments": "false"}),
        ("roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True", None,
         {**DEFAULT, "expandable_segments": "true"}),
        (None, None, {}),
        (None, {"max_split_size": "x"}, {}),
    ],
)  # fmt: skip
def test_settings_in_effect(
    text: str | None, stats: dict[str, object] | None, expected: dict[str, str]
) -> None:
    """What is not set has its default, what is not known is left out, and the counters win over the text."""
    found = read_settings(text, stats)
    assert found == expected
    assert all(re.fullmatch(ALLOCATOR_SETTINGS[name], value) for name, value in found.items())


@pytest.mark.parametrize(
    "stats",
    [None, {}, [], {"allocated_bytes": 3}, {"allocated_bytes": {"current": -1}}, {"active_bytes": {}}],
)
def test_pinned_memory_that_is_not_known_is_not_zero(stats: object) -> None:
    """Whatever another version returns, a value that is not there is left out."""
    assert read_pinned(stats) == {}


def test_pinned_memory_is_what_the_allocator_has() -> None:
    """Cached memory counts as pinned, and not as in use."""
    stats = {"allocated_bytes": {"current": 64 * MIB, "peak": 1}, "active_bytes": {"current": 16 * MIB}}
    assert read_pinned(stats) == {"pinned": 64 * MIB, "pinned_in_use": 16 * MIB}
