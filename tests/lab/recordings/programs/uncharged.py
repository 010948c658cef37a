"""Hold memory that NVML charges to no process, in one of the ways in which programs come by it.

``uncharged.py ROLE KIND [ARGUMENT...]``; sizes are GiB. In a rehearsal the kinds that only a real driver has
are simulated by what they come to.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

from tests.lab.recordings.programs import cue, gpu

_FD = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"""

_IMPORTERS = 16


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location),
        ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Pool(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location),
        ("windows", ctypes.c_void_p), ("most", ctypes.c_size_t), ("rest", ctypes.c_ubyte * 56),
    )  # fmt: skip


def _device() -> _Location:
    return _Location(1, 0)  # CU_MEM_LOCATION_TYPE_DEVICE


class Shared(gpu.Cuda):
    """Memory that is exported and imported as a file descriptor."""

    def create(self, size: int) -> int:
        """Take memory with cuMemCreate, map it, and return its descriptor."""
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int(-1)
        wanted = _Allocation(1, _FD, _device())
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(wanted),
                   ctypes.c_uint64(0))  # fmt: skip
        self._map(handle, size)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _FD, ctypes.c_uint64(0))
        return descriptor.value

    def take(self, descriptor: int, size: int, *, mapped: bool) -> None:
        """Import memory that another process has created, and map it if told so."""
        handle = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _FD)
        if mapped:
            self._map(handle, size)

    def create_pool(self, size: int) -> tuple[int, bytes]:
        """Take memory from a pool of its own; return the pool's descriptor and what exports the address."""
        pool, address, descriptor = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int(-1)
        wanted, data = _Pool(1, _FD, _device()), (ctypes.c_ubyte * 64)()
        self._call("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(wanted))
        self._call("cuMemAllocFromPoolAsync", ctypes.byref(address), ctypes.c_size_t(size), pool, None)
        self._call("cuCtxSynchronize")
        self._call(
            "cuMemPoolExportToShareableHandle", ctypes.byref(descriptor), pool, _FD, ctypes.c_uint64(0)
        )
        self._call("cuMemPoolExportPointer", ctypes.byref(data), address)
        return descriptor.value, bytes(data)

    def take_pool(self, descriptor: int, data: bytes) -> None:
        """Import a pool and an address in it."""
        pool, address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuMemPoolImportFromShareableHandle", ctypes.byref(pool), ctypes.c_void_p(descriptor), _FD,
                   ctypes.c_uint64(0))  # fmt: skip
        self._call("cuMemPoolSetAccess", pool, ctypes.byref(_Access(_device(), 3)), ctypes.c_size_t(1))
        exported = (ctypes.c_ubyte * 64).from_buffer_copy(data)
        self._call("cuMemPoolImportPointer", ctypes.byref(address), pool, ctypes.byref(exported))
        self._call("cuMemsetD8_v2", address, 1, ctypes.c_size_t(2**20))
        self._call("cuCtxSynchronize")

    def _map(self, handle: ctypes.c_uint64, size: int) -> None:
        address = ctypes.c_uint64()
        none, length = ctypes.c_uint64(0), ctypes.c_size_t(size)
        self._call("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), none, none)
        self._call("cuMemMap", address, length, ctypes.c_size_t(0), handle, none)
        self._call("cuMemSetAccess", address, length, ctypes.byref(_Access(_device(), 3)), ctypes.c_size_t(1))
        self._call("cuMemsetD8_v2", address, 1, length)
        self._call("cuCtxSynchronize")


def _bytes(gib: str) -> int:
    return int(float(gib) * gpu.GIB)


def _listen(path: str) -> socket.socket:
    place = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place.bind(path)
    Path(path).chmod(0o777)
    place.listen(_IMPORTERS)
    return place


def _give(place: socket.socket, descriptor: int, data: bytes) -> None:
    """Pass a descriptor to everybody who asks; SIGTERM and SIGKILL end it."""
    while True:
        peer, _ = place.accept()
        rights = array.array("i", [descriptor])
        peer.sendmsg([data or b"-"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        peer.close()


def _fetch(path: str) -> tuple[int, bytes]:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(path)
    data, ancillary, _, _ = peer.recvmsg(256, socket.CMSG_LEN(4))
    return int(array.array("i", ancillary[0][2])[0]), data


def managed(role: str, mapped: str, resident: str, host: str = "0") -> None:
    """Take managed memory, and touch a part of it on the device and then a part on the host."""
    card = cast("gpu.Cuda", gpu.open_gpu())
    card.hold_managed(_bytes(mapped), _bytes(resident), _bytes(host))
    cue.announce(role)
    cue.wait()


def sweep(role: str, share: str) -> None:
    """Take more managed memory than the device has, and touch all of it on the device."""
    card = cast("gpu.Cuda", gpu.open_gpu())
    size = int(float(share) * card.total())
    card.hold_managed(size, size, 0)
    cue.announce(role)
    cue.wait()


def create(role: str, path: str, gib: str) -> None:
    """Export memory that cuMemCreate made."""
    if gpu.rehearsing():
        _pretend_shared(role, path, _bytes(gib))
    descriptor = (card := Shared(0)).create(_bytes(gib))
    place = _listen(path)
    cue.announce(role)
    _give(place, descriptor, b"")
    del card


def pool(role: str, path: str, gib: str) -> None:
    """Export a pool and an allocation of it."""
    if gpu.rehearsing():
        _pretend_shared(role, path, _bytes(gib))
    descriptor, data = (card := Shared(0)).create_pool(_bytes(gib))
    place = _listen(path)
    cue.announce(role)
    _give(place, descriptor, data)
    del card


def take(role: str, path: str, gib: str, mapped: str = "") -> None:
    """Import what ``create`` or ``pool`` has exported; what ``create`` has made is mapped only if told so."""
    pretended = card = None
    if gpu.rehearsing():
        pretended = gpu.Pretend(0)
        pretended.note(keeps=path)
    else:
        card = Shared(0)
        descriptor, data = _fetch(path)
        if len(data) > 1:
            card.take_pool(descriptor, data)
        else:
            card.take(descriptor, _bytes(gib), mapped=bool(mapped))
        os.close(descriptor)
    cue.announce(role)
    cue.wait()
    del pretended, card  # it keeps its mappings until here


def keep(role: str, path: str) -> None:
    """Keep the descriptor of exported memory, without CUDA."""
    held = -1 if gpu.rehearsing() else _fetch(path)[0]
    cue.announce(role, descriptor=held)
    cue.wait()


def fork(role: str, gib: str) -> None:
    """Take memory, then fork a child that does nothing."""
    gpu.open_gpu().hold(_bytes(gib))
    if os.fork() == 0:
        cue.enter()
        cue.announce(f"{role}-child")
        cue.wait()
    cue.announce(role)
    cue.wait()


def cupy(role: str, gib: str) -> None:
    """Fill an array in CuPy's managed pool."""
    module: Any = __import__("cupy")
    module.cuda.set_allocator(module.cuda.MemoryPool(module.cuda.malloc_managed).malloc)
    block = module.ones(_bytes(gib), dtype=module.uint8)
    module.cuda.runtime.deviceSynchronize()
    cue.announce(role, bytes=int(block.nbytes))
    cue.wait()


def torch(role: str, gib: str, directory: str) -> None:
    """Fill a tensor of a pluggable allocator that takes managed memory."""
    source, library = Path(directory, "uvm.c"), Path(directory, "uvm.so")
    source.write_text(_ALLOCATOR)
    os.system(f"cc -shared -fPIC -o {library} {source} -ldl")  # noqa: S605 paths of our own
    module: Any = __import__("torch")
    allocator = module.cuda.memory.CUDAPluggableAllocator(str(library), "uvm_take", "uvm_free")
    module.cuda.memory.change_current_allocator(allocator)
    block = module.ones(_bytes(gib), dtype=module.uint8, device="cuda")
    module.cuda.synchronize()
    cue.announce(role, bytes=int(block.nbytes))
    cue.wait()


_ALLOCATOR = """
#include <dlfcn.h>
#include <stddef.h>
typedef int (*take_fn)(unsigned long long *, size_t, unsigned);
typedef int (*free_fn)(unsigned long long);
void *uvm_take(ptrdiff_t size, int device, void *stream) {
    unsigned long long address = 0;
    take_fn take = (take_fn)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAllocManaged");
    return take && take(&address, (size_t)size, 1) == 0 ? (void *)address : NULL;
}
void uvm_free(void *address, ptrdiff_t size, int device, void *stream) {
    free_fn give = (free_fn)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemFree_v2");
    if (give) give((unsigned long long)address);
}
"""


def jax(role: str, gib: str) -> None:
    """Fill an array in JAX; its environment says that it uses unified memory."""
    numpy: Any = __import__("jax.numpy", fromlist=["numpy"])
    block = numpy.ones(_bytes(gib), dtype="uint8").block_until_ready()
    cue.announce(role, bytes=int(block.nbytes))
    cue.wait()


def tensorflow(role: str, gib: str, way: str) -> None:
    """Fill a tensor in TensorFlow with unified memory, asked for by a variable or by a session's options."""
    framework: Any = __import__("tensorflow")
    elements = _bytes(gib) // 4
    if way == "session":
        options = framework.compat.v1.GPUOptions(
            per_process_gpu_memory_fraction=0.25,
            experimental=framework.compat.v1.GPUOptions.Experimental(use_unified_memory=True),
        )
        framework.compat.v1.disable_eager_execution()
        session = framework.compat.v1.Session(config=framework.compat.v1.ConfigProto(gpu_options=options))
        block = framework.Variable(framework.ones([elements]))
        session.run(block.initializer)
        total = float(session.run(framework.reduce_sum(block[:16])))
    else:
        block = framework.ones([elements])
        total = float(framework.reduce_sum(block[:16]))
    print(f"{role}: {total} of 16", file=sys.stderr, flush=True)
    cue.announce(role, bytes=4 * elements)
    cue.wait()


def checkpoint(role: str, pid: str) -> None:
    """Checkpoint another process: the driver moves its device memory to the host."""
    library = ctypes.CDLL("libcuda.so.1")
    codes = [library.cuInit(0)]
    codes += [
        getattr(library, f"cuCheckpointProcess{step}")(int(pid), None) for step in ("Lock", "Checkpoint")
    ]
    cue.announce(role, codes=codes)
    print(f"checkpoint of {pid}: {codes}", file=sys.stderr, flush=True)
    cue.wait()


def _pretend_shared(role: str, path: str, size: int) -> None:
    card = gpu.Pretend(0)
    card.hold(size)
    card.note(shares=path, shared=size)
    cue.announce(role)
    while True:
        time.sleep(60)


KINDS = {
    each.__name__: each
    for each in (managed, sweep, create, pool, take, keep, fork, cupy, torch, jax, tensorflow, checkpoint)
}

if __name__ == "__main__":
    cue.enter()
    KINDS[sys.argv[2]](sys.argv[1], *sys.argv[3:])
