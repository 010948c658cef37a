"""Read TensorFlow in this process: its policy, and how much of its memory tensors use.

TensorFlow's context is a Python object with all that the program configured. To read its attributes is not a
call into TensorFlow. The functions of ``tf.config`` are such calls: most of them create the devices, and with
them take the memory. So this module reads attributes. It calls one function, ``get_memory_info``, and only
when the context says that its devices exist (TensorFlow 2.21; ``_context_handle`` set). A program of
TensorFlow 1 makes a ``Session``, and its context stays empty. TensorFlow counts the sessions. When one is
new, we ask Python's collector once for the objects of that class. The session's ``ConfigProto`` and its list
of devices say what it may take. What it uses of that is not known.

What the environment forces (``TF_FORCE_GPU_ALLOW_GROWTH``, ``TF_GPU_ALLOCATOR``) is read in C++ as the
devices are created and shows in no attribute. So we read the environment at that moment.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterable, Mapping

from vramledger_agent.frameworks import provider
from vramledger_agent.frameworks.provider import (
    OutOfMemoryMessage,
    Provider,
    module_version,
    read_environment,
    read_tensor,
)
from vramledger_agent.program_errors import belongs_to_program

CONTEXT_MODULE = "tensorflow.python.eager.context"
SESSION_MODULE = "tensorflow.python.client.session"
SEARCH_PAUSE_TO_COST = 10_000
"""The pause after a search for sessions, in times of what it took: 100 ms at 340,000 objects."""

_MIB = 2**20
_POLICY_VARIABLES = ("TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR")
_POLICIES_BY_SIZE = ("no_gpu", "growth", "limit", "fraction", "preallocate")
"""Policies from the smallest to the largest amount that they take; of several devices the largest is
reported."""


class TensorFlow(Provider):
    name = "tensorflow"

    def __init__(self) -> None:
        self._environ: Mapping[str, str] = {}
        self._sessions = Sessions()

    def may_initialise(self) -> bool:
        """Return whether there is a GPU, or a context uses one; a search for sessions takes too long."""
        return provider.may_exist() or self._has_context()

    def _has_context(self) -> bool:
        context = _initialised_context()
        return context is not None and any(_gpus(context, "_physical_devices"))

    def is_initialised(self) -> bool:
        """Return whether a context or a session has made its devices, and there is a GPU that it may use."""
        return self._has_context() or bool(self._sessions.devices())

    def start(self) -> None:
        """Keep a copy of the environment from the moment when the devices were made."""
        self._environ = read_environment(_POLICY_VARIABLES)

    def read(self) -> dict[str, object] | None:
        context = _initialised_context()
        if context is None:  # a program may drop its context (tf.config on tests does)
            return self._read_sessions()
        devices = _device_entries(context)
        return {
            "framework": self.name,
            "version": module_version("tensorflow.python.framework.versions"),
            "supported": devices is not None,
            "allocator": "cuda_malloc_async" if _uses_cuda_malloc_async(context, self._environ) else "bfc",
            "policy": classify_policy(context, self._environ),
            "devices": devices or [],
        }

    def recognise_out_of_memory(self, error: BaseException) -> OutOfMemoryMessage | None:
        """Recognise the error of an operation; one about the host's memory is none."""
        return read_tensor(str(error)) if type(error).__name__ == "ResourceExhaustedError" else None

    def _read_sessions(self) -> dict[str, object] | None:
        devices = self._sessions.devices()
        if not devices:
            return None
        options = self._sessions.gpu_options
        uses_async = _options_use_cuda_malloc_async(options, self._environ)
        return {
            "framework": self.name,
            "version": module_version("tensorflow.python.framework.versions"),
            "supported": False,  # a session does not tell what is in use
            "allocator": "cuda_malloc_async" if uses_async else "bfc",
            "policy": "cuda_malloc_async" if uses_async else _options_policy(options, self._environ),
            "devices": devices,
        }


class Sessions:
    def __init__(self) -> None:
        # of the first session that has a GPU: it made the devices, also for those after it
        self.gpu_options: object = None
        self._devices: list[dict[str, object]] = []
        self._created = 0
        self._next_search = 0.0
        self._unread: list[weakref.ref[object]] = []

    def devices(self) -> list[dict[str, object]]:
        """Return the devices that sessions have made; they stay when the sessions have ended."""
        if not self._devices:
            created = _created_sessions()
            if created > self._created and time.monotonic() >= self._next_search:
                begun = time.monotonic()
                self._unread = [weakref.ref(each) for each in _live_sessions()]
                self._created = created
                ended = time.monotonic()
                self._next_search = ended + (ended - begun) * SEARCH_PAUSE_TO_COST
            self._read()
        return self._devices

    def _read(self) -> None:
        """Read the sessions that were found; one that is still being made is read the next time.

        A session is counted first and has devices only seconds later: it makes CUDA's context in between.
        """
        unread, self._unread = self._unread, []
        for reference in unread:
            session = reference()
            if session is None or self._devices:
                continue
            if getattr(session, "_session", None) is None:
                self._unread.append(reference)
                continue
            try:
                gpu_options = session._config.gpu_options  # type: ignore[attr-defined]
                found = [each for each in session.list_devices() if each.device_type == "GPU"]  # type: ignore[attr-defined]
                ordinals = [int(each) for each in gpu_options.visible_device_list.split(",") if each]
                self._devices = [
                    {"ordinal": _session_ordinal(each.name, ordinals), "limit": int(each.memory_limit_bytes)}
                    for each in found
                ]
            except Exception as error:  # closed meanwhile, or another version
                if belongs_to_program(error):
                    raise
                continue
            if self._devices:
                self.gpu_options = gpu_options


def _created_sessions() -> int:
    counter = getattr(sys.modules.get(SESSION_MODULE), "_python_session_create_counter", None)
    return 0 if counter is None else int(counter.get_cell().value())


def _live_sessions() -> list[object]:
    module = sys.modules[SESSION_MODULE]
    classes = [module.BaseSession]
    for each in classes:
        classes.extend(each.__subclasses__())
    kinds = tuple(dict.fromkeys(classes))
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def _session_ordinal(name: str, ordinals: list[int]) -> int:
    """Return the device's number among those that CUDA shows, from its name in the session."""
    number = int(name.rpartition(":")[2])
    return ordinals[number] if number < len(ordinals) else number


def make_provider() -> TensorFlow:
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
    except (AttributeError, TypeError, ValueError) as error:
        if belongs_to_program(error):
            raise
        return None


def _device_policy(context: object, gpu: object, environ: Mapping[str, str]) -> str:
    if any(limit is not None for limit in _logical_limits(context, gpu)):
        return "limit"
    growth = (context._memory_growth_map or {}).get(gpu)  # type: ignore[attr-defined]
    return _options_policy(_gpu_options(context), environ, growth=growth)


def _options_policy(options: object, environ: Mapping[str, str], *, growth: object = None) -> str:
    # Only these two spellings count; for any other, TensorFlow logs an error and uses the program's setting.
    forced = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if forced == "true" or (forced != "false" and (growth or getattr(options, "allow_growth", False))):
        return "growth"
    if getattr(options, "per_process_gpu_memory_fraction", 0):
        return "fraction"
    return "preallocate"


def _uses_cuda_malloc_async(context: object, environ: Mapping[str, str]) -> bool:
    return _options_use_cuda_malloc_async(_gpu_options(context), environ)


def _options_use_cuda_malloc_async(options: object, environ: Mapping[str, str]) -> bool:
    if environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return True
    return bool(getattr(getattr(options, "experimental", None), "use_cuda_malloc_async", False))


def _gpu_options(context: object) -> object:
    """Return the program's ``ConfigProto`` from the attribute; the property would build a new one."""
    return getattr(getattr(context, "_config", None), "gpu_options", None)


def _initialised_context() -> object | None:
    context: object = getattr(sys.modules.get(CONTEXT_MODULE), "_context", None)
    return context if getattr(context, "_context_handle", None) is not None else None


def _gpus(context: object, attribute: str) -> Iterable[object]:
    # A missing attribute raises: a version that hides it must not look like a version without GPUs.
    for device in tuple(getattr(context, attribute) or ()):
        if getattr(device, "device_type", None) == "GPU":
            yield device


def _logical_limits(context: object, gpu: object) -> list[int | None]:
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
    except Exception as error:
        if belongs_to_program(error):
            raise
        return None
    return entries
