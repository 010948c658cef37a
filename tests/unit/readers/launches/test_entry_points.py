"""Which functions hand work to a GPU, and which libraries do it without them."""

from __future__ import annotations

import pytest

from vramledger.readers.launches.elf import bypasses_library, is_library, submits_work

WORK = """cuLaunchKernel cuLaunchKernel_ptsz cuLaunchKernelEx cuLaunchKernelEx_ptsz
    cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz cuLaunchCooperativeKernelMultiDevice
    cuLaunch cuLaunchGrid cuLaunchGridAsync cuGraphLaunch cuGraphLaunch_ptsz cuMemcpy cuMemcpy_ptds
    cuMemcpyAsync_ptsz cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds cuMemcpyHtoDAsync_v2_ptsz
    cuMemcpyDtoH_v2 cuMemcpyDtoD_v2 cuMemcpyPeerAsync cuMemcpy2D_v2 cuMemcpy2DUnaligned_v2
    cuMemcpy3DPeerAsync_ptsz cuMemcpyAtoHAsync_v2 cuMemcpyBatchAsync cuMemcpy3DBatchAsync
    cuMemcpyBatchAsync_v2 cuMemsetD8_v2 cuMemsetD32Async cuMemsetD2D16Async_ptsz
    cuMemPrefetchAsync_v2 cuStreamWriteValue32_v2 cuStreamBatchMemOp_v2_ptsz
    cuMemBatchDecompressAsync"""

NO_WORK = """cuInit cuCtxCreate_v2 cuMemAlloc_v2 cuMemFree_v2 cuLaunchHostFunc cuStreamSynchronize
    cuEventQuery cuEventRecord cuGraphInstantiate cuGraphUpload cuGraphAddMemcpyNode
    cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams cuGraphExecMemcpyNodeSetParams
    cuStreamWaitEvent cuStreamWaitValue32 cuStreamBeginCapture_v2 cuMemGetInfo_v2 cuMemHostAlloc
    cuFuncGetAttribute cuMemAdvise cuGetProcAddress_v2"""

OF_32_BITS = "cuMemcpyHtoD cuMemcpyDtoHAsync cuMemcpy2D cuMemsetD8 cuMemsetD2D32"


def test_work() -> None:
    """Every form of a launch, a copy, a memset or a stream's write is work."""
    assert [name for name in WORK.split() if not submits_work(name)] == []


def test_no_work() -> None:
    """To ask, to allocate, to wait or to prepare a graph is not work: an idle program may do it for ever."""
    assert list(filter(submits_work, NO_WORK.split())) == []


def test_thirty_two_bits() -> None:
    """A form whose addresses have 32 bits is not counted: nothing that runs today can call it."""
    assert list(filter(submits_work, OF_32_BITS.split())) == []


@pytest.mark.parametrize(
    ("name", "library", "bypass"),
    [
        ("libcuda.so.1", True, False),
        ("libcuda.so.580.159.04", True, False),
        ("libcuda.so", True, False),
        ("libcudart.so.12", False, False),
        ("libcudadebugger.so.1", False, False),
        ("libnvidia-ptxjitcompiler.so.580.95", False, False),
        ("libnvidia-ml.so.1", False, False),
        ("libnvcuvid.so.1", False, True),
        ("libnvidia-encode.so.580.95", False, True),
        ("libnvidia-opencl.so.1", False, True),
        ("libGLX_nvidia.so.0", False, True),
        ("libGLESv2_nvidia.so.2", False, True),
    ],
)
def test_libraries(name: str, library: bool, bypass: bool) -> None:
    """Libcuda is known in every version, and so is what reaches the driver without it."""
    assert (is_library(name), bypasses_library(name)) == (library, bypass)
