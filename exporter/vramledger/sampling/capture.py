"""Make a recording of this host: the sampler's readings, masked, in a file that replays exactly."""

from __future__ import annotations

import gzip
import os
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

from vramledger.errors import DriverError, StartupError
from vramledger.model.reading import (
    Reading,
)
from vramledger.model.reading_json import encode
from vramledger.private_file import create_private
from vramledger.sampling.masking import Mask


class _RecordingFile(gzip.GzipFile):
    """A compressed file that only its owner may read: its readings may name users and programs."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._raw = os.fdopen(descriptor, "wb")
        super().__init__(path.name, "wb", 9, self._raw)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._raw.close()


async def capture(
    readings: AsyncIterator[Reading | None], path: Path, *, head: bytes, seconds: float, mask: bool
) -> int:
    """Write a header and the readings of a span to a file; return the number of readings.

    The file is opened only when there is something to write, so a capture that fails does not delete an older
    file of that name.

    Raises:
        DriverError: the first reading says that the driver does not work.
        StartupError: the file cannot be written.
    """
    masking = Mask()
    count = 0
    begun = 0.0
    out: gzip.GzipFile | None = None
    try:
        async with aclosing(readings) as stream:  # type: ignore[type-var]
            async for reading in stream:
                if reading is None:
                    break
                if out is None:
                    if reading.failure is not None:
                        raise DriverError(*reading.failure)
                    # Its readings may name users and programs.
                    # Opened first: Python 3.14 complains of an object whose file could not be opened.
                    out = _RecordingFile(path, create_private(path))
                    out.write(head)
                    begun = reading.monotonic
                out.write(encode(masking.mask_reading(reading) if mask else reading))
                count += 1
                if reading.monotonic - begun >= seconds:
                    break
        if out is not None:
            out.close()
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise StartupError(message) from error
    finally:
        if out is not None:
            # a disk that is full for the readings is also full for the end of the file
            with suppress(OSError):
                out.close()
    return count
