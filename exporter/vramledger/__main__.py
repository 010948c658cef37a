"""Run the ``vramledger`` command as ``python -m vramledger``."""

from __future__ import annotations

import sys

from vramledger.cli import main

if __name__ == "__main__":
    sys.exit(main())
