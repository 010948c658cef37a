"""Write the output of a command to stdout immediately."""

from __future__ import annotations

import os

from vramledger.errors import StartupError


def write_output(text: str) -> None:
    """Write text to stdout now, so that a full disk is noticed here and not at exit.

    Raises:
        BrokenPipeError: the reader has gone.
        StartupError: it cannot be written.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer would fail again at exit, with status 120 and a second message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        message = f"cannot write to standard output: {error.strerror}; free some space or write elsewhere"
        raise StartupError(message) from error
