"""PaddlePaddle as a framework with an agent: the text that replaces its declaration in a test."""

from __future__ import annotations

from vramledger_agent.protocol.frameworks import POOL_FIGURES, Framework, Library

PADDLE = (
    # --- from here on
    Framework(
        "paddle",
        "PaddlePaddle",
        libraries=(Library("libpaddle", "libpaddle", "libphi_core"),),
        default=("growth", "Paddle's pool grows as needed"),
        imported_module="paddle.device.cuda",
        provider="vramledger_agent.frameworks.paddle",
        source="paddle.device.cuda",
        figures={name: POOL_FIGURES[name] for name in ("in_use", "in_use_peak", "pool")},
    ),
    # --- up to here
)
