"""Declare each framework that takes GPU memory once.

These follow from the declarations: the agent's import hook and start-up file, what the exporter accepts of a
report, the metrics and the JSON schema, which mapped files and variables the exporter looks for, how it
judges a policy, and the words of the page. :data:`FRAMEWORKS` is in the order of precedence: if a program has
loaded several, the first one is assumed to hold the memory. This module imports nothing: see
:mod:`vramledger_agent.protocol.messages`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import dataclass as _declared
else:

    def _declared(kind: type) -> type:
        """Give a class what a dataclass has, its ``__init__``, without that import."""

        def init(self: object, *values: object, **named: object) -> None:
            for name, value in (*zip(kind.__annotations__, values, strict=False), *named.items()):
                setattr(self, name, value)

        kind.__init__ = init
        return kind


# --- what an agent may report ---------------------------------------------------------------------------

POOL_FIGURES = {
    "in_use": "Memory that the program uses now",
    "in_use_peak": "Highest memory that the program used since it began or reset it",
    "pool": "Memory that the allocator has taken from the driver",
    "limit": "Most that the allocator may take from the device",
}
"""The figures that mean the same for every framework, in bytes, and what they mean."""

TORCH_FIGURES = {
    "reserved": "Memory that PyTorch's allocator has taken from the driver",
    "allocated": "Memory of live tensors",
    "active": "Memory of live tensors and of freed ones that a stream may still use",
    "requested": "Memory that the program requested, before rounding",
    "inactive_split": "Free parts of blocks in use, which cannot be freed to the driver (0 with expandable "
    "segments)",
    "reserved_peak": "Highest memory that PyTorch's allocator has taken since the program began or reset it",
    "allocated_peak": "Highest memory of live tensors since the program began or reset it",
    "reclaimable": "Memory that torch.cuda.empty_cache() would free now",
    "largest_free_block": "Largest block that the cache can provide at once",
    "private_pools": "Memory in private pools, such as those of CUDA graphs",
    "small_pool": "Memory that PyTorch's allocator has taken for tensors of up to 1 MiB",
    "large_pool": "Memory that PyTorch's allocator has taken for tensors of more than 1 MiB",
}
"""The figures that only PyTorch has, in bytes, and what they mean."""

COUNTER_FIGURES = {
    "alloc_retries": "Allocations that PyTorch could serve only after flushing its cache",
    "ooms": "Allocations that failed for lack of memory, also those that the program caught",
    "allocations": "Allocations of the program",
}
"""The figures that count events since the program started, and what they mean."""


def _pool_figures(*names: str) -> dict[str, str]:
    return {name: POOL_FIGURES[name] for name in names}


# --- what the environment shows -----------------------------------------------------------------------


@_declared
class Setting:
    """A variable of the environment that decides how a framework takes memory."""

    variable: str
    # what it decides; None where it forbids growth, and the memory pattern decides the rest
    policy: str | None
    why: str  # what it does, worded to follow its name: one clause
    matches: Callable[[str], bool]  # says whether a value does so; never called with an empty value
    # keys of the value's ``key:value`` items that may be shown; the rest of a value is never shown
    keys: tuple[str, ...] = ()


def _is_set(value: str) -> bool:
    return bool(value)


def _is_one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _is_in_any_case(expected: str) -> Callable[[str], bool]:
    return lambda value: value.lower() == expected


def _has_item(item: str) -> Callable[[str], bool]:
    return lambda value: item in value.replace(" ", "").split(",")


def _is_positive_number(value: str) -> bool:
    try:
        return float(value) > 0
    except ValueError:
        return False


# --- what the mapped files show -----------------------------------------------------------------------


class Library:
    """Mapped files that show that a framework is loaded."""

    __slots__ = ("name", "path", "programs", "stems", "weak")

    def __init__(
        self, name: str, *stems: str, programs: tuple[str, ...] = (), path: str = "", weak: bool = False
    ) -> None:
        self.name = name  # in evidence and recordings
        self.stems = stems  # names of shared objects up to ``.so``
        # names of executables that are often linked statically: nothing else is mapped then
        self.programs = programs
        # regular expression for modules of a Python package whose file names other packages share
        self.path = path
        self.weak = weak  # others load it too, so it counts only where nothing else does


# --- what limits it ------------------------------------------------------------------------------------


@_declared
class MemoryLimit:
    """A way to limit what a framework takes, from the next start of the program on."""

    where: str  # ``code`` or ``environment``
    # what to write there, with these fields: ``mib`` and ``bytes`` (the limit), ``share`` (the limit as a
    # share of the device), ``ordinal`` (the framework's number of the device)
    text: str
    about: str  # what it does, and when it must be set: one clause


# --- a framework ---------------------------------------------------------------------------------------


@_declared
class Framework:
    """One framework."""

    name: str  # in labels, JSON and reports
    title: str  # as its makers write it
    libraries: tuple[Library, ...]  # the mapped files that show it
    settings: tuple[Setting, ...] = ()  # variables that decide its policy, the one that wins first
    # its policy by default, and why; None where only the program decides
    default: tuple[str, str] | None = None
    # share of the device, 1 for all free memory, that it takes at its start by default; None where it takes
    # what it needs
    preallocates: float | None = None
    # what its policy is when its memory grew in steps; None where that says nothing
    stepwise: str | None = None
    # programs import it and use another, so a preallocation that only the other makes is the other's
    often_idle: bool = False
    imports: tuple[str, ...] = ()  # frameworks that it imports by itself where they are installed
    # it manages the pool of the frameworks that it is built on, so their agents do not know its policy
    serves: bool = False
    # what frees memory that the program does not need, by policy: what the next start should set, or for
    # ``caching`` what the program should call
    remedies: Mapping[str, str] = {}
    limits: tuple[MemoryLimit, ...] = ()  # how to limit its pool
    # its import shows that the framework is being loaded; the provider hooks into it
    imported_module: str = ""
    announces: bool = False  # its module lets the agent know when it makes its allocator
    provider: str = ""  # the agent's module that reads it; empty if the agent cannot read it
    source: str = ""  # the framework's own function from which the provider gets the figures
    # what the provider may report of a device, and what it means
    figures: Mapping[str, str] = {}
    # which of the figures are those of :data:`POOL_FIGURES`, where they have other names
    general: Mapping[str, str] = {}
    # the provider says what live bytes are for (``messages.CATEGORIES``)
    has_categories: bool = False

    def general_figures(self, figures: Mapping[str, int]) -> dict[str, int]:
        """Return those of :data:`POOL_FIGURES` that follow from its own figures, by their names."""
        general = self.general
        return {name: figures[own] for name in POOL_FIGURES if (own := general.get(name, name)) in figures}


_TORCH_KEYS = (
    *("expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions"),
    *("per_process_memory_fraction", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc"),
)

_NAMED_SHARE = "sets the share of the device that it takes at once"

FRAMEWORKS = (
    Framework(
        # the server that the other libraries work for; libtriton is the compiler that comes with torch
        "triton",
        "Triton",
        libraries=(Library("libtritonserver", "libtritonserver", programs=("tritonserver",)),),
        stepwise="steps",
        serves=True,
    ),
    Framework(
        "vllm",  # built on torch, with a pool of its own on top of torch's
        "vLLM",
        libraries=(Library("vllm", path="vllm/(?:_[A-Za-z]|cumem)"),),
        default=("fraction", "vLLM takes its share of the device (gpu_memory_utilization) when it starts"),
        serves=True,
        remedies={"fraction": "a lower gpu_memory_utilization"},
    ),
    Framework(
        "sglang",
        "SGLang",
        libraries=(Library("sgl_kernel", path="sgl_kernel/(?:[^/]*/)?common_ops"),),
        default=("fraction", "SGLang takes its share of the device (mem_fraction_static) when it starts"),
        serves=True,
        remedies={"fraction": "a lower mem_fraction_static"},
    ),
    Framework(
        "torch",
        "PyTorch",
        libraries=(
            Library(
                "libtorch_cuda",
                "libtorch_cuda",
                *("libtorch_cuda_cpp", "libtorch_cuda_cu"),  # torch 1.10 to 1.13, which was split in two
                "libc10_cuda",  # the only library where torch is linked statically
            ),
        ),
        settings=(
            Setting("PYTORCH_NO_CUDA_MEMORY_CACHING", "platform", "turns its cache off", _is_set),
            # With both set, the older name wins (CUDAAllocatorConfig.h, torch 2.15).
            *(
                setting
                for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
                for setting in (
                    Setting(
                        variable,
                        "cuda_malloc_async",
                        "selects CUDA's own pool",
                        _has_item("backend:cudaMallocAsync"),
                    ),
                    Setting(variable, "caching", "tunes its cache", _is_set, _TORCH_KEYS),
                )
            ),
        ),
        default=("caching", "PyTorch keeps what it freed in a cache, which empty_cache() frees"),
        often_idle=True,
        remedies={"caching": "torch.cuda.empty_cache()"},
        limits=(
            MemoryLimit(
                "code",
                "torch.cuda.set_per_process_memory_fraction({share}, {ordinal})",
                "limits the cache and all tensors, not the context",
            ),
        ),
        imported_module="torch.cuda",
        announces=True,
        provider="vramledger_agent.frameworks.torch",
        source="torch.cuda.memory_stats()",
        figures={**TORCH_FIGURES, **COUNTER_FIGURES},
        general={"in_use": "allocated", "in_use_peak": "allocated_peak", "pool": "reserved"},
        has_categories=True,
    ),
    Framework(
        "jax",
        "JAX",
        libraries=(
            Library(
                "xla_cuda_plugin",
                "xla_cuda_plugin",  # jax_plugins/xla_cuda12, xla_cuda13
                "pjrt_c_api_gpu_plugin",  # the same, as Bazel names it
                "cuda_plugin_extension",  # jax_cuda12_plugin, jax_cuda13_plugin
            ),
            # For jaxlib 0.6 and later, then for earlier ones; a jaxlib without CUDA, for data, is loaded
            # beside many others.
            Library("libjax_common", "libjax_common", "xla_extension", weak=True),
        ),
        settings=(
            Setting(
                "XLA_PYTHON_CLIENT_ALLOCATOR",
                "platform",
                "selects the driver's own allocations",
                _is_in_any_case("platform"),
            ),
            Setting(
                "XLA_PYTHON_CLIENT_ALLOCATOR",
                "cuda_malloc_async",
                "selects CUDA's own pool",
                _is_in_any_case("cuda_async"),
            ),
            Setting("XLA_PYTHON_CLIENT_PREALLOCATE", "growth", "is off", _is_one_of("0", "false", "False")),
            # The second is the older name; with both set JAX refuses to start.
            Setting("XLA_CLIENT_MEM_FRACTION", "fraction", _NAMED_SHARE, _is_positive_number),
            Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", "fraction", _NAMED_SHARE, _is_positive_number),
        ),
        preallocates=0.75,
        stepwise="growth",
        often_idle=True,
        remedies={"fraction": "XLA_PYTHON_CLIENT_PREALLOCATE=false"},
        limits=(
            MemoryLimit(
                "environment",
                "XLA_PYTHON_CLIENT_MEM_FRACTION={share}",
                "takes so much of each device at once, and no more; newer versions call it "
                "XLA_CLIENT_MEM_FRACTION, and refuse to start with both",
            ),
            MemoryLimit(
                "environment", "XLA_PYTHON_CLIENT_PREALLOCATE=false", "takes only what it needs, up to that"
            ),
        ),
        imported_module="jax._src.xla_bridge",
        announces=True,
        provider="vramledger_agent.frameworks.jax",
        source="Device.memory_stats()",
        figures=POOL_FIGURES,
    ),
    Framework(
        "tensorflow",
        "TensorFlow",
        libraries=(
            Library(
                "libtensorflow",
                *("libtensorflow_framework", "libtensorflow_cc"),
                "libtensorflow",  # the C library (Go, Java, Rust)
                "_pywrap_tensorflow_internal",  # tensorflow 2.12 and earlier
            ),
        ),
        settings=(
            # TensorFlow reads it in C++ when it makes the device; it logs other spellings as errors and
            # ignores them.
            Setting(
                "TF_GPU_ALLOCATOR",
                "cuda_malloc_async",
                "selects CUDA's own pool",
                _is_one_of("cuda_malloc_async"),
            ),
            Setting("TF_FORCE_GPU_ALLOW_GROWTH", "growth", "is true", _is_one_of("true")),
            Setting("TF_FORCE_GPU_ALLOW_GROWTH", None, "is false", _is_one_of("false")),
        ),
        preallocates=1,
        stepwise="growth",
        imports=("jax",),  # tensorflow.lite.python.util of 2.21
        remedies={"preallocate": "TF_FORCE_GPU_ALLOW_GROWTH=true"},
        limits=(
            MemoryLimit(
                "code",
                'tf.config.set_logical_device_configuration(tf.config.list_physical_devices("GPU")'
                "[{ordinal}], [tf.config.LogicalDeviceConfiguration(memory_limit={mib})])",
                "takes so much at once, and no more; before the first operation",
            ),
            MemoryLimit(
                "environment", "TF_FORCE_GPU_ALLOW_GROWTH=true", "instead: takes only what it needs, no limit"
            ),
        ),
        imported_module="tensorflow.python.eager.context",
        provider="vramledger_agent.frameworks.tensorflow",
        source="get_memory_info()",
        figures=_pool_figures("in_use", "in_use_peak", "limit"),
    ),
    Framework(
        "paddle",
        "PaddlePaddle",
        libraries=(Library("libpaddle", "libpaddle", "libphi_core"),),
        default=("growth", "Paddle's pool grows as needed"),
    ),
    Framework(
        "mxnet",
        "MXNet",
        libraries=(Library("libmxnet", "libmxnet"),),
        default=("caching", "MXNet keeps what it freed in a pool"),
    ),
    Framework(
        "rmm",  # must precede cupy, which every RAPIDS program has loaded
        "RMM",
        libraries=(Library("librmm", "librmm"),),
        stepwise="steps",
        imported_module="rmm",
        provider="vramledger_agent.frameworks.rmm",
        limits=(
            MemoryLimit(
                "code",
                "rmm.reinitialize(pool_allocator=True, maximum_pool_size={bytes})",
                "limits the pool; before the first allocation",
            ),
        ),
        source="rmm.statistics",
        figures=_pool_figures("in_use", "in_use_peak", "pool"),
    ),
    Framework(
        "cupy",
        "CuPy",
        libraries=(Library("cupy", path="cupy(?:/_core|/cuda|_backends/cuda)"),),
        default=("caching", "CuPy keeps what it freed in a pool, which free_all_blocks() frees"),
        remedies={"caching": "free_all_blocks()"},
        imported_module="cupy",
        provider="vramledger_agent.frameworks.cupy",
        source="get_default_memory_pool()",
        figures=_pool_figures("in_use", "pool", "limit"),
    ),
    Framework(
        "onnxruntime",  # must precede TensorRT, which it may use
        "ONNX Runtime",
        libraries=(
            Library(
                "libonnxruntime_providers_cuda",
                *("libonnxruntime_providers_cuda", "libonnxruntime_providers_tensorrt"),
            ),
        ),
        default=("growth", "ONNX Runtime's arena grows as needed and frees nothing"),
    ),
    Framework(
        "tensorrt",
        "TensorRT",
        libraries=(
            Library(
                "libnvinfer",
                *("libnvinfer", "libnvinfer_lean", "libnvinfer_dispatch", "libnvinfer_plugin"),
                "libtensorrt_llm",
            ),
        ),
        stepwise="steps",
    ),
    Framework(
        "llama.cpp",
        "llama.cpp",
        libraries=(
            Library(
                "libggml-cuda",
                *("libggml-cuda", "libggml_cuda", "libllama"),  # llama.cpp, ollama, llama-cpp-python
                programs=("llama-server", "llama-cli", "ollama_llama_server"),
            ),
        ),
        stepwise="steps",
    ),
    Framework("cuda", "CUDA", libraries=(Library("libcuda", "libcuda", weak=True),)),
)

FRAMEWORKS_BY_NAME = {framework.name: framework for framework in FRAMEWORKS}

REPORTING_FRAMEWORKS = {framework.name: framework for framework in FRAMEWORKS if framework.provider}
