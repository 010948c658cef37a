"""A notebook that its user has left: one large result, and no work since."""

from __future__ import annotations

from tests.lab.recordings.programs import gpu
from tests.lab.recordings.programs.holder import hold

if __name__ == "__main__":
    hold("notebook", 40 * gpu.GIB)
