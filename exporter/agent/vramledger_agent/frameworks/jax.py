"""Read JAX in this process: its pool, what arrays use of it, its limit, and its policy.

``jax.devices()`` and similar functions create the backend, and with it take three quarters of the device. So
this module looks up the clients that exist (jax 0.4 to 0.12), and calls only those. It reads the dictionary
of backends itself instead of ``backends_are_initialized()``, which takes a lock: a fork at that moment would
leave it locked in the child.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from vramledger_agent.frameworks.provider import (
    OutOfMemoryMessage,
    Provider,
    module_version,
    read_environment,
    read_ordinal,
    read_requested,
)
from vramledger_agent.program_errors import belongs_to_program

BRIDGE_MODULE = "jax._src.xla_bridge"
_RUNTIME_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
"""The names of the error's class, the second one before jaxlib 0.7."""

_GPU_PLATFORMS = ("cuda", "gpu", "rocm")
_POLICY_VARIABLES = (
    *("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_PREALLOCATE"),
    *("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
)
_STATISTICS = {
    "in_use": "bytes_in_use",
    "in_use_peak": "peak_bytes_in_use",
    "limit": "bytes_limit",
    "pool": "pool_bytes",
}


class Jax(Provider):
    name = "jax"

    def __init__(self) -> None:
        self._environ: Mapping[str, str] = {}

    def hook_initialisation(self, announce: Callable[[], None]) -> bool:
        """Be called when JAX has found its plugins, one of which is for CUDA, and before it starts them.

        A jaxlib that has CUDA built in (before 0.4.20) has no such moment.
        """
        bridge = sys.modules.get(BRIDGE_MODULE)
        register = getattr(bridge, "register_plugin_callbacks", None)
        factories = getattr(bridge, "_backend_factories", None) or ()
        found = getattr(bridge, "_plugins_registered", False)
        if register is None or (not found and any(platform in factories for platform in _GPU_PLATFORMS)):
            return False
        register(announce)
        return True

    def has_given_up(self) -> bool:
        bridge = sys.modules.get(BRIDGE_MODULE)
        lock = getattr(bridge, "_backend_lock", None)
        if not getattr(bridge, "_backends", None) or lock is None or not hasattr(lock, "locked"):
            return False
        return not lock.locked() and not _gpu_clients()

    def is_initialised(self) -> bool:
        return bool(_gpu_clients())

    def start(self) -> None:
        """Keep a copy of the environment from the moment when the backend was made."""
        self._environ = read_environment(_POLICY_VARIABLES)

    def recognise_out_of_memory(self, error: BaseException) -> OutOfMemoryMessage | None:
        """Recognise the runtime's error; not every one names the device."""
        if type(error).__name__ not in _RUNTIME_ERRORS:
            return None
        text = str(error)
        if not text.startswith("RESOURCE_EXHAUSTED"):
            return None
        devices = (self.read() or {}).get("devices")
        only = devices[0].get("ordinal") if isinstance(devices, list) and len(devices) == 1 else None
        named = read_ordinal(text)
        return OutOfMemoryMessage(only if named is None else named, read_requested(text))

    def read(self) -> dict[str, object] | None:
        clients = _gpu_clients()
        if not clients:  # jax.clear_backends() removes them
            return None
        devices: list[dict[str, object]] = []
        supported = True
        for client in clients:
            try:
                devices.extend(_device_entry(device) for device in client.local_devices())  # type: ignore[attr-defined]
            except Exception as error:
                if belongs_to_program(error):
                    raise
                supported = False
        figures = any(len(device) > 1 for device in devices)
        return {
            "framework": self.name,
            "version": module_version("jax.version"),
            "supported": supported and figures,  # the platform allocator counts nothing
            "allocator": self._environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower(),
            "policy": classify_policy(self._environ),
            "devices": devices,
        }


def make_provider() -> Jax:
    return Jax()


def classify_policy(environ: Mapping[str, str]) -> str | None:
    """Return the policy that follows from an environment, None if it is not one that we know."""
    allocator = environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator == "platform":
        return "platform"
    if allocator == "cuda_async":
        return "cuda_malloc_async"
    if allocator not in ("", "default", "bfc"):
        return None
    if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("0", "false", "False"):
        return "growth"
    return "fraction"  # three quarters unless XLA_CLIENT_MEM_FRACTION says otherwise


def _gpu_clients() -> list[object]:
    backends = getattr(sys.modules.get(BRIDGE_MODULE), "_backends", None)
    if not isinstance(backends, dict):
        return []
    clients = tuple(backends.values())
    return [client for client in clients if getattr(client, "platform", None) in _GPU_PLATFORMS]


def _device_entry(device: object) -> dict[str, object]:
    ordinal = getattr(device, "local_hardware_id", None)
    if ordinal is None:  # with several processes, ids are global
        ordinal = device.id  # type: ignore[attr-defined]
    entry: dict[str, object] = {"ordinal": int(ordinal)}
    stats = device.memory_stats() or {}  # type: ignore[attr-defined]
    for key, statistic in _STATISTICS.items():
        value = stats.get(statistic)
        if isinstance(value, int) and value >= 0:  # some plugins report -1 for what they do not count
            entry[key] = value
    return entry
