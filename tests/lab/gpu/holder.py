"""Hold memory on request: each line of standard input is a number of bytes beside the context.

Answers each line with the same number once it is so, and ends with its input.
"""

from __future__ import annotations

import sys

from tests.lab.recordings.programs.gpu import open_gpu


def main() -> None:
    """Follow the lines, on the device of the first argument."""
    card = open_gpu(int(sys.argv[1]))
    held = 0
    for line in sys.stdin:
        if held:
            card.drop()
        held = int(line)
        if held:
            card.hold(held)
            card.work(0.02)
        print(held, flush=True)


if __name__ == "__main__":
    main()
