"""A notebook that somebody left open: one large result, and nothing done with it since."""

from __future__ import annotations

from tests.tools.recordings.programs import gpu
from tests.tools.recordings.programs.holder import hold

if __name__ == "__main__":
    hold("notebook", 40 * gpu.GIB)
