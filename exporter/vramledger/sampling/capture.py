"""Make a recording of this host: the sampler's readings, masked, in a file that replays exactly."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

from vramledger.errors import DriverError, StartupError
from vramledger.model.reading import Reading, encode
from vramledger.sampling.masking import Mask


async def capture(
    readings: AsyncIterator[Reading | None], path: Path, *, head: bytes, seconds: float, mask: bool
) -> int:
    """Write a header and the readings of a span to a file; return how many readings there are.

    The file is opened when there is something to write: an older one of that name is not lost for nothing.

    Raises:
        DriverError: the very first reading says that the driver is out of use.
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
                    out = gzip.GzipFile(path, "wb", compresslevel=9)
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
            with suppress(OSError):  # a full disk is full for the end of the file, too
                out.close()
    return count
