"""The frameworks that an agent reports on, each declared once.

From here follow the agent's import hook and start-up file, what the exporter accepts of a report, and the
families of metrics. This module imports nothing: see :mod:`vramledger.agent_protocol.messages`.
"""

from __future__ import annotations

COUNTERS = ("alloc_retries", "ooms", "allocations")
"""Figures that count; all others are bytes."""

TORCH_BYTES = (
    *("reserved", "allocated", "active", "requested", "inactive_split", "reserved_peak", "allocated_peak"),
    *("reclaimable", "largest_free_block", "private_pools"),
)
POOL_BYTES = ("in_use", "in_use_peak", "limit", "pool")


class Framework:
    """One framework.

    Attributes:
        name: in reports, and in the names of its metrics.
        title: as its makers write it.
        process_framework: what a process that uses it is labelled with.
        library: what :mod:`vramledger.readers.hosts.libraries` calls its library.
        imported_module: its import shows that the framework comes, and it has what the provider hooks into.
        provider: the agent's module that reads it.
        figures: what it may give of a device.
        general: which of them serve the families of all frameworks: the figure by its general name.
    """

    __slots__ = (
        *("figures", "general", "imported_module", "library", "name"),
        *("process_framework", "provider", "title"),
    )

    def __init__(  # noqa: PLR0913 one argument a fact
        self,
        name: str,
        title: str,
        *,
        library: str,
        imported_module: str,
        provider: str,
        process_framework: str = "",
        figures: tuple[str, ...] = (*POOL_BYTES, "allocations"),
        general: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.title = title
        self.process_framework = process_framework or name
        self.library = library
        self.imported_module = imported_module
        self.provider = provider
        self.figures = figures
        self.general = general or {name: name for name in POOL_BYTES}


FRAMEWORKS = (
    Framework(
        "torch",
        "PyTorch",
        process_framework="pytorch",
        library="libtorch_cuda",
        imported_module="torch.cuda",
        provider="vramledger.agent.frameworks.pytorch",
        figures=(*TORCH_BYTES, *COUNTERS),
        general={"in_use": "allocated", "in_use_peak": "allocated_peak", "pool": "reserved"},
    ),
    Framework(
        "tensorflow",
        "TensorFlow",
        library="libtensorflow",
        imported_module="tensorflow.python.eager.context",
        provider="vramledger.agent.frameworks.tensorflow",
    ),
    Framework(
        "jax",
        "JAX",
        library="xla_cuda_plugin",
        imported_module="jax._src.xla_bridge",
        provider="vramledger.agent.frameworks.jax",
    ),
    Framework(
        "cupy",
        "CuPy",
        library="cupy",
        imported_module="cupy",
        provider="vramledger.agent.frameworks.cupy",
    ),
    Framework(
        "rmm",
        "RMM",
        library="librmm",
        imported_module="rmm",
        provider="vramledger.agent.frameworks.rmm",
    ),
)

FRAMEWORKS_BY_NAME = {framework.name: framework for framework in FRAMEWORKS}
