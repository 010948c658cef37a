"""Which GPU frameworks a process has loaded, and what its environment tells their allocators.

Of the mapped files and of the environment only what the two tables below name is kept: nothing of a
foreign path leaves this module, and no variable that is not on the list.
"""

from __future__ import annotations

import re

from vramledger.agent_protocol.messages import ENABLE_VARIABLE
from vramledger.printable import printable
from vramledger.readers.hosts.program_names import REPLACEMENT

MAPS_CAP = 8 * 1024 * 1024
"""A mapping takes about 120 bytes, and the kernel allows a process 65,530 of them unless told otherwise."""

LONGEST_SETTING = 256

_LIBRARY_BY_STEM = {
    # File name up to ".so" -> the sign that is kept. From the projects' wheels and images.
    b"libtorch_cuda": "libtorch_cuda",
    b"libtorch_cuda_cpp": "libtorch_cuda",  # torch 1.10 to 1.13, which was split in two
    b"libtorch_cuda_cu": "libtorch_cuda",
    b"libc10_cuda": "libtorch_cuda",  # alone where torch is linked statically
    b"libtensorflow_framework": "libtensorflow",
    b"libtensorflow_cc": "libtensorflow",
    b"libtensorflow": "libtensorflow",  # the C library (Go, Java, Rust)
    b"_pywrap_tensorflow_internal": "libtensorflow",  # tensorflow 2.12 and earlier
    b"xla_cuda_plugin": "xla_cuda_plugin",  # jax_plugins/xla_cuda12, xla_cuda13
    b"pjrt_c_api_gpu_plugin": "xla_cuda_plugin",  # the same, as Bazel names it
    b"cuda_plugin_extension": "xla_cuda_plugin",  # jax_cuda12_plugin, jax_cuda13_plugin
    b"libjax_common": "libjax_common",  # jaxlib 0.6 and later, also without CUDA
    b"xla_extension": "libjax_common",  # jaxlib before that
    b"librmm": "librmm",
    b"libonnxruntime_providers_cuda": "libonnxruntime_providers_cuda",
    b"libonnxruntime_providers_tensorrt": "libonnxruntime_providers_cuda",
    b"libnvinfer": "libnvinfer",
    b"libnvinfer_lean": "libnvinfer",
    b"libnvinfer_dispatch": "libnvinfer",
    b"libnvinfer_plugin": "libnvinfer",
    b"libtensorrt_llm": "libnvinfer",
    b"libtritonserver": "libtritonserver",  # not libtriton, which is the compiler that torch brings
    b"libggml-cuda": "libggml-cuda",  # llama.cpp, ollama, llama-cpp-python
    b"libggml_cuda": "libggml-cuda",
    b"libllama": "libggml-cuda",
    b"libpaddle": "libpaddle",
    b"libphi_core": "libpaddle",
    b"libmxnet": "libmxnet",
    b"libcuda": "libcuda",  # the driver: a program that uses CUDA itself has nothing else
}
_LIBRARY_BY_PROGRAM = {
    # Programs that are often linked statically: the executable is all that is mapped.
    b"tritonserver": "libtritonserver",
    b"llama-server": "libggml-cuda",
    b"llama-cli": "libggml-cuda",
    b"ollama_llama_server": "libggml-cuda",
}
_PACKAGES = re.compile(
    # Packages whose modules have names that anybody's may have.
    rb"/(?:(cupy(?:/_core|/cuda|_backends/cuda))|(vllm)/(?:_[A-Za-z]|cumem)|(sgl_kernel)/(?:[^/]*/)?common_ops)"
    rb"[^\n]*\.so$"
)
_PACKAGE_NAMES = ("cupy", "vllm", "sgl_kernel")
LIBRARIES = tuple(dict.fromkeys((*_LIBRARY_BY_STEM.values(), *_LIBRARY_BY_PROGRAM.values(), *_PACKAGE_NAMES)))
"""Every value that ``ProcessFacts.libraries`` may hold."""

SETTINGS = (
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_GPU_ALLOCATOR",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",  # its older name follows; with both set JAX refuses to start
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "CUDA_MPS_CLIENT_PRIORITY",
    ENABLE_VARIABLE,  # whether it was started with our agent
)
"""The variables that steer GPU memory or our agent, by full names: a prefix lets in what we do not know."""


def find_libraries(maps: bytes) -> tuple[str, ...]:
    """Return the libraries of frameworks that are in a ``maps``, in the order of :data:`LIBRARIES`."""
    # Nothing before the path has a slash, and a library is mapped in five pieces or so.
    paths = {line.partition(b"/")[2] for line in maps.split(b"\n")}
    found: set[str] = set()
    for path in paths:
        file = b"/" + path.removesuffix(b" (deleted)")  # upgraded under a running program
        name = file.rpartition(b"/")[2]
        stem, dot, _ = name.partition(b".so")
        library = _LIBRARY_BY_STEM.get(stem) if dot else _LIBRARY_BY_PROGRAM.get(name)
        if library is not None:
            found.add(library)
        elif dot and (match := _PACKAGES.search(file)):
            found.add(_PACKAGE_NAMES[(match.lastindex or 1) - 1])
    return tuple(library for library in LIBRARIES if library in found)


def find_settings(environment: bytes) -> tuple[tuple[str, str], ...]:
    """Return the allow-listed variables of an environment that begins with a zero byte.

    The first of a name counts, as for ``getenv``. Values are cut and made printable.
    """
    found: list[tuple[str, str]] = []
    for name in SETTINGS:
        mark = b"\0" + name.encode() + b"="
        begin = environment.find(mark)
        if begin >= 0:
            begin += len(mark)
            # Cut before the end is sought, and at four bytes a character at most.
            value = environment[begin : begin + 4 * LONGEST_SETTING].partition(b"\0")[0]
            found.append((name, printable(value.decode(errors="replace"), REPLACEMENT)[:LONGEST_SETTING]))
    return tuple(found)


def names_framework(libraries: tuple[str, ...] | None) -> bool:
    """Say whether the libraries name a framework, or whether more may be loaded yet."""
    return libraries is not None and any(library != "libcuda" for library in libraries)
