"""TensorFlow in this process: by which policy it took its memory, how much of it tensors use.

TensorFlow's context is a Python object with all that the program configured, and reading its attributes is
no call into TensorFlow. The functions of ``tf.config`` are: most of them create the devices, and with them
take the memory. So this module reads attributes, and calls one function, ``get_memory_info``, only when the
context says that its devices exist (TensorFlow 2.21; ``_context_handle`` set).

What the environment forces (``TF_FORCE_GPU_ALLOW_GROWTH``, ``TF_GPU_ALLOCATOR``) is read in C++ as the
devices are created and shows in no attribute, so it is read here, at that moment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from vramledger.agent.frameworks.provider import Provider

CONTEXT = "tensorflow.python.eager.context"
_MIB = 2**20
_GREEDY = ("no_gpu", "growth", "limit", "fraction", "preallocate")
"""Policies from the least to the most that they take; devices may differ, and the worst one is the news."""


class TensorFlow(Provider):
    """The TensorFlow of this process."""

    name = "tensorflow"

    def __init__(self) -> None:
        self._environ: Mapping[str, str] = {}

    def initialised(self) -> bool:
        """Say whether its context has made its devices, and there is a GPU that it might have used."""
        context = _context()
        return context is not None and any(_gpus(context, "_physical_devices"))

    def begin(self) -> None:
        """Keep the environment as it was when the devices were made."""
        self._environ = {
            name: os.environ[name]
            for name in ("TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR")
            if name in os.environ
        }

    def read(self) -> dict[str, object] | None:
        """Return the policy, and a device's bytes in use, peak and limit."""
        context = _context()
        if context is None:  # a program may drop its context (tf.config on tests does)
            return None
        devices = _devices(context)
        return {
            "framework": self.name,
            "version": _version(),
            "supported": devices is not None,
            "allocator": "cuda_malloc_async" if _asynchronous(context, self._environ) else "bfc",
            "policy": policy(context, self._environ),
            "devices": devices or [],
        }


def provider() -> TensorFlow:
    """Make the provider."""
    return TensorFlow()


def policy(context: object, environ: Mapping[str, str]) -> str | None:
    """Name the policy of a context whose devices exist, None when a version hides what decides.

    The allocator goes first, for it replaces the pool that the others shape; then a limit, which a logical
    device keeps whatever the growth is; then growth, where the environment overrides the program.
    """
    try:
        visible = list(_gpus(context, "_visible_device_list"))
        if not visible:
            return "no_gpu"
        if _asynchronous(context, environ):
            return "cuda_malloc_async"
        return max((_of_device(context, gpu, environ) for gpu in visible), key=_GREEDY.index)
    except (AttributeError, TypeError, ValueError):
        return None


def _of_device(context: object, gpu: object, environ: Mapping[str, str]) -> str:
    if any(limit is not None for limit in _limits(context, gpu)):
        return "limit"
    # Exactly these two spellings count; TensorFlow logs an error for any other and goes by the program.
    forced = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    growth = (context._memory_growth_map or {}).get(gpu)  # type: ignore[attr-defined]
    options = _gpu_options(context)
    if forced == "true" or (forced != "false" and (growth or getattr(options, "allow_growth", False))):
        return "growth"
    if getattr(options, "per_process_gpu_memory_fraction", 0):
        return "fraction"
    return "preallocate"


def _asynchronous(context: object, environ: Mapping[str, str]) -> bool:
    if environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return True
    return bool(getattr(getattr(_gpu_options(context), "experimental", None), "use_cuda_malloc_async", False))


def _gpu_options(context: object) -> object:
    """Return what the program gave as ``ConfigProto``: the attribute; the property would build a new one."""
    return getattr(getattr(context, "_config", None), "gpu_options", None)


def _context() -> object | None:
    """Return TensorFlow's context once its devices exist."""
    context: object = getattr(sys.modules.get(CONTEXT), "_context", None)
    return context if getattr(context, "_context_handle", None) is not None else None


def _gpus(context: object, attribute: str) -> Iterable[object]:
    # An attribute that is missing raises: a version that hides it must not look like one without GPUs.
    for device in tuple(getattr(context, attribute) or ()):
        if getattr(device, "device_type", None) == "GPU":
            yield device


def _limits(context: object, gpu: object) -> list[int | None]:
    """Return a limit in bytes a logical device of this GPU; none at all where it was not divided."""
    configured = (getattr(context, "_virtual_device_map", None) or {}).get(gpu) or ()
    limits = [getattr(each, "memory_limit", None) for each in configured]
    return [None if limit is None else int(limit * _MIB) for limit in limits]


def _devices(context: object) -> list[dict[str, object]] | None:
    """Return the figures of every visible GPU, its logical devices added up; None when they cannot be had.

    Logical devices are numbered through, over the visible GPUs in their order.
    """
    entries: list[dict[str, object]] = []
    logical = 0
    try:
        known = {
            str(getattr(device, "name", "")).rpartition("device:")[2]
            for device in _gpus(context, "_logical_devices")
        }
        for gpu in _gpus(context, "_visible_device_list"):
            limits = _limits(context, gpu) or [None]
            current = peak = 0
            for _ in limits:
                name = f"GPU:{logical}"
                logical += 1
                if name not in known:  # a version that numbers them otherwise: say nothing of it
                    return None
                info = context.get_memory_info(name)  # type: ignore[attr-defined]
                current, peak = current + int(info["current"]), peak + int(info["peak"])
            entry: dict[str, object] = {
                "ordinal": int(str(gpu.name).rpartition(":")[2]),  # type: ignore[attr-defined]
                "in_use": current,
                "limit": None if None in limits else sum(limit or 0 for limit in limits),
            }
            # Peaks of several logical devices need not have been at one time.
            entry["in_use_peak"] = peak if len(limits) == 1 else None
            entries.append(entry)
    except Exception:
        return None
    return entries


def _version() -> str | None:
    version = getattr(sys.modules.get("tensorflow.python.framework.versions"), "__version__", None)
    return str(version) if version else None
