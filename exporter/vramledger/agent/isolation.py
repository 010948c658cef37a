"""Run a function in a process of its own; when it ends, all the memory that it took is freed.

This is the one sure way to free GPU memory: frameworks keep pools, and TensorFlow and JAX free nothing while
their process lives. The child is forked from Python's fork server, a process that never saw a GPU, or it is
spawned. Both import the caller's main module as ``multiprocessing`` does, so a script needs the usual ``if
__name__ == "__main__":``.

Arguments and result travel through anonymous memory, whose descriptor is passed. Large arrays are stored
there unchanged (pickle's protocol 5, out of band) and are mapped, not copied, on the other side. The memory
has no name and vanishes with its last user. The child watches for the parent's end, and ends with it.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, reduction
from typing import Any, NoReturn, TypeVar

_T = TypeVar("_T")
_HEADER = struct.Struct("<QQ")
_ALIGNMENT_BYTES = 64
"""Arrays begin at multiples of this number of bytes, as their libraries prefer."""

_GPU_KINDS = (2, 10, 13)
"""DLPack's numbers for CUDA, ROCm, and CUDA's managed memory."""

_EXIT_TIMEOUT_SECONDS = 5.0
"""From the result to the child's end; only then is its memory freed."""


class IsolationError(RuntimeError):
    """The child ended without a result, or its result or error could not be passed back."""


class ChildTraceback(Exception):  # noqa: N818 it is the cause of an error, never raised itself
    """The traceback of an error in the child, as text: the cause of the same error here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def isolated(
    function: Callable[..., _T],
    *arguments: object,
    timeout: float | None = None,
    method: str = "forkserver",
    **named: object,
) -> _T:
    """Return what a function returns, having run it in a process of its own.

    Args:
        function: one that can be imported by name: defined in a module, not a lambda or a closure.
        arguments: for it; they and the result must be picklable. Arrays of NumPy are not copied twice.
            No array may be on a GPU: pass and return host memory.
        timeout: seconds after which the child is killed.
        method: ``forkserver``, or ``spawn`` for a child that shares nothing with its predecessors.
        named: further arguments for the function.

    Raises:
        TimeoutError: it took longer than ``timeout``.
        IsolationError: the child died, or what it made cannot be passed back.
        Exception: what the function raised, with the child's traceback as its cause.
    """
    context = multiprocessing.get_context(method)
    parent_end, child_end = context.Pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(parent_end.close)
        stack.callback(child_end.close)
        packed_call = _pack((function, arguments, named, dict(os.environ)))
        stack.callback(os.close, packed_call)
        child = context.Process(  # type: ignore[attr-defined]
            target=_run_child,
            args=(child_end,),
            name=f"isolated:{getattr(function, '__name__', 'function')}",
        )
        child.start()
        stack.callback(_kill_and_close, child)
        child_end.close()  # so that the child's death is noticed here
        deadline = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(OSError):  # the child may have died already: the code below finds out how
            reduction.send_handle(parent_end, packed_call, child.pid)
        result: _T = _receive_result(parent_end, child, deadline, timeout)
        return result


def _receive_result(parent_end: Any, child: Any, deadline: float | None, timeout: float | None) -> Any:  # noqa: ANN401 any result
    seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
    ready = connection.wait([parent_end, child.sentinel], seconds_left)
    if not ready:
        message = f"the isolated function did not return within {timeout:g} s; its process was killed"
        raise TimeoutError(message)
    try:
        # The child sends the result before it ends, so a child that has ended may have left one.
        kind = parent_end.recv_bytes() if parent_end.poll() else b""
        descriptor = reduction.recv_handle(parent_end) if kind else -1
    except (EOFError, OSError, RuntimeError):  # the child died while sending its result
        kind = b""
    if not kind:
        child.join(_EXIT_TIMEOUT_SECONDS)
        raise IsolationError(_describe_exit(child.exitcode))
    try:
        result = _unpack(descriptor)
    except Exception as error:
        message = f"what the isolated function made cannot be read here: {error!r}"
        raise IsolationError(message) from error
    finally:
        os.close(descriptor)
    # The memory is freed once the process is gone; an error is raised only after that, too.
    child.join(_EXIT_TIMEOUT_SECONDS)
    if kind == b"returned":
        return result
    raised, text = result
    if not isinstance(raised, BaseException):
        raise IsolationError(raised) from ChildTraceback(text)
    raise raised from ChildTraceback(text)


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (out of host memory, perhaps)" if name == "SIGKILL" else ""
        return f"the process of the isolated function was killed by {name}{hint}"
    if code is None:
        return "the process of the isolated function closed its connection"
    return (
        f"the process of the isolated function ended with status {code} before it returned; what it"
        " printed says why (a script needs 'if __name__ == \"__main__\":' around what it does)"
    )


def _kill_and_close(child: Any) -> None:  # noqa: ANN401 a process of the context's own kind
    """Kill the child if it still runs, and close it: its result has arrived, or no caller waits for it."""
    if child.is_alive():
        child.kill()
    child.join()
    child.close()


def _run_child(pipe: Any) -> None:  # noqa: ANN401 a multiprocessing connection
    """Run in the child: receive the call, run it, send its result or error."""
    descriptor = reduction.recv_handle(pipe)
    threading.Thread(target=_exit_with_parent, args=(pipe.fileno(),), daemon=True).start()
    try:
        function, arguments, named, environ = _unpack(descriptor)
        os.close(descriptor)
        os.environ.update(environ)  # the fork server has the environment of its start
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        packed = _pack(function(*arguments, **named))
        kind = b"returned"
    except BaseException as error:
        kind, packed = b"raised", _pack_error(error)
    with contextlib.suppress(OSError):  # no caller waits any more
        pipe.send_bytes(kind)
        reduction.send_handle(pipe, packed, os.getppid())
    # Run no finalizers: a framework's finalizer may hang, and the process's end frees the memory anyway.
    with contextlib.suppress(Exception):
        import sys

        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _exit_with_parent(descriptor: int) -> NoReturn:
    """End this process when its parent has gone."""
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    poll.poll()
    os._exit(1)


def _pack_error(error: BaseException) -> int:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    words = f"{type(error).__name__}: {error}"
    if not isinstance(error, Exception):  # a child that calls sys.exit() must not end us
        return _pack((words, text))
    try:
        packed = _pack((error, text))
        _unpack(packed)  # some exceptions can be pickled but not unpickled
    except Exception:
        return _pack((words, text))
    return packed


class _HostMemoryPickler(pickle.Pickler):
    """A pickler that refuses arrays on a GPU: unpickling them would allocate on that GPU here."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 pickle's own
        if _lives_on_gpu(obj):
            message = "an array on a GPU cannot leave its process; pass and return it in host memory"
            raise TypeError(message)
        return NotImplemented


def _lives_on_gpu(obj: object) -> bool:
    """Ask an array where it is, by DLPack's protocol, which the arrays of all frameworks support."""
    ask = getattr(type(obj), "__dlpack_device__", None)
    if ask is None:
        return False
    try:
        kind, _ = ask(obj)
    except Exception:  # an array without memory, like PyTorch's on the device "meta"
        return False
    return int(kind) in _GPU_KINDS


def _pack(value: object) -> int:
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
    _HostMemoryPickler(content, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    file.write(_HEADER.pack(content.tell(), len(sizes)))
    file.write(struct.pack(f"<{len(sizes)}Q", *sizes))
    file.write(content.getbuffer())
    for view in views:
        file.seek(-file.tell() % _ALIGNMENT_BYTES, os.SEEK_CUR)
        file.write(view)
    file.truncate(max(file.tell(), 1))


def _unpack(descriptor: int) -> Any:  # noqa: ANN401 any value
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
