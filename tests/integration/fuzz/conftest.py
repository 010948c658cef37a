"""How much is drawn: VRAMLEDGER_FUZZ examples a test (``make fuzz`` sets it), a few dozen otherwise."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("VRAMLEDGER_FUZZ", "60"))

settings.register_profile(
    "fuzz",
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="VRAMLEDGER_FUZZ" not in os.environ,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
FUZZ = settings.get_profile("fuzz")
