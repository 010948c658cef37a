"""Find in a stack the line that the user can change, and the part of the training that allocated.

PyTorch's stacks start innermost. The first lines belong to the framework; the user's are somewhere above
them. The innermost frame of PyTorch's own code tells the part: an optimizer may call the model in a closure,
and a backward pass may run a part of the forward pass again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vramledger_agent.protocol.user_code import FRAMEWORK, code_origin, is_native

PARAMETERS = "parameters: the model is made, loaded or moved"
FORWARD = "forward pass"
BACKWARD = "backward pass"
OPTIMIZER = "optimizer"
OTHER = "other code"
UNRECORDED = "before the recording"

CATEGORIES = (PARAMETERS, OPTIMIZER, BACKWARD, FORWARD, OTHER, UNRECORDED)
"""From the longest life to the shortest; what no frame explains comes last."""

_MAKES_MODEL = frozenset(
    ("__init__", "_apply", "reset_parameters", "to_empty", "load_state_dict", "_load_from_state_dict")
)
_RUNS_BACKWARD = frozenset(("backward", "_make_grads", "_engine_run_backward", "unpack_hook", "recompute_fn"))


def category_of(stack: Stack) -> str:
    """Return what a whole stack, innermost frame first, was allocated by.

    Memory that the recording saw allocated without a frame of Python is the backward pass': its threads run
    no Python (2,769 allocations of a training on an H200: all 1,195 without a frame were gradients or
    temporary values of the backward pass). PyTorch's default is to record C++ frames as well; they are passed
    over.
    """
    if not stack:
        return UNRECORDED
    stack = without_native(stack)
    if not stack or stack == (NATIVE,):
        return BACKWARD
    called = ""
    for frame in stack:
        if found := _category_of_frame(frame, called):
            return found
        called = frame.name
    return OTHER


def without_native(stack: Stack) -> Stack:
    return tuple(frame for frame in stack if not is_native(frame.filename))


def _category_of_frame(frame: Frame, called: str) -> str | None:
    _, torch, place = frame.filename.rpartition("/torch/")
    found = None
    if not torch:
        return None
    if place.startswith("optim/"):
        found = OPTIMIZER
    elif place == "autograd/function.py":  # runs what the program's own class defines
        found = {"forward": FORWARD, "backward": BACKWARD}.get(called)
    elif frame.name in _RUNS_BACKWARD and not place.startswith("nn/"):
        found = BACKWARD
    elif place.startswith(("nn/init.py", "nn/parameter.py")) or (
        place.startswith("nn/modules/") and frame.name in _MAKES_MODEL
    ):
        found = PARAMETERS
    elif place.startswith("nn/functional.py") or (
        frame.name in ("forward", "_call_impl") and place.startswith(("nn/", "_functorch/"))
    ):
        found = FORWARD
    return found


class Frame(NamedTuple):
    filename: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.line} {self.name}" if self.name or self.line else self.filename


NATIVE = Frame("(C++ code that no Python line called, such as a backward pass)", 0, "")
"""The line of memory allocated outside of Python: the backward pass runs on threads without its frames."""


Stack = tuple[Frame, ...]


def user_frames(stack: Stack) -> Stack:
    """Return the user's frames, innermost first; without any, those of libraries, or else the framework's."""
    classified = [(code_origin(frame.filename), frame) for frame in stack]
    nearest = min((origin for origin, _ in classified), default=FRAMEWORK)
    return tuple(frame for origin, frame in classified if origin == nearest)


COMMON_SHARE = 0.9
"""Above one half, so that all frames that qualify lie on a common path."""


def common_frame(
    weighted: Iterable[tuple[Stack, int]], kept: Mapping[Frame, float] | None = None
) -> Frame | None:
    """Return the line through which :data:`COMMON_SHARE` of the bytes came, and which keeps most of them.

    A model's layer allocates for the training step, which frees its memory, and for the evaluation, which
    does not: the evaluation's line explains the leak. So of the lines on the common path we choose those that
    keep the largest part of what they allocate, and of those the innermost. ``kept``: by line, the part that
    was kept of all that came through it, 0 to 1; without it, the innermost line wins.
    """
    total = 0
    weights: dict[Frame, int] = {}
    depths: dict[Frame, int] = {}
    for stack, weight in weighted:
        total += weight
        for depth, frame in enumerate(reversed(stack)):
            depths[frame] = max(depths.get(frame, 0), depth)
        for frame in set(stack):
            weights[frame] = weights.get(frame, 0) + weight
    through = [frame for frame, weight in weights.items() if weight >= COMMON_SHARE * total > 0]
    known = kept or {}
    best = max((known.get(frame, 0.0) for frame in through), default=0.0)
    keepers = [frame for frame in through if known.get(frame, 0.0) >= _SIMILAR_SHARE * best]
    return max(keepers, key=lambda frame: depths[frame], default=None)


_SIMILAR_SHARE = 0.9
"""Lines that keep nearly the same part count as equal: one of them also allocated something small."""
