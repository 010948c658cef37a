"""Write the frameworks' modules into the agent's start-up file, which runs before ours can be imported.

A test fails if it differs from what this writes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from vramledger_agent.protocol.frameworks import REPORTING_FRAMEWORKS

STARTUP = Path(__file__).parent / "agent" / "vramledger_agent" / "startup" / "sitecustomize.py"

_WRITTEN = re.compile(r"(?<=/frameworks\.py\.\n).*?(?=# End of what is written\.)", re.DOTALL)


def startup(text: str) -> str:
    """Return the start-up file with the modules that it must wait for."""
    modules = [framework.imported_module for framework in REPORTING_FRAMEWORKS.values()]
    lines = [f'    "{module}",\n' for module in modules]
    written, times = _WRITTEN.subn(f"IMPORTED_MODULES = (\n{''.join(lines)})\n", text)
    if times != 1:
        sys.exit(f"{STARTUP} must have one place between '/frameworks.py.' and '# End of what is written.'")
    return written


WRITERS = {STARTUP: startup}


def main() -> None:
    """Write the files again."""
    for path, write in WRITERS.items():
        path.write_text(write(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
