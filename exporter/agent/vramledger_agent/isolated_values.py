"""Pass values between a program and its isolated child, through anonymous memory.

A value is pickled, and its large arrays are stored behind it unchanged (pickle's protocol 5, out of band), so
that the other side maps them. Nothing that is on a GPU is passed: to unpickle it would allocate on that GPU.
Functions of a notebook are passed as code.
"""

from __future__ import annotations

import importlib
import marshal
import mmap
import os
import pickle
import struct
import sys
import types
from typing import Any

from vramledger_agent.program_errors import belongs_to_program

_HEADER = struct.Struct("<QQ")
_ALIGNMENT_BYTES = 64
"""Arrays begin at multiples of this number of bytes, as their libraries prefer."""

_GPU_KINDS = (2, 10, 13)
"""DLPack's numbers for CUDA, ROCm, and CUDA's managed memory."""


class _HostMemoryPickler(pickle.Pickler):
    """A pickler that refuses what lives on a GPU, and passes the code of a notebook's functions."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 pickle's own
        _refuse_gpu(obj)
        if _is_of_notebook(obj):
            if isinstance(obj, types.FunctionType):
                return _reduce_function(obj)
            if isinstance(obj, type):
                message = (
                    f"{obj.__qualname__} is a class of a notebook or an interactive session; define it in a"
                    " module, or install cloudpickle"
                )
                raise pickle.PicklingError(message)
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        return NotImplemented


def _make_pickler(content: Any, buffers: list[pickle.PickleBuffer]) -> pickle.Pickler:  # noqa: ANN401 a file
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return _HostMemoryPickler(content, protocol=5, buffer_callback=buffers.append)

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 pickle's own
            _refuse_gpu(obj)
            return super().reducer_override(obj)

    pickler: pickle.Pickler = CloudPickler(content, protocol=5, buffer_callback=buffers.append)
    return pickler


def _refuse_gpu(obj: object) -> None:
    if _lives_on_gpu(obj):
        message = "an array on a GPU cannot leave its process; pass and return it in host memory"
        raise TypeError(message)


def _is_of_notebook(obj: object) -> bool:
    """Return whether an object is defined in a main module that has no file: the child cannot import it."""
    if getattr(obj, "__module__", None) != "__main__":
        return False
    main = sys.modules["__main__"]
    return getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None


def _reduce_function(function: types.FunctionType) -> Any:  # noqa: ANN401 pickle's own
    """Reduce a function to its code and what it uses of its module, which comes later and may refer to it."""
    names = _global_names(function.__code__)
    content = (
        {name: value for name, value in function.__globals__.items() if name in names},
        function.__defaults__,
        function.__kwdefaults__,
        [cell.cell_contents for cell in function.__closure__ or ()],
    )
    code = marshal.dumps(function.__code__)  # both sides are the same Python
    return _make_function, (code, function.__name__), content, None, None, _fill_function


def _global_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _make_function(code: bytes, name: str) -> types.FunctionType:
    loaded = marshal.loads(code)  # noqa: S302 our parent's, or our child's
    closure = tuple(types.CellType() for _ in loaded.co_freevars)
    return types.FunctionType(loaded, vars(sys.modules["__main__"]), name, None, closure)


def _fill_function(function: types.FunctionType, content: Any) -> None:  # noqa: ANN401 see _reduce_function
    names, function.__defaults__, function.__kwdefaults__, cells = content
    function.__globals__.update(names)
    for cell, value in zip(function.__closure__ or (), cells, strict=True):
        cell.cell_contents = value


def _lives_on_gpu(obj: object) -> bool:
    """Ask an array where it is, by DLPack's protocol, which the arrays of all frameworks support."""
    ask = getattr(type(obj), "__dlpack_device__", None)
    if ask is None:
        return False
    try:
        kind, _ = ask(obj)
    except Exception as error:  # an array without memory, like PyTorch's on the device "meta"
        if belongs_to_program(error):
            raise
        return False
    return int(kind) in _GPU_KINDS


def pack_value(value: object) -> int:
    """Write a value into anonymous memory; return the descriptor of that memory."""
    buffers: list[pickle.PickleBuffer] = []
    descriptor = os.memfd_create("vramledger-isolated", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:  # a descriptor, which has no path
            _write_packed(file, value, buffers)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write_packed(file: Any, value: object, buffers: list[pickle.PickleBuffer]) -> None:  # noqa: ANN401
    import io

    content = io.BytesIO()
    _make_pickler(content, buffers).dump(value)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    file.write(_HEADER.pack(content.tell(), len(sizes)))
    file.write(struct.pack(f"<{len(sizes)}Q", *sizes))
    file.write(content.getbuffer())
    for view in views:
        file.seek(-file.tell() % _ALIGNMENT_BYTES, os.SEEK_CUR)
        file.write(view)
    file.truncate(max(file.tell(), 1))


def unpack_value(descriptor: int) -> Any:  # noqa: ANN401 any value
    """Return the value; its large parts stay mapped, private to us and writable."""
    mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    view = memoryview(mapped)
    length, count = _HEADER.unpack_from(view)
    sizes = struct.unpack_from(f"<{count}Q", view, _HEADER.size)
    at = _HEADER.size + 8 * count
    content = view[at : at + length]
    at += length
    buffers = []
    for size in sizes:
        at += -at % _ALIGNMENT_BYTES
        buffers.append(view[at : at + size])
        at += size
    return pickle.loads(content, buffers=buffers)  # noqa: S301 our own child's, or our parent's
