"""Which framework holds memory, and by which policy it takes it: judged from outside, without the agent.

Three kinds of evidence, in this order: the environment that the program was started with, the memory
pattern of its holding, and what the framework does unless told otherwise. What a program sets in itself
(``set_memory_growth``, ``os.environ``) is visible in none of them but the pattern. Nothing of a variable's
value ever gets into a verdict, only the names of this module.

The figures (H200, 143,771 MiB): TensorFlow takes 141,350 MiB at its first operation, elsewhere 22,885 of
24,265 and 47,853 of 48,000 were published; JAX takes 75 %, 107,986 MiB; a context alone is 518 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vramledger.model.policy import UNKNOWN, Policy

MIB = 2**20
STEP_BYTES = 128 * MIB
"""A rise below this is a context, a library's code or its workspace (cuBLAS: 68 MiB), and no step."""

GROWTH_STEPS = 3
"""So many steps make growth: TensorFlow with a limit takes a context, its pool and perhaps a second one."""

PREALLOCATED_SHARE = 0.9
"""Share of what was free that only a preallocation takes in one go."""

LATE_PREALLOCATED_SHARE = 0.95
"""Share of a device that says preallocation when the jump itself was not seen."""

JAX_SHARE = (0.72, 0.75)
"""JAX's default share of the device, from somewhat below, for the driver's reserve is not in its total."""

JAX_CONTEXT_BYTES = 1024 * MIB
"""What a JAX process may hold beyond its pool: the context, cuBLAS and cuDNN."""

FRAMEWORKS: Mapping[str, str] = {
    # By the library that is mapped. Several: the first here wins, see _framework for the exceptions.
    "libtritonserver": "triton",  # the server that the other libraries work for
    "vllm": "vllm",  # built on torch, with a pool of its own over torch's
    "sgl_kernel": "sglang",
    "libtorch_cuda": "pytorch",
    "xla_cuda_plugin": "jax",
    "libtensorflow": "tensorflow",
    "libpaddle": "paddle",
    "libmxnet": "mxnet",
    "librmm": "rmm",  # before cupy, which every RAPIDS program has loaded
    "cupy": "cupy",
    "libonnxruntime_providers_cuda": "onnxruntime",  # before TensorRT, which it may use
    "libnvinfer": "tensorrt",
    "libggml-cuda": "llama.cpp",
    "libjax_common": "jax",  # last: a jaxlib without CUDA, for data, is loaded beside many others
    "libcuda": "cuda",
}

_DEFAULTS: Mapping[str, tuple[str, str]] = {
    # What a framework does unless told otherwise, where nothing but the framework decides.
    "pytorch": ("caching", "PyTorch keeps what it freed in a cache, which empty_cache() gives back"),
    "cupy": ("caching", "CuPy keeps what it freed in a pool, which free_all_blocks() gives back"),
    "mxnet": ("caching", "MXNet keeps what it freed in a pool"),
    "onnxruntime": ("growth", "ONNX Runtime's arena grows as needed and gives nothing back"),
    "paddle": ("growth", "Paddle's pool grows as needed"),
    "vllm": ("fraction", "vLLM takes its share of the device (gpu_memory_utilization) when it starts"),
    "sglang": ("fraction", "SGLang takes its share of the device (mem_fraction_static) when it starts"),
}


class MemoryPattern(NamedTuple):
    """How a holding came about; bytes.

    Attributes:
        memory: held now.
        total: of the device.
        watched: we saw it appear, so its first bytes were taken in the time of one sample.
        jump: the largest rise between two samples; the first bytes count when it was watched.
        left: what was free on the device after that rise, None when not known.
        steps: rises of at least :data:`STEP_BYTES` after the first sight.
    """

    memory: int
    total: int
    watched: bool = False
    jump: int = 0
    left: int | None = None
    steps: int = 0

    def after_change(self, memory: int, free: int | None) -> MemoryPattern:
        """Return the pattern after the holding has come to another size."""
        rise = memory - self.memory
        steps = self.steps + (rise >= STEP_BYTES)
        if rise > self.jump:
            return self._replace(memory=memory, jump=rise, left=free, steps=steps)
        return self._replace(memory=memory, steps=steps)


Found = tuple[str, str, str]
"""A policy, its source and why."""


def classify(
    libraries: Sequence[str] | None,
    settings: Sequence[tuple[str, str]],
    patterns: Sequence[MemoryPattern] = (),
    *,
    environ: bool = True,
) -> Policy:
    """Say which framework a process uses and by which policy it takes memory.

    Args:
        libraries: what it has mapped, by the names of :mod:`vramledger.readers.hosts.libraries`;
            None when they could not be read.
        settings: the allow-listed variables of its environment.
        patterns: of its holdings, a device each; the one with the largest share of its device counts.
        environ: whether the environment could be read.
    """
    pattern = max(patterns, key=lambda each: each.memory / max(1, each.total), default=None)
    framework = _framework(libraries, pattern)
    found = _by_environment(framework, dict(settings), pattern) or _by_pattern(framework, pattern)
    if found is None and framework in _DEFAULTS:
        policy, why = _DEFAULTS[framework]
        found = (policy, "default", why)
    if found is None:
        found = (UNKNOWN, "none", _undecided(framework, libraries, pattern))
    policy, source, why = found
    if not environ and source != "environ":
        why += "; its environment is not readable to us"
    return Policy(framework, policy, source, why)


def _framework(libraries: Sequence[str] | None, pattern: MemoryPattern | None) -> str:
    """Choose the one that holds the memory, where several are loaded.

    A library that is only imported holds nothing: TensorFlow comes into a torch program with
    TensorBoard, and into a JAX program with its data. So of torch, JAX and TensorFlow the first is
    assumed, unless the holding has the memory pattern that only one of the others makes.
    """
    names = {FRAMEWORKS[library] for library in libraries or () if library in FRAMEWORKS}
    first = next((name for name in FRAMEWORKS.values() if name in names), UNKNOWN)
    if libraries is not None and first == "jax" and "xla_cuda_plugin" not in libraries:
        # jaxlib without its CUDA plugin cannot have taken the memory when another can.
        others = [name for name in FRAMEWORKS.values() if name in names - {"jax", "cuda"}]
        first = others[0] if others else first
    if pattern is not None and first in ("pytorch", "jax"):
        if "xla_cuda_plugin" in (libraries or ()) and _took_jax_share(pattern, seen=True):
            return "jax"
        if "tensorflow" in names and _took_all(pattern):
            return "tensorflow"
    return first


def _by_environment(
    framework: str, settings: Mapping[str, str], pattern: MemoryPattern | None
) -> Found | None:
    if framework == "tensorflow":
        return _tensorflow(settings, pattern)
    if framework == "jax":
        return _jax(settings)
    if framework == "pytorch":
        return _pytorch(settings)
    return None


def _tensorflow(settings: Mapping[str, str], pattern: MemoryPattern | None) -> Found | None:
    # Read in C++ when the device is made; other spellings are logged as errors and ignored.
    if settings.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return "cuda_malloc_async", "environ", "TF_GPU_ALLOCATOR asks for CUDA's own pool"
    growth = settings.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if growth == "true":
        return "growth", "environ", "TF_FORCE_GPU_ALLOW_GROWTH is true"
    if growth == "false":
        if pattern is not None and _took_all(pattern):
            return "preallocate", "environ", f"TF_FORCE_GPU_ALLOW_GROWTH is false, and {_held(pattern)}"
        if pattern is not None and _settled_low(pattern):
            return "limit", "pattern", f"its growth is forbidden, yet {_held(pattern)}"
    return None


def _jax(settings: Mapping[str, str]) -> Found | None:
    allocator = settings.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower()
    if allocator == "platform":
        return "platform", "environ", "XLA_PYTHON_CLIENT_ALLOCATOR asks for the driver's own allocations"
    if allocator == "cuda_async":
        return "cuda_malloc_async", "environ", "XLA_PYTHON_CLIENT_ALLOCATOR asks for CUDA's own pool"
    if settings.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("0", "false", "False"):
        return "growth", "environ", "XLA_PYTHON_CLIENT_PREALLOCATE is off"
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if _is_number(settings.get(name, "")):
            return "fraction", "environ", f"{name} sets the share of the device that it takes at once"
    return None


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _pytorch(settings: Mapping[str, str]) -> Found | None:
    if settings.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "platform", "environ", "PYTORCH_NO_CUDA_MEMORY_CACHING turns its cache off"
    # With both set, the older name wins (CUDAAllocatorConfig.h, torch 2.15).
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if conf := settings.get(name):
            pairs = dict(_pair(item) for item in conf.replace(" ", "").split(","))
            if pairs.get("backend") == "cudaMallocAsync":
                return "cuda_malloc_async", "environ", f"{name} asks for CUDA's own pool"
            known = ", ".join(key for key in _PYTORCH_KEYS if key in pairs)
            return "caching", "environ", f"{name} tunes its cache" + (f" ({known})" if known else "")
    return None


_PYTORCH_KEYS = (
    *("expandable_segments", "max_split_size_mb", "garbage_collection_threshold", "roundup_power2_divisions"),
    *("per_process_memory_fraction", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc"),
)


def _pair(item: str) -> tuple[str, str]:
    key, _, value = item.partition(":")
    return key, value


def _by_pattern(framework: str, pattern: MemoryPattern | None) -> Found | None:
    found: Found | None = None
    if pattern is None:
        return None
    held = _held(pattern)
    if framework == "jax" and _took_jax_share(pattern):
        found = ("fraction", "pattern", f"{held}, and three quarters is JAX's default")
    elif framework == "jax" and _took_all(pattern):
        found = ("fraction", "pattern", f"{held}, more than JAX's default of three quarters")
    elif framework == "tensorflow" and _took_all(pattern):
        found = ("preallocate", "pattern", f"{held}, having taken nearly all that was free")
    elif (
        framework == "tensorflow"
        and not pattern.steps
        and pattern.memory >= LATE_PREALLOCATED_SHARE * pattern.total
    ):
        found = ("preallocate", "pattern", f"{held}, as by TensorFlow's default; we did not see it taken")
    elif framework in ("cuda", UNKNOWN) and pattern.jump >= PREALLOCATED_SHARE * pattern.total:
        found = ("preallocate", "pattern", held)
    elif framework in ("jax", "tensorflow") and pattern.steps >= GROWTH_STEPS:
        found = ("growth", "pattern", f"{held} after growing in {pattern.steps} steps")
    elif framework in _STEPPING_FRAMEWORKS and pattern.steps >= GROWTH_STEPS:
        found = ("steps", "pattern", f"{held} after growing in {pattern.steps} steps")
    return found


_STEPPING_FRAMEWORKS = frozenset({"rmm", "tensorrt", "triton", "llama.cpp"})
"""Frameworks whose policy is their user's choice, so that only the pattern tells of it."""


def _took_all(pattern: MemoryPattern) -> bool:
    """Tell whether nearly all that was free was taken between two samples, and little before that."""
    if pattern.jump >= PREALLOCATED_SHARE * pattern.total:
        return True
    if pattern.left is None or pattern.jump < pattern.total / 4:
        return False  # on a full device the little that is left is taken by anybody
    return pattern.jump >= PREALLOCATED_SHARE * max(pattern.jump + pattern.left, pattern.memory)


def _took_jax_share(pattern: MemoryPattern, *, seen: bool = False) -> bool:
    """Tell whether it took three quarters of the device between two samples.

    When its first bytes were not watched, holding that much from the start will do, unless it must be
    ``seen``.
    """
    low, high = JAX_SHARE[0] * pattern.total, JAX_SHARE[1] * pattern.total + JAX_CONTEXT_BYTES
    late = not pattern.watched and not pattern.steps and not seen
    return low <= pattern.jump <= high or (late and low <= pattern.memory <= high)


def _settled_low(pattern: MemoryPattern) -> bool:
    """Tell whether its pool came in one go and is far from all: a fixed limit."""
    return pattern.watched and pattern.jump >= STEP_BYTES and 2 * pattern.memory < pattern.total


def _held(pattern: MemoryPattern) -> str:
    share = f"{pattern.memory / max(1, pattern.total):.0%} of the device"
    if pattern.jump * 2 > pattern.memory:
        return f"it took {pattern.jump // MIB} MiB between two samples and holds {share}"
    return f"it holds {share}"


def _undecided(framework: str, libraries: Sequence[str] | None, pattern: MemoryPattern | None) -> str:
    if libraries is None:
        return "what it has loaded is not readable to us"
    if framework == UNKNOWN:
        return "it has loaded no framework that we know"
    if framework == "cuda":
        return "it uses CUDA itself: it takes what it asks for"
    if framework in ("tensorflow", "jax") and pattern is not None:
        return f"{_held(pattern)}, which is not the default; growth or a limit, set inside the program"
    return f"{framework} leaves its policy to the program"
