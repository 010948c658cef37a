"""Say who wrote a line of code, and in which part of a training step it ran, from the frames of its stack.

A frame is a file and a function; the frames of a stack begin with the innermost one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

OWN, LIBRARY, FRAMEWORK = 0, 1, 2
"""The authors of a line; the one that is most useful to name has the lowest number."""

PHASES = ("forward", "backward", "optimizer")
_PACKAGE_DIRECTORIES = ("/site-packages/", "/dist-packages/")
_FRAMEWORK_PACKAGES = frozenset(
    "torch torchvision torchaudio functorch triton accelerate deepspeed"
    " tensorflow keras tf_keras jax jaxlib flax optax cupy cupyx rmm".split()
)
_FRAMEWORK_PARTS = ("nn", "autograd", "optim", "utils", "cuda", "fx")
_NATIVE_SUFFIXES = tuple(".cpp .cc .cxx .cu .cuh .c .h .hpp .hxx .inl .tcc .S .s .pyx .rs .so".split())
_NATIVE_PARTS = (".so.", "/include/c++/")
"""Libraries with a version in their name, and the headers of the C++ library that have no suffix."""
_GENERATED = ("<eval_with_key", "<frozen ", "<__array_function__", "<torch_package")
_LIBRARY_DIRECTORIES = ("/lib/python3", "/lib64/python3")

_OPTIMIZER_CALLS = (
    # What changes gradients before the optimizer's step belongs to it; a scaler also multiplies the loss.
    ("/torch/optim/", ()),
    ("/torch/nn/utils/clip_grad.py", ()),
    ("/amp/grad_scaler.py", ("unscale_", "step", "update")),
)
"""Parts of files, with the functions that count; without any, all count."""

BACKWARD_CALL = "_engine_run_backward"
"""The function of PyTorch in which a thread waits for the backward pass that it has started."""


def code_origin(filename: str) -> int:
    """Classify a file by its author: C++ and generated code belong to the framework."""
    if is_native(filename) or filename.startswith(_GENERATED) or _is_of_framework(filename):
        return FRAMEWORK
    in_library = any(part in filename for part in (*_PACKAGE_DIRECTORIES, *_LIBRARY_DIRECTORIES))
    return LIBRARY if in_library else OWN


def is_native(filename: str) -> bool:
    """Return whether a frame is of compiled code; one without a known file has the name ``??``, or none."""
    if not filename or filename.endswith("??") or filename.endswith(_NATIVE_SUFFIXES):
        return True
    return any(part in filename for part in _NATIVE_PARTS)


def _is_of_framework(filename: str) -> bool:
    for directory in _PACKAGE_DIRECTORIES:
        package, slash, _ = filename.rpartition(directory)[2].partition("/")
        if directory in filename and slash and package in _FRAMEWORK_PACKAGES:
            return True
    part = filename.rpartition("/torch/")[2].partition("/")[0] if "/torch/" in filename else ""
    inner = "/" in filename.rpartition("/torch/")[2]
    return "/torchinductor_" in filename or (inner and (part in _FRAMEWORK_PARTS or part[:1] == "_"))


def phase_of(frames: Sequence[tuple[str, str]]) -> str:
    """Return the part of a training step in which a stack runs, given its files and functions.

    PyTorch runs the backward pass on threads of its own. There a stack is empty, or its outermost frame
    belongs to PyTorch (a compiled function, a checkpoint that computes again, an autograd function). Other
    threads begin in the program, in Python's own modules or in what started the program. A program may record
    C++ frames too, which every thread has: they say nothing here.
    """
    frames = [frame for frame in frames if not is_native(frame[0])]
    if not frames or _is_of_framework(frames[-1][0]):
        return "backward"
    if any(function == BACKWARD_CALL for _, function in frames):
        return "backward"
    return "optimizer" if any(map(_is_optimizer_call, frames)) else "forward"


def _is_optimizer_call(frame: tuple[str, str]) -> bool:
    file, function = frame
    return any(part in file and (not names or function in names) for part, names in _OPTIMIZER_CALLS)
