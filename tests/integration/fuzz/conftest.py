"""The number of examples: VRAMLEDGER_FUZZ for each test (``make fuzz`` sets it), by default some dozens."""

import os

from hypothesis import HealthCheck, settings

from tests.support.examples import examples

EXAMPLES = int(os.environ.get("VRAMLEDGER_FUZZ", examples(60)))

settings.register_profile(
    "fuzz", max_examples=EXAMPLES, deadline=None, derandomize="VRAMLEDGER_FUZZ" not in os.environ,
    print_blob=True, suppress_health_check=list(HealthCheck),
)  # fmt: skip
FUZZ = settings.get_profile("fuzz")
