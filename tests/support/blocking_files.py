"""Files that block: a file system in user space that does not answer when one is closed or asked."""

import array
import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_IN_HEADER = struct.Struct("<IIQQIIIHH")
_OUT_HEADER = struct.Struct("<IiQ")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _RELEASE, _FLUSH, _INIT, _INTERRUPT = 1, 2, 3, 14, 18, 25, 26, 36
_BATCH_FORGET, _GETXATTR = 42, 22
_ENOSYS = 38
_ROOT, _FILE = 1, 2
_FORCE, _DETACH = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class BlockingFiles:
    """A mounted file system with one file; closing it takes until the file system is gone.

    Only the thread that sends a descriptor may close its own at once.
    """

    def __init__(self, place: Path) -> None:
        """Mount it; an OSError says that this machine has no FUSE, or does not let us mount."""
        self._place = place
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._senders: set[int] = set()
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if _libc.mount(b"vramledger", os.fsencode(place), b"fuse", 0, options) != 0:
            os.close(self._device)
            raise OSError(ctypes.get_errno(), "mount of fuse")
        threading.Thread(target=self._serve, daemon=True).start()

    def send(self, connection: socket.socket, data: bytes) -> None:
        """Send a message with such a file, and keep no descriptor of it."""
        descriptor = self.open()
        try:
            rights = array.array("i", [descriptor])
            connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        finally:
            os.close(descriptor)

    def open(self) -> int:
        """Open the file; who does may close it at once."""
        self._senders.add(threading.get_native_id())
        return os.open(self._place / "file", os.O_RDONLY)

    def end(self) -> None:
        """Unmount it; who waits for it then goes on."""
        _libc.umount2(os.fsencode(self._place), _FORCE)  # ends all requests
        _libc.umount2(os.fsencode(self._place), _DETACH)
        with suppress(OSError):
            os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 17)
            except OSError:
                return
            _, opcode, unique, node, *_, thread, _, _ = _IN_HEADER.unpack_from(request)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT, _GETXATTR):
                continue  # the last is never answered, the others want no answer
            if opcode == _FLUSH and thread not in self._senders:
                continue  # never answered
            answer = self._answer(opcode, node)
            error = -_ENOSYS if answer is None else 0
            body = answer or b""
            with suppress(OSError):  # who asked has ended
                os.write(self._device, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), error, unique) + body)

    def _answer(self, opcode: int, node: int) -> bytes | None:
        """Return the body of an answer, None for a function that there is not."""
        if opcode == _INIT:
            return struct.pack("<IIIIHHI", 7, 22, 0, 0, 1, 1, 4096)
        if opcode == _LOOKUP:
            return struct.pack("<QQQQII", _FILE, 0, 60, 60, 0, 0) + _attributes(_FILE)
        if opcode == _GETATTR:
            return struct.pack("<QII", 60, 0, 0) + _attributes(node)
        if opcode == _OPEN:
            return struct.pack("<QII", 1, 0, 0)
        return b"" if opcode in (_FLUSH, _RELEASE) else None


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o644
    return struct.pack("<QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


@contextmanager
def blocking_files(place: Path) -> Iterator[BlockingFiles]:
    """Mount such a file system in a directory; at the end nobody waits for it any more."""
    files = BlockingFiles(place)
    try:
        yield files
    finally:
        files.end()
