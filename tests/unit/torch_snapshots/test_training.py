"""What the agent adds to a snapshot is shown as it is, or refused in one line."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sure import sure
from tests.support.torch_snapshots import MIB, training
from tests.support.wrong_values import WRONG_PICKLED, places, with_value
from vramledger_agent.errors import SnapshotError
from vramledger_agent.torch_snapshots.snapshot import parse_snapshot
from vramledger_agent.torch_snapshots.text import snapshot_text, training_text

CATEGORIES = {"parameters": 2 * MIB, "gradients": 3 * MIB, "optimizer": 0, "activations": 4 * MIB}
PEAK = {"bytes": 9 * MIB, "categories": CATEGORIES}
STEP = {
    "whole": True, "finished": True, "batch": 64,
    "phases": {"forward": PEAK, "backward": PEAK, "optimizer": PEAK}, "gradients_before_backward": 3 * MIB,
}  # fmt: skip
FRAME = {"filename": "/home/ann/train.py", "line": 7, "name": "build"}
MAKER = {"type": "function", "file": "/home/ann/train.py", "line": 9, "function": "<lambda>"}
CYCLE = {"bytes": 5 * MIB, "cycles": 2, "count": 3, "objects": [MAKER]}
ADDED: dict[str, Any] = {
    "version": 1,
    "from_start": False,
    "devices": {0: {"steps": [STEP], "types": {"parameters": {"float32": 2 * MIB}}}},
    "forward_types": {"bfloat16": 3, "float32": 1},
    "garbage": {"blocks": [{"device": 0, "size": 5 * MIB, "frames": [FRAME]}], "cycles": [CYCLE]},
}


def shown(added: object) -> str:
    """Return everything that the command shows of a snapshot with this addition."""
    snapshot = parse_snapshot({**training(1), "vramledger": added})
    return snapshot_text(snapshot) + training_text(sure(snapshot.training))


def test_everything_is_shown() -> None:
    """Peaks, categories, kept gradients, types, garbage and cycles are in the text."""
    text = shown(ADDED)
    assert "0       9.0 MiB       9.0 MiB       9.0 MiB  batch 64" in text
    assert "gradients       3.0 MiB       3.0 MiB       3.0 MiB" in text
    assert "3.0 MiB of gradients existed before the backward pass: zero_grad() is missing" in text
    assert "75% bfloat16, 25% float32" in text
    assert "5.0 MiB        1  /home/ann/train.py:7 build" in text
    assert "5.0 MiB of tensors in 2 cycles of 3 objects, made by" in text
    assert "function: /home/ann/train.py:9 <lambda>" in text


def test_a_part_that_is_not_known_is_not_zero() -> None:
    """A part of a step without a peak, a batch that is not known and an unfinished step are shown as such."""
    step = {
        **STEP, "batch": None, "whole": False, "phases": {"forward": PEAK}, "gradients_before_backward": None,
    }  # fmt: skip
    text = shown({**ADDED, "devices": {0: {"steps": [step, {**step, "finished": False}], "types": {}}}})
    assert "-1       9.0 MiB             -             -  (its beginning was not recorded)" in text
    assert "unfinished       9.0 MiB             -             -" in text
    assert "zero_grad" not in text
    assert "batch" not in text


def test_a_category_that_is_not_known_is_not_zero() -> None:
    """A peak without categories has none in the text, and one that lacks some of them shows no zero."""
    none = {**PEAK, "categories": {}}
    some = {**PEAK, "categories": {"parameters": 2 * MIB}}
    step = {**STEP, "gradients_before_backward": None}
    unknown = {**step, "phases": {"forward": none, "backward": none}}
    partly = {**step, "phases": {"forward": some, "backward": none}}
    text = shown({**ADDED, "devices": {0: {"steps": [unknown], "types": {}}}})
    assert "what these peaks were for is not known" in text
    assert "activations" not in text
    text = shown({**ADDED, "devices": {0: {"steps": [partly], "types": {}}}})
    assert " parameters       2.0 MiB             -             -" in text
    assert "activations             -             -             -" in text


def test_a_recording_from_the_start_has_nothing_older() -> None:
    """What has no line in such a recording was allocated by C++ code, however old it is."""
    assert "before the recording" in shown(ADDED)
    assert "before the recording" not in shown({**ADDED, "from_start": True})


@given(place=st.sampled_from(sorted(places(ADDED), key=str)), value=st.sampled_from(WRONG_PICKLED))
def test_any_value_may_be_wrong(place: tuple[Any, ...], value: object) -> None:
    """With any wrong value the addition is shown without control characters, or refused in one line."""
    refused, text = "", ""
    try:
        text = shown(with_value(ADDED, place, value))
    except SnapshotError as error:
        refused = str(error)
    assert bool(refused) != bool(text)
    assert "\x1b" not in refused + text
    assert "\n" not in refused


@pytest.mark.parametrize("added", [None, 3, [], "x"])
def test_another_addition_is_refused(added: object) -> None:
    """A value that our agent never writes there is refused, and the error names the place."""
    with pytest.raises(SnapshotError, match="vramledger"):
        shown(added)
