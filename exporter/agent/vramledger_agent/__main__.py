"""Run the ``vramledger-agent`` command as ``python -m vramledger_agent``."""

from __future__ import annotations

import sys

from vramledger_agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
