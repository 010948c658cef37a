"""Take GPU memory and work on it: by the CUDA driver, by torch, or, in a rehearsal, simulated.

The CUDA driver is called with ctypes, so that a holder starts in half a second and holds only its context and
the requested bytes. In a rehearsal (``VRAMLEDGER_REHEARSAL`` names a directory) a holder writes down what it
would hold, and the rehearsal sets it on a stand-in driver.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any, Protocol

GIB = 2**30
CONTEXT = 518 * 2**20
"""What a bare CUDA context holds on an H200, for the rehearsal."""

_SPIN = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .u64 %begin, %now, %limit;
    .reg .pred %go;
    ld.param.u64 %limit, [cycles];
    mov.u64 %begin, %clock64;
LOOP:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %go, %now, %limit;
    @%go bra LOOP;
    ret;
}
\0"""


class Gpu(Protocol):
    """One device, as a program uses it."""

    def hold(self, size: int) -> None:
        """Take ``size`` bytes more."""

    def drop(self) -> None:
        """Free the last allocation."""

    def work(self, seconds: float) -> None:
        """Keep the device busy for about that long."""


def rehearsing() -> Path | None:
    """Return the directory of the rehearsal, None on a real GPU."""
    directory = os.environ.get("VRAMLEDGER_REHEARSAL")
    return Path(directory) if directory else None


def open_gpu(device: int = 0, framework: str = "cuda") -> Gpu:
    """Make a context on a device, with ``cuda`` (the driver itself) or ``torch``."""
    if rehearsing() is not None:
        return Pretend(device, framework=framework)
    return Torch(device) if framework == "torch" else Cuda(device)


class Cuda:
    """A primary context and plain allocations, by the CUDA driver's own calls."""

    def __init__(self, device: int) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._blocks: list[ctypes.c_uint64] = []
        self._kernel = ctypes.c_void_p()
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)

    def hold(self, size: int) -> None:
        """Take memory with cuMemAlloc."""
        self._take("cuMemAlloc_v2", size)

    def hold_managed(self, size: int, resident: int | None = None, host: int = 0) -> None:
        """Take managed memory and touch ``resident`` bytes of it on the device, all unless told otherwise.

        That brings them there; ``host`` bytes at its end are touched on the host.
        """
        self._take("cuMemAllocManaged", size, 1)  # CU_MEM_ATTACH_GLOBAL
        if resident := size if resident is None else resident:
            self._call("cuMemsetD8_v2", self._blocks[-1], 1, ctypes.c_size_t(resident))
        self._call("cuCtxSynchronize")
        ctypes.memset(self._blocks[-1].value + size - host, 1, host)

    def total(self) -> int:
        """Return the bytes of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value

    def drop(self) -> None:
        """Free the last allocation."""
        self._call("cuMemFree_v2", self._blocks.pop())

    def work(self, seconds: float) -> None:
        """Launch a kernel that spins on every multiprocessor."""
        if self._kernel.value is None:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), _SPIN)
            self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")
        # Arguments on the stack must be pointers where pointers are expected: ctypes does not widen an int
        # there. about 10 ms
        cycles = ctypes.c_uint64(20_000_000)  # about 10 ms
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(cycles), ctypes.c_void_p))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(3):
                self._call("cuLaunchKernel", self._kernel, 264, 1, 1, 128, 1, 1, 0, None, arguments, None)
            self._call("cuCtxSynchronize")

    def share(self) -> str:
        """Return an IPC handle of the last allocation, as text."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._blocks[-1])
        return bytes(handle).hex()

    def open_shared(self, text: str) -> None:
        """Map another process's shared memory."""
        address = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(bytes.fromhex(text))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, 1)  # LAZY_ENABLE_PEER_ACCESS

    def _take(self, name: str, size: int, *flags: int) -> None:
        address = ctypes.c_uint64()
        self._call(name, ctypes.byref(address), ctypes.c_size_t(size), *flags)
        self._blocks.append(address)

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401
        code = getattr(self._lib, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            message = f"{name}: {(text.value or b'?').decode()} ({code})"
            raise RuntimeError(message)


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class Torch:
    """torch's caching allocator, and matrix products for work."""

    def __init__(self, device: int) -> None:
        self._torch: Any = importlib.import_module("torch")  # takes seconds, and is not everywhere
        self._device = f"cuda:{device}"
        self._blocks: list[Any] = []
        self._matrix: Any = None

    def hold(self, size: int) -> None:
        """Make a tensor of so many bytes."""
        self._blocks.append(self._torch.empty(size, dtype=self._torch.uint8, device=self._device))

    def drop(self) -> None:
        """Free the newest tensor, and torch's cache with it."""
        self._blocks.pop()
        self._torch.cuda.empty_cache()

    def work(self, seconds: float) -> None:
        """Multiply matrices."""
        if self._matrix is None:
            self._matrix = self._torch.randn(8192, 8192, device=self._device, dtype=self._torch.bfloat16)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                self._matrix @ self._matrix
            self._torch.cuda.synchronize(self._device)


_LIBRARIES = {"cuda": "libcuda.so.1", "torch": "libtorch_cuda.so", "jax": "xla_cuda_plugin.so"}


def _map(name: str) -> mmap.mmap:
    """Map an empty file of this name, as the real program would its library."""
    directory = rehearsing()
    if directory is None:
        message = "VRAMLEDGER_REHEARSAL is not set"
        raise RuntimeError(message)
    fresh = directory / f"{name}.{os.getpid()}"
    fresh.write_bytes(bytes(mmap.PAGESIZE))
    with fresh.open("rb") as file:
        fresh.replace(directory / name)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Pretend:
    """A holder's simulated memory, in a file that the rehearsal reads.

    Args:
        device: the index of the device.
        context: bytes that it holds from the beginning.
        framework: whose library it maps, or a file of that name.
    """

    def __init__(self, device: int, context: int = CONTEXT, framework: str = "cuda") -> None:
        self._device = device
        self._library = _map(_LIBRARIES[framework])
        self._blocks = [context]
        self._facts: dict[str, object] = {}
        self._write()

    def hold(self, size: int) -> None:
        """Write down more bytes."""
        self._blocks.append(size)
        self._write()

    def hold_managed(self, size: int, resident: int | None = None, host: int = 0) -> None:  # noqa: ARG002
        """Hold bytes that the driver charges to no process, and map as many as CUDA would."""
        directory = rehearsing()
        if directory is not None:
            fresh = directory / f"nvidia-uvm.{os.getpid()}"
            with fresh.open("wb+") as file:
                file.truncate(size + 2 * 2**20)
                fresh.rename(directory / "nvidia-uvm")
                self._managed = mmap.mmap(file.fileno(), 0)
        self.note(unattributed=size if resident is None else resident)

    def total(self) -> int:
        """Return the bytes of the device."""
        return 100 * GIB

    def drop(self) -> None:
        """Write down fewer bytes."""
        self._blocks.pop()
        self._write()

    def work(self, seconds: float) -> None:
        """Write that the device is busy because of us."""
        self.note(busy_until=time.time() + seconds + 0.5)
        time.sleep(seconds)

    def share(self) -> str:
        """Write that the last allocation is shared; return its key."""
        key = f"{os.getpid()}-{len(self._blocks)}"
        self.note(shares=key, shared=self._blocks[-1])
        return key

    def open_shared(self, text: str) -> None:
        """Write that we have opened another process's memory."""
        self.note(opens=text)

    def note(self, **facts: object) -> None:
        """Write further facts."""
        self._facts.update(facts)
        self._write()

    def _write(self) -> None:
        directory = rehearsing()
        if directory is None:
            message = "VRAMLEDGER_REHEARSAL is not set"
            raise RuntimeError(message)
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 /proc's links lead to no path
        path = directory / f"{namespace}-{os.getpid()}-{self._device}.json"
        facts = {
            "pid": os.getpid(), "namespace": namespace, "device": self._device, "bytes": sum(self._blocks),
            "mps": os.environ.get("VRAMLEDGER_REHEARSAL_MPS"), **self._facts,
        }  # fmt: skip
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(facts))
        fresh.replace(path)
