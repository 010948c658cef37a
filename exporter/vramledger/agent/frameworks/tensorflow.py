"""Read TensorFlow in this process: its policy, and how much of its memory tensors use.

TensorFlow's context is a Python object with all that the program configured. To read its attributes is not a
call into TensorFlow. The functions of ``tf.config`` are such calls: most of them create the devices, and with
them take the memory. So this module reads attributes. It calls one function, ``get_memory_info``, and only
when the context says that its devices exist (TensorFlow 2.21; ``_context_handle`` set).

What the environment forces (``TF_FORCE_GPU_ALLOW_GROWTH``, ``TF_GPU_ALLOCATOR``) is read in C++ as the
devices are created and shows in no attribute. So we read the environment at that moment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from vramledger.agent.frameworks.provider import Provider, module_version, read_environment

CONTEXT_MODULE = "tensorflow.python.eager.context"
_MIB = 2**20
_POLICY_VARIABLES = ("TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR")
_POLICIES_BY_SIZE = ("no_gpu", "growth", "limit", "fraction", "preallocate")
"""Policies from the smallest to the largest amount that they take; devices may differ, and the largest is
reported."""


class TensorFlow(Provider):
    """The TensorFlow of this process."""

    name = "tensorflow"

    def __init__(self) -> None:
        self._environ: Mapping[str, str] = {}

    def is_initialised(self) -> bool:
        """Return whether its context has made its devices, and there is a GPU that it may use."""
        context = _initialised_context()
        return context is not None and any(_gpus(context, "_physical_devices"))

    def start(self) -> None:
        """Keep a copy of the environment from the moment when the devices were made."""
        self._environ = read_environment(_POLICY_VARIABLES)

    def read(self) -> dict[str, object] | None:
        """Return the policy, and a device's bytes in use, peak and limit."""
        context = _initialised_context()
        if context is None:  # a program may drop its context (tf.config on tests does)
            return None
        devices = _device_entries(context)
        return {
            "framework": self.name,
            "version": module_version("tensorflow.python.framework.versions"),
            "supported": devices is not None,
            "allocator": "cuda_malloc_async" if _uses_cuda_malloc_async(context, self._environ) else "bfc",
            "policy": classify_policy(context, self._environ),
            "devices": devices or [],
        }


def make_provider() -> TensorFlow:
    """Make the provider."""
    return TensorFlow()


def classify_policy(context: object, environ: Mapping[str, str]) -> str | None:
    """Return the policy of a context whose devices exist, None when a version hides what decides.

    The allocator decides first, because it replaces the pool that the other settings shape. Then comes a
    limit, which a logical device keeps whatever the growth is. Then comes growth, where the environment
    overrides the program.
    """
    try:
        visible = list(_gpus(context, "_visible_device_list"))
        if not visible:
            return "no_gpu"
        if _uses_cuda_malloc_async(context, environ):
            return "cuda_malloc_async"
        return max((_device_policy(context, gpu, environ) for gpu in visible), key=_POLICIES_BY_SIZE.index)
    except (AttributeError, TypeError, ValueError):
        return None


def _device_policy(context: object, gpu: object, environ: Mapping[str, str]) -> str:
    if any(limit is not None for limit in _logical_limits(context, gpu)):
        return "limit"
    # Only these two spellings count; for any other, TensorFlow logs an error and uses the program's setting.
    forced = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    growth = (context._memory_growth_map or {}).get(gpu)  # type: ignore[attr-defined]
    options = _gpu_options(context)
    if forced == "true" or (forced != "false" and (growth or getattr(options, "allow_growth", False))):
        return "growth"
    if getattr(options, "per_process_gpu_memory_fraction", 0):
        return "fraction"
    return "preallocate"


def _uses_cuda_malloc_async(context: object, environ: Mapping[str, str]) -> bool:
    if environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return True
    return bool(getattr(getattr(_gpu_options(context), "experimental", None), "use_cuda_malloc_async", False))


def _gpu_options(context: object) -> object:
    """Return the program's ``ConfigProto`` from the attribute; the property would build a new one."""
    return getattr(getattr(context, "_config", None), "gpu_options", None)


def _initialised_context() -> object | None:
    """Return TensorFlow's context once its devices exist."""
    context: object = getattr(sys.modules.get(CONTEXT_MODULE), "_context", None)
    return context if getattr(context, "_context_handle", None) is not None else None


def _gpus(context: object, attribute: str) -> Iterable[object]:
    # A missing attribute raises: a version that hides it must not look like a version without GPUs.
    for device in tuple(getattr(context, attribute) or ()):
        if getattr(device, "device_type", None) == "GPU":
            yield device


def _logical_limits(context: object, gpu: object) -> list[int | None]:
    """Return a limit in bytes for each logical device of this GPU; an empty list where it was not divided."""
    configured = (getattr(context, "_virtual_device_map", None) or {}).get(gpu) or ()
    limits = [getattr(each, "memory_limit", None) for each in configured]
    return [None if limit is None else int(limit * _MIB) for limit in limits]


def _device_entries(context: object) -> list[dict[str, object]] | None:
    """Return the figures of every visible GPU, the sum of its logical devices; None if not available.

    Logical devices are numbered consecutively, over the visible GPUs in their order.
    """
    entries: list[dict[str, object]] = []
    logical = 0
    try:
        known = {
            str(getattr(device, "name", "")).rpartition("device:")[2]
            for device in _gpus(context, "_logical_devices")
        }
        for gpu in _gpus(context, "_visible_device_list"):
            limits = _logical_limits(context, gpu) or [None]
            current = peak = 0
            for _ in limits:
                name = f"GPU:{logical}"
                logical += 1
                if name not in known:  # a version that numbers them differently: report no figure
                    return None
                info = context.get_memory_info(name)  # type: ignore[attr-defined]
                current, peak = current + int(info["current"]), peak + int(info["peak"])
            entry: dict[str, object] = {
                "ordinal": int(str(gpu.name).rpartition(":")[2]),  # type: ignore[attr-defined]
                "in_use": current,
                "limit": None if None in limits else sum(limit or 0 for limit in limits),
            }
            # The peaks of several logical devices may be of different times.
            entry["in_use_peak"] = peak if len(limits) == 1 else None
            entries.append(entry)
    except Exception:
        return None
    return entries
