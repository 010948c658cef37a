"""Framework and policy of real processes, from the mapped files to the page; no other text gets there."""

import json
import mmap
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.exporter import serving
from tests.support.players.stage import Player, Stage
from tests.support.requirements import require_root
from tests.support.standin.library import MIB, StandIn
from tests.support.stranger import as_user
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.accounting.holders.policies import classify
from vramledger.config import SamplingConfig
from vramledger.model.reading import ProcessFacts, decode, encode
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml.driver import Driver
from vramledger.sampling import holder_watch as sampling
from vramledger.sampling.masking import Mask
from vramledger.sampling.sampler import Sampler

PROC = Path("/proc")
NOBODY = 65534
SECRET = "hunter2-of-nobody"  # noqa: S105 what must never come out
_POLICY = re.compile(r"^vramledger_framework_policy_info\{(.*)\} 1", re.MULTILINE)
Start = Callable[..., Player]


@pytest.fixture
def start(tmp_path: Path, stage: Stage) -> Start:
    """Give a function that starts a process which maps a file of this name, with a secret argument."""

    def run(name: str, env: Mapping[str, str] | None = None) -> Player:
        mapped = ("map_file", library(tmp_path, name))
        return stage.start(mapped, env=env, words=[f"--token={SECRET}"])

    return run


def library(directory: Path, name: str) -> str:
    """Make a file that can be mapped, with the name of a library."""
    path = directory / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    return str(path)


def facts_of(pid: int) -> ProcessFacts:
    """Read the facts of a real process."""
    host = Host(PROC)
    return sure(host.facts(sure(host.row(pid))))


def test_a_real_process_has_the_framework_that_it_maps(start: Start) -> None:
    """A process's mapped libraries, and its allow-listed variables, are in its facts."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TOKEN": SECRET, "CUDA_MPS_TOKEN": SECRET}
    facts = facts_of(start("libtorch_cuda.so", env).pid)
    assert facts.libraries == ("libtorch_cuda",)
    assert facts.settings == (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
    assert classify(facts.libraries, facts.settings)[:3] == ("torch", "caching", "environ")
    assert SECRET not in repr(facts)


def test_unreadable_maps_leave_the_framework_unknown(start: Start) -> None:
    """The libraries of another user's process are not known, and the exporter says so."""
    require_root()
    pid = start("libtorch_cuda.so").pid
    with as_user(NOBODY):
        facts = facts_of(pid)
    assert "maps" in facts.denied
    assert facts.libraries is None
    assert classify(facts.libraries, facts.settings, environ=False).framework == "unknown"


class Watcher:
    """A sampler that reads its holders again at once; ``seen`` has all facts that it read, in order."""

    def __init__(self, standin: StandIn, pids: Sequence[int], host: Host) -> None:
        standin.device(0).set_processes([(pid, 512 * MIB) for pid in pids])
        config = SamplingConfig(interval=1.0, timeout=2.0, collectors=frozenset({"ledger", "process"}))
        self._sampler = Sampler(config, Driver.open(), host)
        self.seen: list[ProcessFacts] = []

    def see(self, count: int, more: int = 0) -> list[ProcessFacts]:
        """Sample until so many facts were seen, and then so many times more."""
        deadline = time.monotonic() + 60
        while len(self.seen) < count:
            assert time.monotonic() < deadline, self.seen
            self.seen += self._sampler.sample().facts
        for _ in range(more):
            self.seen += self._sampler.sample().facts
        return self.seen


Watch = Callable[..., Watcher]


@pytest.fixture
def watch(standin_here: StandIn, monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(sampling, "REFRESH_DELAYS", (0.0, 0.0))
    return lambda *pids, host=None: Watcher(standin_here, pids, host or Host(PROC))


def test_what_is_loaded_later_is_seen(watch: Watch, start: Start, tmp_path: Path) -> None:
    """A holder is read again later, because NVML lists it before it has loaded everything."""
    program = start("libcuda.so.1")
    watcher = watch(program.pid)
    assert watcher.see(1)[0].libraries == ("libcuda",)
    program.order("map_file", library(tmp_path, "libtensorflow_cc.so.2"))
    assert watcher.see(2)[-1].libraries == ("libtensorflow", "libcuda")


@pytest.mark.parametrize(("name", "times"), [("libtorch_cuda.so", 1), ("libcuda.so.1", 3)])
def test_a_holder_is_read_once(watch: Watch, start: Start, name: str, times: int) -> None:
    """A holder with a known framework is not read again; one without is read at most twice more."""
    assert len(watch(start(name).pid).see(times, more=5)) == times


def test_the_young_are_seen_again(watch: Watch, start: Start) -> None:
    """A new process may load a second framework, so its first answer is not final."""
    booted = Host(PROC).boot_time
    first = iter([0.0])
    # The clock was set, so that nobody has lived for any time.
    host = Host(PROC, boot_by_clocks=lambda: next(first, time.time() - booted))
    assert watch(start("libtorch_cuda.so").pid, host=host).see(2)


def test_who_came_together_is_seen_apart(watch: Watch, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second read of hundreds of holders is spread over samples, a limited number in each."""
    monkeypatch.setattr(sampling, "REFRESH_DELAYS", (0.0, 1e6))
    monkeypatch.setattr(sampling, "REFRESH_BATCH", 2)
    monkeypatch.setattr(sampling, "REFRESH_SPACING", 1e6)
    monkeypatch.setattr(sampling, "REFRESH_SPREAD", 1e6)
    seen = watch(*(start("libcuda.so.1").pid for _ in range(3))).see(5, more=5)
    assert sorted(Counter(facts.pid for facts in seen).values()) == [1, 2, 2]


def test_no_secret_of_a_holder_gets_out(standin: StandIn, start: Start) -> None:
    """No argument, and no variable, is in a scrape, page, document or log line."""
    names = "TOKEN CUDA_MPS_PIPE_DIRECTORY CUDA_VISIBLE_DEVICES TF_GPU_ALLOCATOR".split()
    names += [f"XLA_PYTHON_CLIENT_{each}" for each in ("ALLOCATOR", "MEM_FRACTION")]
    env = {**dict.fromkeys(names, f"{SECRET}\n{SECRET}"), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    pid = start("xla_cuda_plugin.so", env).pid
    standin.device(0).set_processes([(pid, 512 * MIB)])
    with serving("--log.level=debug", "--sample.interval=100ms", driver=standin.env()) as exporter:
        (labels,) = wait_until(lambda: _POLICY.findall(exporter.get("/metrics")[1]), "the policy")
        assert dict(re.findall(r'(\w+)="([^"]*)"', labels)) == {
            "pid": str(pid), "framework": "jax", "policy": "growth", "source": "environ",
        }  # fmt: skip
        for path in ("/metrics", "/", "/api/v1/ledger"):
            assert SECRET not in exporter.get(path)[1], path
        (held,) = json.loads(exporter.get("/api/v1/ledger")[1])["devices"][0]["holdings"]

    assert (held["framework"], held["policy"], held["policy_source"]) == ("jax", "growth", "environ")
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" in held["policy_why"]
    assert SECRET not in exporter.ended.log


def test_devices_are_masked_in_settings_as_everywhere() -> None:
    """A UUID in ``CUDA_VISIBLE_DEVICES`` gets the same replacement as its device; so does its beginning."""
    uuid = "GPU-8f2b1c4d-5be5-4c2d-9d1e-0c5e4b1f7a00"
    line = (
        b'{"time":1,"monotonic":1,"devices":[{"index":0,"uuid":"%b"}],"facts":[{"pid":1,"start":1,"settings":'
        b'[["CUDA_VISIBLE_DEVICES","%b,GPU-8f2b,1,-1"],["PYTORCH_ALLOC_CONF","backend:native,mine:secret"]]}]}'
    ) % (uuid.encode(), uuid.encode())
    masked = Mask().mask_reading(decode(line))
    stand_in = masked.devices[0].uuid
    assert stand_in != uuid
    assert masked.facts[0].settings == (
        ("CUDA_VISIBLE_DEVICES", f"{stand_in},{stand_in},1,-1"),
        ("PYTORCH_ALLOC_CONF", "backend:native,value-1:value-2"),
    )
    assert decode(encode(masked)) == masked
