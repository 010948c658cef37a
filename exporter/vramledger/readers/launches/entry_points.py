"""Name the functions of libcuda through which a program hands work to a GPU, and libraries that bypass it."""

from __future__ import annotations

import re

LAUNCH = re.compile(
    r"cu(?:LaunchKernel(?:Ex)?|LaunchCooperativeKernel(?:MultiDevice)?|Launch|LaunchGrid(?:Async)?|GraphLaunch)"
    r"(?:_v\d+)?(?:_pt[ds]s|_ptsz)?"
)
"""A kernel or a graph of kernels. The CUDA runtime, cuBLAS and every framework end in one of them: they get
their addresses from ``cuGetProcAddress``, and these are the addresses in the library's own table."""

TRANSFER = re.compile(
    r"cu(?:Memcpy(?!.*(?:GetAttribute|NodeSet))\w*|Memset[DU]\w+|MemPrefetch(?:Batch)?Async\w*"
    r"|MemDiscardAndPrefetchBatchAsync\w*|MemBatchDecompressAsync\w*)"
)
"""A copy, a memset, or a move of managed memory, in every form: ``_v2``, ``_ptds``, ``_ptsz``."""

STREAM_MEMORY = re.compile(r"cuStream(?:Write|BatchMemOp)\w*")
"""A write into memory by a stream."""

_LIBRARY = re.compile(r"libcuda\.so(?:\.[\w.-]+)?")

_BYPASS = re.compile(
    r"lib(?:nvcuvid|nvidia-(?:encode|opencl|opticalflow|glcore|eglcore|vksc-core|glvkspirv)|nvoptix"
    r"|GLX_nvidia|EGL_nvidia|GLESv\w+_nvidia|vdpau_nvidia)\.so"
)
"""Video, OpenCL, OpenGL, Vulkan and OptiX reach the driver by other ways than the functions of libcuda."""


def submits_work(name: str) -> bool:
    """Tell whether a function of libcuda hands work to a GPU."""
    return any(pattern.fullmatch(name) for pattern in (LAUNCH, TRANSFER, STREAM_MEMORY))


def is_library(file_name: str) -> bool:
    """Tell whether a file's name is that of libcuda, in any version."""
    return _LIBRARY.fullmatch(file_name) is not None


def bypasses_library(file_name: str) -> bool:
    """Tell whether a library hands work to a GPU without the functions of libcuda."""
    return _BYPASS.match(file_name) is not None
