"""PaddlePaddle in this process: what its pool has taken of the device, and what the program uses."""

from __future__ import annotations

import sys

from vramledger_agent.frameworks.provider import Provider, at_most_one


class Paddle(Provider):
    """The PaddlePaddle of this process."""

    name = "paddle"

    def is_initialised(self) -> bool:
        """Return whether its pool exists."""
        cuda = sys.modules.get("paddle.device.cuda")
        return cuda is not None and cuda.memory_reserved() > 0

    def read(self) -> dict[str, object] | None:
        """Return the pool's bytes, and those in use, of the one device."""
        cuda = sys.modules.get("paddle.device.cuda")
        if cuda is None:
            return None
        if not at_most_one():
            return {"framework": self.name, "supported": False, "devices": []}
        figures = {
            "ordinal": 0,
            "in_use": int(cuda.memory_allocated()),
            "in_use_peak": int(cuda.max_memory_allocated()),
            "pool": int(cuda.memory_reserved()),
        }
        return {"framework": self.name, "supported": True, "policy": "growth", "devices": [figures]}


def make_provider() -> Paddle:
    """Make the provider."""
    return Paddle()
