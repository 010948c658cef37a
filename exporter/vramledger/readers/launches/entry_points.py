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

_THIRTY_TWO_BITS = re.compile(
    r"cu(?:Memcpy(?:HtoD|DtoH|DtoD|DtoA|AtoD|HtoA|AtoH|AtoA|2D|3D)(?:Async)?|Memcpy2DUnaligned"
    r"|Memset(?:D|D2D)(?:8|16|32))"
)
"""The forms of CUDA 3.1 and older, whose addresses have 32 bits: no address of today fits. libcuda 580 still
has 24 of them, beside 114 others."""

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
    if _THIRTY_TWO_BITS.fullmatch(name):
        return False
    return any(pattern.fullmatch(name) for pattern in (LAUNCH, TRANSFER, STREAM_MEMORY))


def is_library(file_name: str) -> bool:
    """Tell whether a file's name is that of libcuda, in any version."""
    return _LIBRARY.fullmatch(file_name) is not None


def bypasses_library(file_name: str) -> bool:
    """Tell whether a library hands work to a GPU without the functions of libcuda."""
    return _BYPASS.match(file_name) is not None
