"""Run a function in a process of its own; when it ends, all the memory that it took is freed.

This is the one sure way to free GPU memory: frameworks keep pools, and TensorFlow and JAX free nothing while
their process lives. The child is forked from Python's fork server, a process that never saw a GPU, or it is
spawned. Both import the caller's main module as ``multiprocessing`` does, so a script needs the usual ``if
__name__ == "__main__":``. A pool keeps its children for a while, for programs that call often: the import of
TensorFlow takes seconds. Arguments and result are in anonymous memory, whose descriptor is passed. This
memory has no name and is freed with its last user. The child leads a session of its own, watches for the
parent's end, and ends with it and with all its own children.

A value is pickled, and its large arrays are stored behind it unchanged (pickle's protocol 5, out of band), so
that the other side maps them. Nothing that is on a GPU is passed: to unpickle it would allocate on that GPU.
Functions of a notebook are passed as code.
"""

from __future__ import annotations

import contextlib
import importlib
import marshal
import mmap
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import connection, reduction
from typing import Any, NoReturn, TypeVar

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
                raise pickle.PicklingError(
                    f"{obj.__qualname__} is a class of a notebook or an interactive session; define it in a"
                    " module, or install cloudpickle"
                )
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
        raise TypeError("an array on a GPU cannot leave its process; pass and return it in host memory")


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


_T = TypeVar("_T")
_STARTED = b"started"
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
    /,
    *arguments: object,
    timeout: float | None = None,
    method: str = "forkserver",
    **named: object,
) -> _T:
    """Return what a function returns, having run it in a process of its own.

    Args:
        function: of a module, a script or a notebook. Lambdas, closures and classes of a notebook need the
            package ``cloudpickle``, which is used where it is installed.
        arguments: for it; they and the result must be picklable. Arrays of NumPy are not copied twice. They
            must not contain arrays in GPU memory: use host memory.
        timeout: seconds after which the child is killed, with all processes that it has started.
        method: ``forkserver``, or ``spawn`` for a child that shares nothing with earlier ones.
        named: keyword arguments for the function.

    Raises:
        TimeoutError: it took longer than ``timeout``.
        IsolationError: the child died, or what it made cannot be passed back.
        Exception: what the function raised, with the child's traceback as its cause.
    """
    return IsolatedPool(idle_timeout=None, method=method).run(function, *arguments, timeout=timeout, **named)


async def isolated_async(
    function: Callable[..., _T],
    /,
    *arguments: object,
    timeout: float | None = None,
    method: str = "forkserver",
    **named: object,
) -> _T:
    """Await what :func:`isolated` returns; if the task is cancelled, the child is killed."""
    pool = IsolatedPool(idle_timeout=None, method=method)
    return await pool.run_async(function, *arguments, timeout=timeout, **named)


class IsolatedPool:
    """Processes that run functions as :func:`isolated` does, and stay for the next call.

    A process ends, and frees its GPU memory, when it has had no call for a while. Until then it keeps what
    its framework keeps. Calls from several threads run at the same time, each in a process of its own.
    """

    def __init__(self, *, idle_timeout: float | None = 30.0, method: str = "forkserver") -> None:
        """Make a pool without processes.

        Args:
            idle_timeout: seconds without a call after which a process ends; None ends it with its call.
            method: see :func:`isolated`.
        """
        self._idle_timeout = idle_timeout
        self._method = method
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def run(
        self,
        function: Callable[..., _T],
        /,
        *arguments: object,
        timeout: float | None = None,
        **named: object,
    ) -> _T:
        """Return what a function returns; arguments and errors are those of :func:`isolated`."""
        while True:
            with self._borrow_child() as (child, is_new):
                try:
                    result: _T = child.call(function, arguments, named, timeout)
                except _EndedBeforeError:  # its time had come just before the call
                    if is_new:
                        raise
                else:
                    return result

    async def run_async(
        self,
        function: Callable[..., _T],
        /,
        *arguments: object,
        timeout: float | None = None,
        **named: object,
    ) -> _T:
        """Await what :meth:`run` returns; if the task is cancelled, the process is killed."""
        while True:
            with self._borrow_child() as (child, is_new):
                try:
                    result: _T = await _call_in_thread(child, function, arguments, named, timeout)
                except _EndedBeforeError:
                    if is_new:
                        raise
                else:
                    return result

    def close(self) -> None:
        with self._lock:
            ended, self._idle = self._idle, []
        for child in ended:
            child.end()

    def __enter__(self) -> IsolatedPool:  # noqa: PYI034 Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _borrow_child(self) -> Iterator[tuple[_Child, bool]]:
        child, is_new = self._choose()
        try:
            yield child, is_new
        finally:
            if child.is_usable():
                with self._lock:
                    self._idle.append(child)
            else:
                child.end()

    def _choose(self) -> tuple[_Child, bool]:
        with self._lock:
            if self._pid != os.getpid():  # the parent's processes are not ours
                self._pid = os.getpid()
                self._idle = []
            while self._idle:
                child = self._idle.pop()
                if child.is_usable():
                    return child, False
                child.end()
        return _Child(self._method, self._idle_timeout), True


class _EndedBeforeError(IsolationError):
    """The process ended before it had begun with the call, which can be made again elsewhere."""


async def _call_in_thread(
    child: _Child,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
    named: dict[str, object],
    timeout: float | None,
) -> Any:  # noqa: ANN401 any result
    import asyncio

    try:
        return await asyncio.to_thread(child.call, function, arguments, named, timeout)
    except asyncio.CancelledError:
        child.kill()  # which ends the thread as well: it may not have sent the call yet
        raise


class _Child:
    def __init__(self, method: str, idle_timeout: float | None) -> None:
        context = multiprocessing.get_context(method)
        self._pipe, child_end = context.Pipe()
        self._usable = False
        self._keeps = idle_timeout is not None
        try:
            self._process = context.Process(  # type: ignore[attr-defined]
                target=_run_child, args=(child_end, idle_timeout), name="isolated"
            )
            _start(self._process)
        except BaseException:
            self._pipe.close()
            raise
        finally:
            child_end.close()  # so that the child's death is noticed here

    def call(
        self,
        function: Callable[..., Any],
        arguments: tuple[object, ...],
        named: dict[str, object],
        timeout: float | None,
    ) -> Any:  # noqa: ANN401 any result
        """Run one call in the child; after an error of the connection the child is not usable any more."""
        self._usable = False  # first: who cancels the call meanwhile must not give the child to another
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            packed_call = pack_value((function, arguments, named, dict(os.environ)))
        except BaseException:
            self._usable = self._keeps  # nothing was sent
            raise
        try:
            with contextlib.suppress(OSError):  # the child may have died: the code below finds out how
                reduction.send_handle(self._pipe, packed_call, self._process.pid)
        finally:
            os.close(packed_call)
        if self._receive(deadline, timeout) != _STARTED:
            self._process.join(_EXIT_TIMEOUT_SECONDS)
            raise _EndedBeforeError(_describe_exit(self._process.exitcode))
        kind = self._receive(deadline, timeout)
        try:
            descriptor = reduction.recv_handle(self._pipe) if kind else -1
        except (EOFError, OSError, RuntimeError) as error:  # the child died while sending its result
            if belongs_to_program(error):
                raise
            kind = b""
        if not kind:
            self._process.join(_EXIT_TIMEOUT_SECONDS)
            raise IsolationError(_describe_exit(self._process.exitcode))
        try:
            result = unpack_value(descriptor)
        except Exception as error:
            raise IsolationError(f"what the isolated function made cannot be read here: {error!r}") from error
        finally:
            os.close(descriptor)
            self._usable = self._keeps
            if not self._keeps:
                # The memory is freed once the process is gone; an error is raised only after that, too.
                self._process.join(_EXIT_TIMEOUT_SECONDS)
        if kind == b"returned":
            return result
        raised, text = result
        if not isinstance(raised, BaseException):
            raise IsolationError(raised) from ChildTraceback(text)
        raise raised from ChildTraceback(text)

    def _receive(self, deadline: float | None, timeout: float | None) -> bytes:
        """Return the child's next message, or an empty one if the child has ended."""
        seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not connection.wait([self._pipe, self._process.sentinel], seconds_left):
            self.kill()
            raise TimeoutError(
                f"the isolated function did not return within {timeout:g} s; its process was killed"
            )
        try:
            # The child sends the result before it ends, so a child that has ended may have left one.
            return self._pipe.recv_bytes() if self._pipe.poll() else b""
        except (EOFError, OSError) as error:
            if belongs_to_program(error):
                raise
            return b""

    def is_usable(self) -> bool:
        return self._usable and self._process.is_alive()

    def kill(self) -> None:
        self._usable = False
        if self._process.is_alive():
            _kill_with_descendants(self._process.pid)

    def end(self) -> None:
        self.kill()
        self._pipe.close()
        self._process.join()
        self._process.close()


def _start(child: Any) -> None:  # noqa: ANN401 a process of the context's own kind
    """Start a child, also in a daemonic process such as Celery's: ours ends with its parent by itself."""
    child.daemon = False  # its own function may use processes
    configuration = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemonic = configuration.pop("daemon", None)
    try:
        child.start()
    finally:
        if daemonic is not None:
            configuration["daemon"] = daemonic


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


def _run_child(pipe: Any, idle_timeout: float | None) -> None:  # noqa: ANN401 a multiprocessing connection
    """Run in the child: receive a call, run it, send its result or error; with a time-out, wait for more."""
    with contextlib.suppress(OSError):
        os.setsid()  # what it starts can be killed with it
    threading.Thread(target=_exit_with_parent, args=(pipe.fileno(),), daemon=True).start()
    while True:
        try:
            descriptor = reduction.recv_handle(pipe)
            pipe.send_bytes(_STARTED)
            _answer(pipe, descriptor)
        except (EOFError, OSError, RuntimeError):  # no caller waits any more
            break
        if idle_timeout is None or not pipe.poll(idle_timeout):
            break
    # Run no finalizers: a framework's finalizer may hang, and the process's end frees the memory anyway.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    _exit_with_descendants(0)


def _answer(pipe: Any, descriptor: int) -> None:  # noqa: ANN401 a multiprocessing connection
    try:
        function, arguments, named, environ = unpack_value(descriptor)
        os.close(descriptor)
        os.environ.update(environ)  # the fork server has the environment of its start
        for name in set(os.environ) - set(environ):
            del os.environ[name]
        packed = pack_value(function(*arguments, **named))
        kind = b"returned"
    except BaseException as error:
        kind, packed = b"raised", _pack_error(error)
    try:
        pipe.send_bytes(kind)
        reduction.send_handle(pipe, packed, os.getppid())
    finally:
        os.close(packed)


def _exit_with_parent(descriptor: int) -> NoReturn:
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    poll.poll()
    _exit_with_descendants(1)


def _exit_with_descendants(status: int) -> NoReturn:
    for each in _children(os.getpid()):
        _kill_with_descendants(each)
    os._exit(status)


def _kill_with_descendants(pid: int) -> None:
    """Kill a process and all that it has started; each is stopped first, so that it cannot start others."""
    found = [pid]
    for each in found:
        _send_signal(each, signal.SIGSTOP)
        found.extend(_children(each))
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    for each in reversed(found):
        _send_signal(each, signal.SIGKILL)


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # it has ended
        pass


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found.extend(int(word) for word in file.read().split())
        except (OSError, ValueError):
            continue
    return found


def _pack_error(error: BaseException) -> int:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    words = f"{type(error).__name__}: {error}"
    if not isinstance(error, Exception):  # a child that calls sys.exit() must not end us
        return pack_value((words, text))
    try:
        packed = pack_value((error, text))
        unpack_value(packed)  # some exceptions can be pickled but not unpickled
    except Exception:
        return pack_value((words, text))
    return packed
