"""Framework and memory policy: real library names, published cases, hostile input, and over time."""

import re
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.host.model import GIB, MIB
from tests.support.host.one_holder import SHELL, OneHolder
from tests.support.sure import sure
from vramledger.accounting.holders.policies import MemoryPattern, classify
from vramledger.accounting.holders.processes import SETTLED_AFTER
from vramledger.model.reading import Owner, ProcessFacts, Rank
from vramledger.model.snapshot import Policy, ProcessSnapshot
from vramledger.readers.hosts.facts import (
    LIBRARIES,
    LONGEST_SETTING,
    SETTINGS,
    find_libraries,
    find_settings,
    names_framework,
)
from vramledger.views.table import render_table
from vramledger_agent.protocol.frameworks import FRAMEWORKS

SITE = "usr/lib/python3.12/site-packages"
MODULE = "cpython-312-x86_64-linux-gnu.so"
H200 = 143_771 * MIB

PATHS = [
    # A path as its wheel or image installs it, and the framework that it shows.
    (f"{SITE}/torch/lib/libtorch_cuda.so", "torch"),
    (f"{SITE}/torch/lib/libc10_cuda.so", "torch"),
    (f"{SITE}/torch/lib/libtorch_cuda_cpp.so", "torch"),
    (f"{SITE}/torch/lib/libtorch_cuda_cu.so", "torch"),
    ("opt/pytorch/libtorch_cuda.so (deleted)", "torch"),
    (f"{SITE}/torch/lib/libtorch_cpu.so", "unknown"),
    (f"{SITE}/tensorflow/libtensorflow_framework.so.2", "tensorflow"),
    (f"{SITE}/tensorflow/libtensorflow_cc.so.2", "tensorflow"),
    (f"{SITE}/tensorflow/python/_pywrap_tensorflow_internal.so", "tensorflow"),
    ("usr/local/lib/libtensorflow.so.2.18.0", "tensorflow"),
    (f"{SITE}/jax_plugins/xla_cuda13/xla_cuda_plugin.so", "jax"),
    (f"{SITE}/jax_cuda12_plugin/cuda_plugin_extension.so", "jax"),
    ("opt/xla/pjrt_c_api_gpu_plugin.so", "jax"),
    (f"{SITE}/jaxlib/libjax_common.so", "jax"),
    (f"{SITE}/jaxlib/xla_extension.so", "jax"),
    (f"{SITE}/cupy/_core/core.{MODULE}", "cupy"),
    (f"{SITE}/cupy/cuda/memory.{MODULE}", "cupy"),
    (f"{SITE}/cupy_backends/cuda/api/runtime.{MODULE}", "cupy"),
    (f"{SITE}/librmm/lib64/librmm.so", "rmm"),
    (f"{SITE}/onnxruntime/capi/libonnxruntime_providers_cuda.so", "onnxruntime"),
    (f"{SITE}/onnxruntime/capi/libonnxruntime_providers_tensorrt.so", "onnxruntime"),
    (f"{SITE}/onnxruntime/capi/onnxruntime_pybind11_state.{MODULE}", "unknown"),  # also without CUDA
    (f"{SITE}/tensorrt_libs/libnvinfer.so.10", "tensorrt"),
    (f"{SITE}/tensorrt_libs/libnvinfer_plugin.so.10", "tensorrt"),
    (f"{SITE}/tensorrt_lean_libs/libnvinfer_lean.so.10", "tensorrt"),
    (f"{SITE}/tensorrt_dispatch_libs/libnvinfer_dispatch.so.10", "tensorrt"),
    (f"{SITE}/tensorrt_llm/libs/libtensorrt_llm.so", "tensorrt"),
    ("opt/tritonserver/lib/libtritonserver.so", "triton"),
    ("opt/tritonserver/bin/tritonserver", "triton"),
    (f"{SITE}/triton/_C/libtriton.so", "unknown"),  # the compiler of the same name, which torch brings
    ("usr/local/lib/ollama/cuda_v12/libggml-cuda.so", "llama.cpp"),
    *((f"{SITE}/llama_cpp/lib/libllama.so", "llama.cpp"), ("usr/lib/libggml_cuda.so", "llama.cpp")),
    *(("app/llama-server", "llama.cpp"), ("app/llama-cli", "llama.cpp")),
    ("usr/lib/ollama/runners/cuda_v12/ollama_llama_server", "llama.cpp"),
    *((f"{SITE}/vllm/_C.abi3.so", "vllm"), (f"{SITE}/vllm/cumem_allocator.abi3.so", "vllm")),
    (f"{SITE}/sgl_kernel/sm90/common_ops.abi3.so", "sglang"),
    *((f"{SITE}/paddle/base/libpaddle.so", "paddle"), (f"{SITE}/paddle/libs/libphi_core.so", "paddle")),
    *((f"{SITE}/mxnet/libmxnet.so", "mxnet"), ("usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "cuda")),
    *(("usr/lib/x86_64-linux-gnu/libcudart.so.13", "unknown"), ("home/ada/libtorch_cuda.py", "unknown")),
    *(("home/ada/libtorch_cuda.so/notes.txt", "unknown"), ("home/ada/cupy/_core/notes.txt", "unknown")),
]
ANONYMOUS = b"7f0c5e600000-7f0c5e8a2000 rw-p 00000000 00:00 0 \n7ffd0-7ffd1 rw-p 0 00:00 0    [stack]\n"
EMPTY_CARD = MemoryPattern(518 * MIB, H200, watched=True, jump=518 * MIB, left=142_000 * MIB)
"""A context has appeared on an H200, and nothing else."""
TF, JAX, TORCH = "libtensorflow", "xla_cuda_plugin", "libtorch_cuda"
NAMES = st.sampled_from([*SETTINGS, "TOKEN"]).map(str.encode)
ENVIRONMENTS = st.lists(st.tuples(NAMES, st.binary(max_size=300)))


def mapping(path: str) -> bytes:
    """Write the line of a ``maps`` as the kernel does."""
    return "7f0c5e600000-7f0c5e8a2000 r-xp 00000000 fd:01 1049".ljust(73).encode() + f"/{path}\n".encode()


@pytest.mark.parametrize(("path", "framework"), PATHS)
def test_a_library_tells_its_framework(path: str, framework: str) -> None:
    """Each project's installed files show their framework; similar files show none."""
    signs = find_libraries(ANONYMOUS + mapping(path) + ANONYMOUS + mapping(path))
    assert classify(signs, ()).framework == framework
    assert names_framework(signs) is (framework not in ("unknown", "cuda"))


def test_every_library_has_a_path_here() -> None:
    """A path of a real installation tests each file and program that shows a framework."""
    paths = " ".join(path for path, _ in PATHS)
    untried = {
        name
        for framework in FRAMEWORKS
        for library in framework.libraries
        for name in (*library.stems, *library.programs)
        if not re.search(rf"/{re.escape(name)}(\.|$| )", paths)
    }
    assert untried == set()


def taken(memory: int, total: int = 143_771, left: int | None = None) -> MemoryPattern:
    """Take this number of MiB at once after a context, while the exporter watches."""
    return stepwise(total=total).after_change(memory * MIB, (total - memory if left is None else left) * MIB)


def stepwise(*sizes: int, total: int = 143_771) -> MemoryPattern:
    """Grow to each of these sizes (MiB) in turn."""
    pattern = MemoryPattern(518 * MIB, total * MIB, watched=True, jump=518 * MIB, left=(total - 518) * MIB)
    for size in sizes:
        pattern = pattern.after_change(size * MIB, (total - size) * MIB)
    return pattern


def found_late(memory: int, total: int = 143_771) -> MemoryPattern:
    """Exist before the exporter starts."""
    return MemoryPattern(memory * MIB, total * MIB)


@pytest.mark.parametrize(
    ("libraries", "settings", "pattern", "expected"),
    [
        # measured on an H200 (TensorFlow 2.21, JAX, torch), and published
        ((TF,), {}, taken(141_350), "tensorflow preallocate pattern"),
        ((TF,), {}, taken(22_885, 24_265), "tensorflow preallocate pattern"),
        ((TF,), {}, taken(47_853, 48_000), "tensorflow preallocate pattern"),
        ((TF,), {}, taken(60_000, left=1_800), "tensorflow preallocate pattern"),  # a shared card
        ((TF,), {}, found_late(141_350), "tensorflow preallocate pattern"),
        ((TF,), {}, found_late(120_000), "tensorflow unknown none"),
        ((TF,), {}, stepwise(800, 1_400, 2_700), "tensorflow growth pattern"),
        ((TF,), {}, stepwise(1_544, 1_612), "tensorflow unknown none"),  # memory_limit=1024, then cuBLAS
        ((TF,), {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, stepwise(534), "tensorflow growth environ"),
        ((TF,), {"TF_FORCE_GPU_ALLOW_GROWTH": "True"}, taken(141_350), "tensorflow preallocate pattern"),
        ((TF,), {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, taken(141_350), "tensorflow preallocate environ"),
        ((TF,), {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, taken(1_544), "tensorflow limit pattern"),
        ((TF,), {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, None, "tensorflow cuda_malloc_async environ"),
        ((JAX,), {}, taken(107_986), "jax fraction pattern"),
        ((JAX,), {}, found_late(107_918), "jax fraction pattern"),
        ((JAX,), {}, taken(18_700, 24_265), "jax fraction pattern"),
        ((JAX,), {}, EMPTY_CARD, "jax unknown none"),
        ((JAX,), {}, taken(136_000), "jax fraction pattern"),
        ((JAX,), {}, stepwise(700, 900, 1_300), "jax growth pattern"),
        ((JAX,), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, stepwise(522), "jax growth environ"),
        ((JAX,), {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, taken(107_986), "jax fraction pattern"),
        ((JAX,), {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}, taken(14_900), "jax fraction environ"),
        ((JAX,), {"XLA_CLIENT_MEM_FRACTION": ".1"}, None, "jax fraction environ"),
        ((JAX,), {"XLA_CLIENT_MEM_FRACTION": ""}, EMPTY_CARD, "jax unknown none"),
        ((JAX,), {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, taken(522), "jax platform environ"),
        ((JAX,), {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, None, "jax cuda_malloc_async environ"),
        ((TORCH,), {}, stepwise(10_954), "torch caching default"),
        ((TORCH,), {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, None, "torch caching default"),
        ((TORCH,), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, None, "torch caching environ"),
        ((TORCH,), {"PYTORCH_CUDA_ALLOC_CONF": "backend: cudaMallocAsync"}, None,
         "torch cuda_malloc_async environ"),
        ((TORCH,),
         {"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
         None, "torch caching environ"),
        ((TORCH,), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, None, "torch platform environ"),
        # several at once
        ((TORCH, "libnvinfer", "libcuda"), {}, stepwise(9_000), "torch caching default"),
        ((TORCH, TF), {}, stepwise(9_000), "torch caching default"),  # TensorBoard imports TensorFlow
        ((TORCH, TF), {}, taken(141_350), "tensorflow preallocate pattern"),
        ((TORCH, JAX), {}, taken(107_986), "jax fraction pattern"),
        ((TORCH, JAX), {}, found_late(107_986), "torch caching default"),
        ((TORCH, "libjax_common"), {}, taken(107_986), "torch caching default"),  # jaxlib without CUDA
        ((TF, JAX), {}, taken(107_986), "jax fraction pattern"),  # TensorFlow for its data sets
        ((TF, "libjax_common"), {}, taken(141_350), "tensorflow preallocate pattern"),
        # TensorFlow 2.21 imports JAX, and with it JAX's CUDA plugin: seen in three programs on an H100
        ((TF, JAX), {}, taken(141_350), "tensorflow preallocate pattern"),
        ((TF, JAX), {}, stepwise(4_618), "unknown unknown none"),
        ((TF, JAX), {}, None, "unknown unknown none"),
        ((TF, JAX), {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, stepwise(4_618), "tensorflow growth environ"),
        ((TF, JAX), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, stepwise(522), "jax growth environ"),
        ((TF, JAX), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
         stepwise(522), "unknown unknown none"),
        ((TORCH, TF, JAX), {}, stepwise(9_000), "torch caching default"),
        (("cupy", "librmm"), {}, stepwise(9_000), "rmm unknown none"),
        (("vllm", TORCH), {}, taken(129_000), "vllm fraction default"),
        (("libtritonserver", TORCH), {}, None, "triton unknown none"),
        (("libonnxruntime_providers_cuda", "libnvinfer"), {}, None, "onnxruntime growth default"),
        # the rest
        (("cupy",), {}, None, "cupy caching default"),
        (("libggml-cuda",), {}, stepwise(2_000, 6_000, 9_000), "llama.cpp steps pattern"),
        (("libcuda",), {}, EMPTY_CARD, "cuda unknown none"),
        (("libcuda",), {}, taken(141_350), "cuda preallocate pattern"),
        ((), {}, found_late(141_350), "unknown unknown none"),
        (None, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, taken(107_986), "unknown unknown none"),
    ],
)  # fmt: skip
def test_verdicts(
    libraries: tuple[str, ...] | None, settings: dict[str, str], pattern: MemoryPattern | None, expected: str
) -> None:
    """Measured, published and mixed cases have the right verdict, with a sentence of evidence."""
    policy = classify(libraries, tuple(settings.items()), () if pattern is None else (pattern,))
    assert " ".join(policy[:3]) == expected
    assert policy.why


def test_what_is_a_preallocation() -> None:
    """Not the last bytes of a full card, nor doubling; the fullest device decides."""
    pattern = EMPTY_CARD._replace(left=5_000 * MIB).after_change(5_400 * MIB, 100 * MIB)
    assert classify((TF,), (), (pattern,)).policy == "unknown"
    assert classify((TF,), (), (stepwise(9_000, 18_000, 36_000, 72_000, 141_000),)).policy == "growth"
    assert classify((JAX,), (), (EMPTY_CARD, taken(107_986), EMPTY_CARD)).policy == "fraction"
    assert "not readable" in classify((TORCH,), (), environ=False).why
    assert "not readable" in classify(None, ()).why
    assert "has loaded JAX and TensorFlow, and which" in classify((TF, JAX, "libcuda"), ()).why


@given(ENVIRONMENTS, st.binary(max_size=400), st.integers(0, 70_000))
def test_hostile_environments(variables: list[tuple[bytes, bytes]], rest: bytes, repeat: int) -> None:
    """Of any environment only allow-listed values leave, short and printable, and a verdict follows."""
    block = b"".join(b"\0" + name + b"=" + value for name, value in variables) + rest * (repeat // 400)
    settings = find_settings(block)
    assert {name for name, _ in settings} <= set(SETTINGS)
    assert all(value.isprintable() and len(value) <= LONGEST_SETTING for _, value in settings)
    for library in LIBRARIES:
        assert isinstance(classify((library,), settings), Policy)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "value",
    [b"hunter2", b"hunter2\nTF=1", b"\xff\xfehunter2", b"x" * 65536 + b"hunter2", b"hunter2:True,hunter2"],
)
def test_no_value_gets_into_a_verdict(name: str, value: bytes) -> None:
    """A verdict may name a variable, and never its value."""
    settings = find_settings(b"\0A=1\0" + name.encode() + b"=" + value + b"\0SECRET=hunter2")
    assert [each for each, _ in settings] == [name]
    for library in LIBRARIES:
        assert "hunter2" not in repr(classify((library,), settings, (EMPTY_CARD,)))


def test_only_whole_names_count_and_the_first_of_them() -> None:
    """A variable whose name only has the same end is another one; ``getenv`` finds the first."""
    block = b"\0MY_TF_GPU_ALLOCATOR=x\0TF_GPU_ALLOCATOR=cuda_malloc_async\0TF_GPU_ALLOCATOR=y\0"
    assert find_settings(block) == (("TF_GPU_ALLOCATOR", "cuda_malloc_async"),)


@given(st.binary(max_size=2000))
def test_hostile_maps(data: bytes) -> None:
    """Every mapping can be read, and only names from our list leave."""
    assert set(find_libraries(data + mapping("x/libtorch_cuda.so") + data)) <= set(LIBRARIES)
    assert set(find_libraries(data)) <= set(LIBRARIES)


def facts(host: OneHolder, *libraries: str, **changes: object) -> tuple[ProcessFacts, ...]:
    """Return the facts of the holder with these libraries."""
    return (replace(ProcessFacts(7, host.holder.start, user="ann", libraries=libraries), **changes),)


def appeared(framework: str, memory: int = 518 * MIB) -> OneHolder:
    """Return a host whose holder has started while the exporter watched, with a framework's libraries."""
    host = OneHolder()
    host.holder.begin = inf
    host.sample()
    host.holder.framework = framework
    host.holder.begin = host.now
    host.program.memory = memory
    host.sample()
    return host


def process(host: OneHolder, **changes: Any) -> ProcessSnapshot:  # noqa: ANN401 any field of a reading
    """Take a sample of the holder."""
    return host.sample(**changes).processes[7]


def test_a_jump_that_was_seen_is_evidence() -> None:
    """Nearly everything in one sample, or at once with a holder that came, is a preallocation."""
    host = appeared("tensorflow")
    assert process(host).policy.policy == "unknown"
    host.program.memory = 78 * GIB
    assert process(host).policy[:3] == ("tensorflow", "preallocate", "pattern")
    host = appeared("cuda", memory=73 * GIB)
    assert process(host).policy[:2] == ("cuda", "preallocate")


@pytest.mark.parametrize("gap", [False, True])
def test_a_holding_that_was_there_before_us_did_not_jump(*, gap: bool) -> None:
    """At the first sample, and after a gap, the bytes may be old: the same holding proves nothing."""
    host = OneHolder()
    host.holder.framework = "cuda"
    if gap:
        host.holder.begin = inf
        host.sample()
        host.now += 60
        host.holder.begin = host.now
    host.program.memory = 73 * GIB
    assert process(host).policy[:2] == ("cuda", "unknown")


def test_a_settled_verdict_becomes_a_label_and_stays() -> None:
    """For a minute the info has no framework; then it has one, and no later pattern changes the series."""
    host = appeared("jax")
    for size in (1, 2, 3):
        host.program.memory = size * GIB
        host.sample()
    assert process(host).policy[:3] == ("jax", "growth", "pattern")
    seen = [process(host).settled for _ in range(int(SETTLED_AFTER) + 10)]
    host.program.memory = 63 * GIB
    later = [process(host) for _ in range(int(SETTLED_AFTER) + 10)]
    assert later[-1].policy[:3] == ("jax", "fraction", "pattern")
    shown = dict.fromkeys([*seen, *(each.settled for each in later)])
    assert list(shown) == [("", ""), ("jax", ""), ("jax", "growth")]


def test_what_the_environment_says_needs_no_second_minute() -> None:
    """What cannot change is a label with the framework; a program that loads torch late gets that then."""
    host = appeared("torch")
    seen = [process(host).settled for _ in range(int(SETTLED_AFTER) + 5)]
    assert list(dict.fromkeys(seen)) == [("", ""), ("torch", "caching")]
    host = appeared("cuda")
    for _ in range(int(SETTLED_AFTER) + 5):
        host.sample()
    assert process(host).settled == ("cuda", "")
    assert process(host, facts=facts(host, "libtorch_cuda")).settled == ("torch", "caching")


def test_an_environment_that_was_read_once_is_remembered() -> None:
    """What a program overwrites with its title stays known: signs, rank, service, notebook."""
    host = appeared("torch")
    read = facts(
        host, "libtorch_cuda", signs=("LOCAL_RANK", "title"), rank=Rank(1, 4, "run"), service_main=True,
        owner=Owner("user", "ann", notebook="a.ipynb"),
    )  # fmt: skip
    host.sample(facts=read)
    (blind,) = facts(host, "libtorch_cuda", signs=("title",), denied=("environ",), owner=Owner("user", "ann"))
    after = sure(process(host, facts=(blind,)).facts)
    assert (after.signs, after.rank, after.service_main) == (read[0].signs, read[0].rank, True)
    assert (after.owner, after.denied) == (read[0].owner, ())


def test_a_parents_signs_that_were_read_once_are_remembered() -> None:
    """What the same parent may have passed on stays known."""
    host = appeared("torch")
    host.sample(facts=facts(host, parent=SHELL._replace(signs=("LOCAL_RANK",))))
    after = process(host, facts=facts(host, parent=SHELL._replace(signs=None))).facts
    other = process(host, facts=facts(host, parent=SHELL._replace(pid=401, signs=None))).facts
    assert sure(sure(after).parent).signs == ("LOCAL_RANK",)
    assert sure(sure(other).parent).signs is None


def test_a_later_look_that_sees_nothing_takes_nothing_away() -> None:
    """Who has ended or is stuck keeps its framework; another process with the pid inherits nothing."""
    host = appeared("torch")
    settings = (("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync"),)
    host.sample(facts=facts(host, "libtorch_cuda", settings=settings))
    for blind in (facts(host), facts(host, libraries=None, denied=("environ", "maps"))):
        assert process(host, facts=blind).policy[:2] == ("torch", "cuda_malloc_async")
    host = appeared("torch")
    host.holder.end = host.now
    host.reuse_pid(GIB)
    host.holder.framework = "tensorflow"
    assert process(host).policy[:2] == ("tensorflow", "unknown")


def test_the_table_shows_a_verdict() -> None:
    """The table names framework and policy; one without frameworks has no column for them."""
    host = appeared("torch")
    table = render_table(host.sample())
    assert " FRAMEWORK " in table
    assert " torch/caching " in table
    table = render_table(OneHolder().sample())
    assert ("FRAMEWORK" in table, "STATE" in table) == (False, True)
