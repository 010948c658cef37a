"""The figures of JAX, CuPy and RMM are read without any call that would initialise something."""

import ast
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.sure import sure
from vramledger_agent.frameworks import cupy, jax, rmm, tensorflow
from vramledger_agent.frameworks import provider as visible_devices
from vramledger_agent.protocol.frameworks import (
    COUNTER_FIGURES,
    POOL_FIGURES,
    REPORTING_FRAMEWORKS,
    TORCH_FIGURES,
)
from vramledger_agent.protocol.messages import ALLOCATOR_SETTINGS
from vramledger_agent.torch.allocator import read_pinned, read_settings

MIB, GIB = 2**20, 2**30

DEFAULT = {"expandable_segments": "false", "garbage_collection_threshold": "off"}


def put(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """Put a module where a program would have imported it."""
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def gpu(number: int = 0, stats: Mapping[str, int] | None = None) -> SimpleNamespace:
    """Return a device of JAX."""
    return SimpleNamespace(id=number + 8, local_hardware_id=number, memory_stats=lambda: stats)


def client(*devices: object, platform: str = "cuda") -> SimpleNamespace:
    """Return a client of JAX."""
    return SimpleNamespace(platform=platform, local_devices=lambda: list(devices))


STATS = {"bytes_in_use": MIB, "peak_bytes_in_use": 8 * MIB, "bytes_limit": 100 * GIB, "pool_bytes": 90 * GIB}
"""Counts as an H200's device reports them."""


@pytest.mark.parametrize(
    ("environ", "policy"),
    [
        ({}, "fraction"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "growth"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "0"}, "growth"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "FALSE"}, "fraction"),  # a spelling that JAX does not accept
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "fraction"),
        ({"XLA_CLIENT_MEM_FRACTION": ".3"}, "fraction"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3", "XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}, "fraction"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "platform"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "Platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "platform"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, "cuda_malloc_async"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}, None),
    ],
)
def test_jax_policy(environ: dict[str, str], policy: str | None) -> None:
    """JAX's policy follows from the environment when the backend was made; an unknown one has no name."""
    assert jax.classify_policy(environ) == policy


def test_jax_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool, in use, peak and limit come from the existing clients, under the hardware's own number."""
    cuda = client(gpu(0, STATS), gpu(1, {"bytes_in_use": -1}))
    put(monkeypatch, jax.BRIDGE_MODULE, _backends={"cpu": client(gpu(), platform="cpu"), "cuda": cuda})
    put(monkeypatch, "jax.version", __version__="0.11.2")
    provider = jax.make_provider()
    assert provider.is_initialised()
    provider.start()
    entry = sure(provider.read())
    assert entry["devices"] == [
        {"ordinal": 0, "in_use": MIB, "in_use_peak": 8 * MIB, "limit": 100 * GIB, "pool": 90 * GIB},
        {"ordinal": 1},
    ]
    assert (entry["supported"], entry["version"], entry["policy"]) == (True, "0.11.2", "fraction")


def test_jax_before_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backend for a GPU nothing is initialised, and nothing is called."""
    never = partial(pytest.fail, "this creates the backend")
    put(monkeypatch, jax.BRIDGE_MODULE, _backends={}, backends=never, local_devices=never, devices=never)
    assert not jax.make_provider().is_initialised()
    assert jax.make_provider().read() is None


def test_jax_that_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform allocator has no figures: the report says so, and names the policy."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    put(monkeypatch, jax.BRIDGE_MODULE, _backends={"cuda": client(gpu(0, None))})
    provider = jax.make_provider()
    provider.start()
    entry = sure(provider.read())
    assert (entry["supported"], entry["policy"], entry["devices"]) == (False, "platform", [{"ordinal": 0}])


@pytest.mark.parametrize("backends", [None, 3, {"cuda": None}, {"cuda": SimpleNamespace(platform="cuda")}])
def test_jax_of_another_make(monkeypatch: pytest.MonkeyPatch, backends: object) -> None:
    """A version that is built otherwise gives a degraded report, and nothing raises."""
    put(monkeypatch, jax.BRIDGE_MODULE, _backends=backends)
    provider = jax.make_provider()
    entry = provider.read() if provider.is_initialised() else None
    assert entry is None or entry["supported"] is False


@pytest.mark.parametrize(
    "context",
    [
        SimpleNamespace(_context_handle=object()),
        SimpleNamespace(_context_handle=object(), _physical_devices=3, _visible_device_list=3),
        SimpleNamespace(_context_handle=object(), _visible_device_list=[SimpleNamespace(device_type="GPU")]),
    ],
)
def test_tensorflow_of_another_make(monkeypatch: pytest.MonkeyPatch, context: object) -> None:
    """A context without the attributes that we know: the policy is unknown, and the figures not supported."""
    put(monkeypatch, tensorflow.CONTEXT_MODULE, _context=context)
    entry = sure(tensorflow.make_provider().read())
    assert (entry["policy"], entry["supported"], entry["devices"]) == (None, False, [])


def test_tensorflow_before_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that has made no devices is not called."""
    put(monkeypatch, tensorflow.CONTEXT_MODULE, _context=None)
    assert not tensorflow.make_provider().is_initialised()
    put(monkeypatch, tensorflow.CONTEXT_MODULE, _context=SimpleNamespace(_context_handle=None))
    assert not tensorflow.make_provider().is_initialised()
    assert tensorflow.make_provider().read() is None


class FakeSession:
    """A session of TensorFlow 1, with as much as the provider may touch."""

    def __init__(self, options: object, devices: list[object]) -> None:
        self._session: object = object()
        self._config = SimpleNamespace(gpu_options=options)
        self._devices = devices

    def list_devices(self) -> list[object]:
        return self._devices


def put_sessions(monkeypatch: pytest.MonkeyPatch, count: Callable[[], int]) -> None:
    """Put the sessions of TensorFlow 1, of which so many were made, in a program without a context."""
    put(monkeypatch, tensorflow.CONTEXT_MODULE, _context=None)
    made = SimpleNamespace(get_cell=lambda: SimpleNamespace(value=count))
    put(monkeypatch, tensorflow.SESSION_MODULE, BaseSession=FakeSession, _python_session_create_counter=made)


@pytest.mark.parametrize(
    ("options", "environ", "policy"),
    [
        ({}, {}, "preallocate"),
        ({"allow_growth": True}, {}, "growth"),
        ({"per_process_gpu_memory_fraction": 0.3}, {}, "fraction"),
        ({"per_process_gpu_memory_fraction": 0.3, "allow_growth": True}, {}, "growth"),
        ({"allow_growth": True}, {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, "preallocate"),
        ({"experimental": SimpleNamespace(use_cuda_malloc_async=True)}, {}, "cuda_malloc_async"),
    ],
)
def test_tensorflow_sessions(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], environ: dict[str, str], policy: str
) -> None:
    """A Session's own configuration and devices are reported, also after it has ended."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    made: list[FakeSession] = []
    put_sessions(monkeypatch, lambda: len(made))
    provider = tensorflow.make_provider()
    assert not provider.is_initialised()
    gpu_options = SimpleNamespace(visible_device_list="3,1", **options)
    prefix = "/job:localhost/replica:0/task:0/device:"
    devices = [
        SimpleNamespace(name=f"{prefix}{kind}:{number}", device_type=kind, memory_limit_bytes=size)
        for kind, number, size in (("CPU", 0, 1), ("GPU", 0, 5 * GIB), ("GPU", 1, 6 * GIB))
    ]
    made.append(FakeSession(gpu_options, list(devices)))
    assert provider.is_initialised()
    provider.start()
    made.clear()
    entry = sure(provider.read())
    assert (entry["policy"], entry["supported"]) == (policy, False)
    assert entry["devices"] == [{"ordinal": 3, "limit": 5 * GIB}, {"ordinal": 1, "limit": 6 * GIB}]


def test_a_session_that_is_found_while_it_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is counted before it has devices; it is read once it has them, without another search."""
    session = FakeSession(
        SimpleNamespace(visible_device_list=""),
        [SimpleNamespace(name="/device:GPU:0", device_type="GPU", memory_limit_bytes=5 * GIB)],
    )
    session._session = None  # noqa: SLF001 it is TensorFlow's own
    put_sessions(monkeypatch, lambda: 1)
    provider = tensorflow.make_provider()
    assert not provider.is_initialised()
    monkeypatch.setattr(tensorflow, "SEARCH_PAUSE_TO_COST", 10**9)
    session._session = object()  # noqa: SLF001
    assert provider.is_initialised()
    assert sure(provider.read())["devices"] == [{"ordinal": 0, "limit": 5 * GIB}]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one device, which is open."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(visible_devices, "has_open_device", lambda: True)


class FakePool:
    """A pool of CuPy, of which three bytes are in use, with as much as the provider may touch."""

    __slots__ = ("allocator", "get_limit", "total_bytes", "used_bytes")

    def __init__(self, total: int = 5, limit: int = 0, allocator: object = None) -> None:
        self.total_bytes, self.used_bytes, self.get_limit = (lambda: total), (lambda: 3), (lambda: limit)
        self.allocator = allocator

    def malloc(self) -> None:
        pytest.fail("the agent allocates nothing")


@pytest.mark.usefixtures("one_gpu")
def test_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's default pool is read; a limit of 0 means none."""
    put(monkeypatch, "cupy", __version__="14.2.0", get_default_memory_pool=FakePool)
    entry = cupy.make_provider().read()
    assert cupy.make_provider().is_initialised()
    assert sure(entry)["devices"] == [{"ordinal": 0, "in_use": 3, "pool": 5, "limit": None, "managed": None}]


@pytest.mark.usefixtures("one_gpu")
def test_cupy_with_a_managed_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that the program has set, as for managed memory, counts beside the default one, and once."""
    default, own = FakePool(10), FakePool(100, 500)
    alone, both = {"in_use": 3, "pool": 10, "limit": None}, {"in_use": 6, "pool": 110, "limit": 500}
    for allocator, figures in ((own.malloc, both), (default.malloc, alone), (len, alone), (None, alone)):
        cuda = SimpleNamespace(get_allocator=lambda allocator=allocator: allocator)
        put(monkeypatch, "cupy", get_default_memory_pool=lambda: default, cuda=cuda)
        assert sure(cupy.make_provider().read())["devices"] == [{"ordinal": 0, **figures, "managed": None}]


@pytest.mark.usefixtures("one_gpu")
def test_cupy_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several devices the pool is not read: it would answer for our thread's device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    never = partial(pytest.fail, "this answers for the thread's device")
    put(monkeypatch, "cupy", get_default_memory_pool=never)
    entry = sure(cupy.make_provider().read())
    assert (entry["supported"], entry["devices"]) == (False, [])


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("allocator", [len, print, None])
def test_cupy_knows_a_managed_pool_by_allocator(monkeypatch: pytest.MonkeyPatch, allocator: object) -> None:
    """Bytes of pools that ``malloc_managed`` fills are managed memory; those of others do not count."""
    for own, managed in ((FakePool(100, 0, max), 100), (FakePool(100, 0, allocator), None)):
        default = FakePool(10, 0, allocator)
        cuda = SimpleNamespace(get_allocator=lambda own=own: own.malloc, malloc_managed=max)
        put(monkeypatch, "cupy", get_default_memory_pool=lambda default=default: default, cuda=cuda)
        figures = {"ordinal": 0, "in_use": 6, "pool": 110, "limit": None, "managed": managed}
        assert sure(cupy.make_provider().read())["devices"] == [figures]


class ManagedMemoryResource(SimpleNamespace):
    """RMM's resource of managed memory."""


class StatisticsResourceAdaptor(SimpleNamespace):
    """RMM's resource that counts."""


class OwnResource(ManagedMemoryResource):
    """A resource of the program's own."""


Counts = tuple[int | None, ...]
OF_POOL = SimpleNamespace(pool_size=lambda: 9)
OF_MANAGED_POOL = SimpleNamespace(pool_size=lambda: 9, upstream_mr=ManagedMemoryResource())


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("resource", "bare", "counted"),
    [
        (SimpleNamespace(), None, (2, 4, None, None)),
        (OF_POOL, None, (2, 4, 9, None)),
        (ManagedMemoryResource(), None, (2, 4, None, 2)),
        (OF_MANAGED_POOL, (None, None, 9, 9), (2, 4, 9, 9)),
        (SimpleNamespace(upstream_mr=ManagedMemoryResource(), bin_mrs=[]), None, (2, 4, None, None)),
        (OwnResource(), None, (2, 4, None, None)),
    ],
)
def test_rmm(monkeypatch: pytest.MonkeyPatch, resource: object, bare: Counts | None, counted: Counts) -> None:
    """RMM is read where the program counts, and a pool of managed memory in any case; CUDA is not called."""
    counting = StatisticsResourceAdaptor(
        upstream_mr=resource, allocation_counts=SimpleNamespace(current_bytes=2, peak_bytes=4)
    )
    old = StatisticsResourceAdaptor(upstream_mr=resource, allocation_counts={"current_bytes": 2})
    for top, expected in ((resource, bare), (counting, counted), (old, bare)):
        mr = SimpleNamespace(
            get_per_device_resource=[top].__getitem__,
            ManagedMemoryResource=ManagedMemoryResource,
            StatisticsResourceAdaptor=StatisticsResourceAdaptor,
        )
        put(monkeypatch, "rmm", __version__="26.10", mr=mr)
        entry = sure(rmm.make_provider().read())
        assert entry["supported"] is (expected is not None)
        names = ("in_use", "in_use_peak", "pool", "managed")
        devices = [{"ordinal": 0, **dict(zip(names, expected, strict=True))}] if expected else []
        assert entry["devices"] == devices


def test_open_devices_are_found(tmp_path: Path) -> None:
    """A GPU is in use when its device file is open; the control device and others do not count."""
    (tmp_path / "0").symlink_to("/dev/null")
    (tmp_path / "1").symlink_to("/dev/nvidiactl")
    (tmp_path / "2").symlink_to("socket:[123]")
    assert not visible_devices.has_open_device(str(tmp_path))
    (tmp_path / "3").symlink_to("/dev/nvidia0")
    assert visible_devices.has_open_device(str(tmp_path))
    assert not visible_devices.has_open_device(str(tmp_path / "nothing"))
    assert not visible_devices.has_open_device()


@pytest.mark.parametrize(("visible", "single"), [("0", True), ("GPU-1", True), ("", True), ("0,1", False)])
def test_single_device_by_variable(monkeypatch: pytest.MonkeyPatch, visible: str, single: bool) -> None:
    """The variable says how many devices CUDA can see."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices.at_most_one() is single


def test_single_device_by_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the variable the device files say it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert not visible_devices.at_most_one(str(tmp_path))
    (tmp_path / "nvidia0").touch()
    assert visible_devices.at_most_one(str(tmp_path))
    (tmp_path / "nvidia1").touch()
    assert not visible_devices.at_most_one(str(tmp_path))
    assert not visible_devices.at_most_one(os.fspath(tmp_path / "nothing"))


def test_every_framework_has_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each declared framework has a provider of its name, which gives exactly the figures declared."""
    put(monkeypatch, "torch", __version__="0", cuda=None, _C=None)
    known = {*POOL_FIGURES, *TORCH_FIGURES, *COUNTER_FIGURES}
    for framework in REPORTING_FRAMEWORKS.values():
        module = importlib.import_module(framework.provider)
        assert module.make_provider().name == framework.name
        provider = Path(str(module.__file__))
        parts = [provider, *(provider.parents[1] / framework.name).glob("*.py")]
        named = {
            node.value
            for part in parts
            for node in ast.walk(ast.parse(part.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert named & known == set(framework.figures), framework.name


@pytest.mark.parametrize(
    ("text", "stats", "expected"),
    [
        ("", None, DEFAULT),
        ("", {"max_split_size": -1}, {**DEFAULT, "max_split_size_mb": "unlimited"}),
        ("", {"max_split_size": 2**64 - 1}, {**DEFAULT, "max_split_size_mb": "unlimited"}),
        ("max_split_size_mb:64", {"max_split_size": 64 * MIB}, {**DEFAULT, "max_split_size_mb": "64"}),
        ("Expandable_Segments : TRUE", None, {**DEFAULT, "expandable_segments": "true"}),
        ("garbage_collection_threshold:0.8", None, {**DEFAULT, "garbage_collection_threshold": "0.8"}),
        ("garbage_collection_threshold:x", None, {"expandable_segments": "false"}),
        ("roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True", None,
         {**DEFAULT, "expandable_segments": "true"}),
        (None, None, {}),
        (None, {"max_split_size": "x"}, {}),
    ],
)  # fmt: skip
def test_settings_in_use(text: str | None, stats: dict[str, object] | None, expected: dict[str, str]) -> None:
    """What is not set has its default, what is not known is left out, and the counters win over the text."""
    found = read_settings(text, stats)
    assert found == expected
    assert all(re.fullmatch(ALLOCATOR_SETTINGS[name], value) for name, value in found.items())


@pytest.mark.parametrize(
    "stats",
    [None, {}, [], {"allocated_bytes": 3}, {"allocated_bytes": {"current": -1}}, {"active_bytes": {}}],
)
def test_pinned_memory_that_is_not_known_is_not_zero(stats: object) -> None:
    """Whatever another version returns, a value that is not there is left out."""
    assert read_pinned(stats) == {}


def test_pinned_memory_is_what_the_allocator_has() -> None:
    """Cached memory counts as pinned, and not as in use."""
    stats = {"allocated_bytes": {"current": 64 * MIB, "peak": 1}, "active_bytes": {"current": 16 * MIB}}
    assert read_pinned(stats) == {"pinned": 64 * MIB, "pinned_in_use": 16 * MIB}
