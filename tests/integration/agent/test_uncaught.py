"""An error that ended the program for lack of GPU memory is reported at its exit, for any framework."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.listening import AGENT_ROOT, FakeExporter, environment, start
from tests.support.requirements import require_frameworks
from tests.support.sure import sure
from vramledger_agent.frameworks.provider import read_requested, read_tensor

CUPY = """
from cupy import _core
class Pool:
    def used_bytes(self): return 3 * 2**20
    def total_bytes(self): return 4 * 2**20
    def get_limit(self): return 8 * 2**20
def get_default_memory_pool(pool=Pool()): return pool
class OutOfMemoryError(MemoryError): pass
OutOfMemoryError.__module__ = "cupy.cuda.memory"
__version__ = "14.2.0"
"""

BEGINNING = """
import sys, time
from vramledger_agent.frameworks.cupy import CuPy
from vramledger_agent.frameworks import provider
CuPy.is_initialised = lambda self: True
CuPy.may_initialise = lambda self: True
provider.at_most_one = lambda: True
import cupy
from vramledger_agent.worker import worker
worker.start()
while worker.session is None or worker.session.sequence < 1:
    time.sleep(0.01)
TEXT = "Out of memory allocating 1,073,741,824 bytes (allocated so far: 3,145,728 bytes)."
def allocate():
    held = [1]
    raise cupy.OutOfMemoryError(TEXT)
"""


def end(place: Path, exporter: FakeExporter, code: str) -> tuple[int, str, dict[str, Any]]:
    """Run a program that ends with an error; return its status, its errors and its last report."""
    (place / "cupy").mkdir()
    (place / "cupy" / "__init__.py").write_text(CUPY)
    (place / "cupy" / "_core.py").write_text("")
    process = start(BEGINNING + textwrap.dedent(code), environment(place, place, AGENT_ROOT))
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors, exporter.last_report(process)


@pytest.mark.parametrize(
    "code",
    [
        "allocate()",
        "try:\n    allocate()\nexcept MemoryError as error:\n    raise RuntimeError('failed') from error",
        "try:\n    allocate()\nexcept MemoryError:\n    None.cleanup",
    ],
)
def test_an_error_that_ended_the_program(place: Path, exporter: FakeExporter, code: str) -> None:
    """The report has the stack, the requested bytes and the pool; the program ends as it would without us."""
    status, errors, last = end(place, exporter, code)
    told = last["last_oom"]
    facts = json.loads(Path(told["report"]).read_text())
    assert status == 1
    assert "OutOfMemoryError: Out of memory allocating" in errors
    assert (told["framework"], told["requested"], told["verdict"]) == ("cupy", 2**30, "too_big")
    assert facts["stack"]["frames"][0]["function"] == "allocate"
    mebibytes = {"in_use": 3, "pool": 4, "limit": 8, "reserved": 4, "active": 3}
    assert facts["pool"] == {name: size * 2**20 for name, size in mebibytes.items()}
    text = Path(told["report"]).with_suffix(".txt").read_text()
    assert "more memory than its limit" in text
    assert "than the device has" not in text, "only the limit is known"
    assert "What the framework said:" in text
    assert "snapshot-from-start" not in text, "it is PyTorch's"


@pytest.mark.both
@pytest.mark.parametrize(
    ("message", "requested"),
    [("TEXT", 2**30), ("'Out of memory.'", None), ("TEXT.replace('1,073', '1')", 1741824)],
)
def test_fit_reads_reports(place: Path, exporter: FakeExporter, message: str, requested: int | None) -> None:
    """The command fit reads what was in use and what failed, also where the message has no bytes."""
    from vramledger.commands.fit import read_file  # noqa: PLC0415 the other tests need no exporter
    from vramledger.commands.fit_verdict import assess_need  # noqa: PLC0415

    _, _, last = end(place, exporter, f"raise cupy.OutOfMemoryError({message})")
    path = Path(last["last_oom"]["report"])
    seen = read_file(path, None)
    need = assess_need(seen.uses[0])
    size = sure(need.bytes)
    assert (size >= 3 * 2**20, need.failed, need.enough) == (True, True, None)
    assert need.wanted == (None if requested is None else size + requested)
    assert "CuPy counted" in need.why
    assert "If this process can reach an exporter" not in path.with_suffix(".txt").read_text()


@pytest.mark.parametrize(
    "code",
    [
        "raise ValueError('Out of memory allocating 5 bytes')",
        "try:\n    allocate()\nexcept MemoryError:\n    pass",
        "try:\n    allocate()\nexcept MemoryError:\n    raise KeyError('other') from None",
        "try:\n    allocate()\nexcept MemoryError:\n    sys.exit(3)",
        "sys.ps1 = '>>> '\nallocate()",
        "import threading\nthread = threading.Thread(target=allocate)\nthread.start()\nthread.join()",
    ],
)
def test_no_error_that_ended_the_program(place: Path, exporter: FakeExporter, code: str) -> None:
    """An error that the program has handled, or that is about something else, is not reported."""
    _, _, last = end(place, exporter, code)
    assert "last_oom" not in last
    assert not list(place.glob("reports/*"))


ODD = """
class Odd(Exception):
    exceptions = 7
    def __str__(self):
        raise ValueError("no text")
class Locked(Exception):
    @property
    def exceptions(self):
        raise ValueError("no members")
class JaxRuntimeError(Odd):
    exceptions = ()
from vramledger_agent.frameworks.jax import Jax
from vramledger_agent.worker import worker
started = worker.poller.started_providers
worker.poller.started_providers = lambda: [*started(), Jax()]
count = worker.count_error
worker.count_error = lambda name="agent": (print("counted", file=sys.stderr), count(name))
"""


@pytest.mark.parametrize(("kind", "counted"), [("Odd", 0), ("Locked", 1), ("JaxRuntimeError", 1)])
def test_an_odd_error_costs_no_report(place: Path, exporter: FakeExporter, kind: str, counted: int) -> None:
    """An exception without a text or with a strange member does not cost the last report."""
    marked = f"{ODD}\nworker.session.last_oom = {{'framework': 'cupy', 'verdict': 'unknown'}}\nraise {kind}()"
    status, errors, last = end(place, exporter, marked)
    assert status == 1
    assert errors.count("counted") == counted
    assert last["last_oom"]["framework"] == "cupy"


def test_a_hook_of_the_program_stays(place: Path, exporter: FakeExporter) -> None:
    """The program's own hook for uncaught errors runs, and sees the same error."""
    hook = "sys.excepthook = lambda kind, error, trace: print(kind.__name__, file=sys.stderr)\nallocate()"
    status, errors, last = end(place, exporter, hook)
    assert (status, errors) == (1, "OutOfMemoryError\n")
    assert last["last_oom"]["framework"] == "cupy"


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", 2**34),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB.", 2**34),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes.", 1024),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 4.0KiB (4096B) on device ordinal 1", 4096),
        ("RESOURCE_EXHAUSTED: too many open files", None),
        ("allocate 1.2.3 bytes, allocating , bytes", None),
    ],
)
def test_requested_bytes(text: str, requested: int | None) -> None:
    """The bytes are those in the message, and not known where it has none."""
    assert read_requested(text) == requested


def test_a_tensor_on_a_gpu() -> None:
    """TensorFlow's message gives device and bytes; one about the host's memory is not about a GPU."""
    place = "on /job:localhost/replica:0/task:0/device"
    what = "OOM when allocating tensor with shape[1024,2,3] and type float"
    text = f"{what} {place}:GPU:1 by allocator GPU_1_bfc"
    found = sure(read_tensor(text))
    assert (found.ordinal, found.requested) == (1, 1024 * 2 * 3 * 4)
    assert sure(read_tensor(text.replace("float", "float8_e4m3"))).requested is None
    assert read_tensor(text.replace(":GPU:1 by allocator GPU_1_bfc", ":CPU:0 by allocator cpu")) is None


JAX_ERROR = """
from vramledger_agent.frameworks.jax import Jax as Provider
import jax
error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.")
"""
TENSORFLOW_ERROR = """
from vramledger_agent.frameworks.tensorflow import TensorFlow as Provider
import tensorflow as tf
text = "OOM when allocating tensor with shape[1024] and type float on /device:GPU:0 by allocator GPU_0_bfc"
error = tf.errors.ResourceExhaustedError(None, None, text)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("code", [JAX_ERROR, TENSORFLOW_ERROR])
def test_errors_of_the_real_frameworks(place: Path, code: str) -> None:
    """The classes of the real frameworks' errors are recognised."""
    code += "\nprint(Provider().recognise_out_of_memory(error).requested)"
    process = start(code, environment(place, AGENT_ROOT), python=require_frameworks())
    out, _ = process.communicate(timeout=100)
    assert out == "4096\n"
