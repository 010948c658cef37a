"""What is reported of PyTorch: without a CUDA call, and without hiding the program's errors."""

import json
import os
import socket
import stat
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import listening
from tests.support.listening import FAKE, WAIT_FOR_REPORT, FakeExporter, environment, finish, go_on, start
from tests.support.requirements import require_root
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger_agent import transport
from vramledger_agent.oom import report_file

NOBODY = 65534

BEGINNING = "import sys, time, torch\n" + WAIT_FOR_REPORT


def reported(exporter: FakeExporter, place: Path, code: str, **variables: str) -> dict[str, Any]:
    """Run a program and return its last report, which is made at its end."""
    process = exporter.watch(start(BEGINNING + code, environment(place, FAKE, **variables)))
    out = finish(process)
    assert "[('cuInit', True)]" in out or "calls" not in code
    return exporter.last_report(process)


def run(place: Path, code: str, **variables: str) -> str:
    """Run a program to its end; return its output."""
    return listening.run(place, BEGINNING + textwrap.dedent(code), **variables)


TRAIN = """
parameters = [torch.Tensor(1000, 1) for _ in range(3)]
for parameter in parameters:
    parameter.grad = torch.Tensor(1000, 1)
rest = torch.Tensor(500, 1)
wait_for_report()
optimizer = torch.optim.Adam(parameters)
for _ in range(60):
    optimizer.step()
    time.sleep(0.02)
print(torch.calls)
"""


def test_categories(place: Path, exporter: FakeExporter) -> None:
    """The categories add up to the allocated bytes, on the tensors' device, without a CUDA call."""
    report = reported(exporter, place, TRAIN)
    (device,) = report["frameworks"][0]["devices"]
    categories = {"parameters": 3000, "gradients": 3000, "optimizer": 6000, "activations": 500}
    assert (device["ordinal"], device["categories"], device["allocated"]) == (1, categories, 12_500)


HOLD = "kept = torch.Tensor(8)\nwait_for_report()\nprint(torch.calls)\n"


def test_only_reads(place: Path, exporter: FakeExporter) -> None:
    """With every allocator, only the program itself calls CUDA, and no peak is reset."""
    for backend, supported in (("native", True), ("cudaMallocAsync", False), ("pluggable", False)):
        exporter.reports.clear()
        report = reported(exporter, place, HOLD, FAKE_TORCH_BACKEND=backend)
        entry = report["frameworks"][0]
        assert (entry["allocator"], entry["supported"]) == (backend, supported)
        assert ("devices" in entry) is supported
        assert report["errors"] == {}


def test_settings_and_pinned_memory(place: Path, exporter: FakeExporter) -> None:
    """Settings and pinned memory are reported; expandable segments hide the bytes that could be reclaimed."""
    report = reported(exporter, place, HOLD, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    (entry,) = report["frameworks"]
    assert entry["settings"] == {
        "expandable_segments": "true", "garbage_collection_threshold": "off",
        "max_split_size_mb": "unlimited",
    }  # fmt: skip
    assert (entry["pinned"], entry["pinned_in_use"]) == (4096, 1024)
    (device,) = entry["devices"]
    assert {"small_pool", "large_pool"} <= device.keys()
    assert "reclaimable" not in device
    assert (device["reserved"], device["largest_free_block"]) == (2**21, 2**21 - 8)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_beside_its_own_allocator_nothing_is_read(place: Path, exporter: FakeExporter, moment: str) -> None:
    """PyTorch calls such an allocator with its lock held: to read its counters then could be a deadlock."""
    code = textwrap.dedent("""
        import os

        def read(ordinal, counters=torch._C._cuda_memoryStats):
            if own:
                torch.called("read")
            return counters(ordinal)

        own = []
        torch._C._cuda_memoryStats = read
        if os.environ["MOMENT"] == "before":
            own.append(torch._C._cuda_customAllocator(1, 2))
        kept = torch.Tensor(8)
        if os.environ["MOMENT"] == "after":
            sys.stdin.readline()
            own.append(torch._C._cuda_customAllocator(1, 2))
        sys.stdin.readline()
        print("read" in torch.calls)
    """)
    environ = environment(place, FAKE, VRAMLEDGER_AGENT_INTERVAL="0.1", MOMENT=moment)
    process = start(BEGINNING + code, environ)

    def framework() -> dict[str, object]:
        reports = exporter.reports.get(process.pid)
        return reports[-1]["frameworks"][0] if reports and reports[-1]["frameworks"] else {}

    if moment == "after":
        wait_until(lambda: framework().get("supported") is True, "a report")
        go_on(process)
    wait_until(lambda: framework().get("supported") is False, "a report without figures")
    assert "devices" not in framework()
    out, _ = process.communicate("\n")
    assert out.strip().endswith("False")


def test_collector(place: Path, exporter: FakeExporter) -> None:
    """The report says whether the cyclic collector is on and how often it ran; it does not call us."""
    code = textwrap.dedent("""
        import gc
        gc.disable()
        kept = torch.Tensor(8)
        wait_for_report()
        gc.collect()
        assert gc.callbacks == []
        wait_for_report()
    """)
    collector = reported(exporter, place, code)["collector"]
    assert collector["enabled"] is False
    assert collector["collections"] >= 1


OOM = """
kept = torch.Tensor(2**20)
wait_for_report()
try:
    torch.Tensor(2**50)
except torch._C.OutOfMemoryError as error:
    print(type(error).__name__, error.__context__, error.__cause__)
"""


def test_out_of_memory(place: Path, exporter: FakeExporter) -> None:
    """A failed allocation is classified, counted and written to a private file; its error is unchanged."""
    report = reported(exporter, place, OOM)
    told = report["last_oom"]
    path = Path(told["report"])
    facts = json.loads(path.read_text())
    assert (told["verdict"], told["requested"], told["ordinal"]) == ("too_big", 2**50, 0)
    assert facts["verdict"] == "too_big"
    assert facts["pool"]["allocated"] == 2**20
    assert "too big" in path.with_suffix(".txt").read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert report["frameworks"][0]["devices"][0]["ooms"] == 1


PATIENT = """
import vramledger_agent.oom.handler
for name in ("oom.handler", "worker"):
    sys.modules["vramledger_agent." + name].OOM_REPORT_TIMEOUT_SECONDS = 30.0
"""
"""Where others work, half a second is little."""


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "pass"])
def test_out_of_memory_is_the_last_thing(place: Path, exporter: FakeExporter, end: str) -> None:
    """The exporter learns of a failure before the program sees its exception, however the program ends."""
    code = PATIENT + OOM.replace("wait_for_report()", "sys.stdin.readline()") + f"import os\n{end}\n"
    environ = environment(place, FAKE, VRAMLEDGER_AGENT_INTERVAL="60")
    process = exporter.watch(start(BEGINNING + code, environ))
    process.communicate("\n")
    assert exporter.last_report(process)["last_oom"]["verdict"] == "too_big"


def test_out_of_memory_while_the_thread_rests(place: Path, exporter: FakeExporter) -> None:
    """A failure that follows too soon after the last one is reported at the program's end."""
    again = "\ntry:\n    torch.Tensor(2**51)\nexcept torch._C.OutOfMemoryError:\n    pass\n"
    rest = "from vramledger_agent.worker import worker\nworker.stop_thread(10)\n"
    report = reported(exporter, place, OOM + rest + again)
    assert report["last_oom"]["requested"] == 2**51
    assert "report" not in report["last_oom"], "one file is enough for both"


def test_a_leak_within_seconds(place: Path, exporter: FakeExporter) -> None:
    """A leak that fills the device before the agent has made its readings shows in the first steps."""
    code = textwrap.dedent("""
        parameter = torch.Tensor(8)
        parameter.grad = torch.Tensor(8)
        optimizer = torch.optim.Adam([parameter])
        sys.stdin.readline()
        kept = []
        try:
            while True:
                optimizer.step()
                kept.append(torch.Tensor(4 * 2**30))
        except torch._C.OutOfMemoryError:
            print(len(kept))
    """)
    report = reported(exporter, place, code, VRAMLEDGER_AGENT_INTERVAL="60")
    assert report["last_oom"]["verdict"] == "leaking"


def test_out_of_memory_says_who_holds_the_device(place: Path, exporter: FakeExporter) -> None:
    """The exporter's figures of other processes decide the verdict, and are in the report."""
    gib = 2**30
    holders = [
        {"self": True, "bytes": 2**21, "state": "active"},
        {"pid": 1, "owner": "training", "bytes": 78 * gib, "state": "idle"},
    ]
    device = {"total": 80 * gib, "free": gib, "holders": holders}
    exporter.answer = {"version": 1, "ok": True, "devices": [device]}
    # This test's thread answers, when it gets to it.
    patient = "from vramledger_agent.oom import handler; handler.TIMEOUT_SECONDS = 30"
    full = f"torch._C.allocators[0].free = 2**30; wait_for_report(); {patient}"
    code = OOM.replace("2**50", "2**35").replace("wait_for_report()", full)
    report = reported(exporter, place, code)
    path = Path(report["last_oom"]["report"])
    assert report["last_oom"]["verdict"] == "hoarded"
    assert "78.00 GiB  training, pid 1, idle" in path.with_suffix(".txt").read_text()


def test_out_of_memory_never_raises(place: Path) -> None:
    """Whatever fails in the observer, the program sees torch's own exception; Ctrl-C is raised afterwards."""
    code = """
        kept = torch.Tensor(8)
        from vramledger_agent.oom import handler
        while not handler.observer.attached:
            time.sleep(0.01)
        for failure in (MemoryError, SystemExit, KeyboardInterrupt):
            def broken(*_):
                raise failure
            handler.OomDiagnosis = broken
            try:
                try:
                    torch.Tensor(2**50)
                except torch._C.OutOfMemoryError:
                    print("theirs")
                for _ in range(100):
                    pass
            except KeyboardInterrupt:
                print("interrupted")
    """
    out = run(place, code).split()
    assert out[:2] == ["theirs", "theirs"]
    assert "interrupted" in out


def test_reports_go_where_their_owner_said(place: Path) -> None:
    """No report goes to another user's directory, or through a link of another user; our own link works."""
    require_root()
    ours, theirs, link = place / "ours", place / "theirs", place / "link"
    ours.mkdir(mode=0o700)
    theirs.mkdir(mode=0o777)
    os.chown(theirs, NOBODY, NOBODY)
    link.symlink_to(ours)
    facts: dict[str, object] = {"verdict": "unknown"}
    assert report_file.write_report(facts, str(link))
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    assert report_file.write_report(facts, str(link)) is None
    assert report_file.write_report(facts, str(theirs)) is None
    assert (len(list(ours.glob("*.json"))), list(theirs.iterdir())) == (1, [])


def test_reports_of_others_take_no_place(tmp_path: Path) -> None:
    """Where several users write, their files and their names for ours neither count nor are removed."""
    require_root()
    (tmp_path / "ours").touch()
    theirs: list[Path] = []
    for number in range(report_file.MAX_KEPT):
        theirs += (tmp_path / f"oom-99991231T235959-{pid}-{number:06d}.json" for pid in (1, 2))
        theirs[-1].touch()
        os.chown(theirs[-1], NOBODY, NOBODY)
        theirs[-2].hardlink_to(tmp_path / "ours")
    for _ in range(report_file.MAX_KEPT + 3):
        written = report_file.write_report({"verdict": "unknown"}, str(tmp_path), {"segments": []})
        assert Path(sure(written)).with_suffix(".pickle").exists()
    assert all(path.exists() for path in theirs)
    assert len(list(tmp_path.glob("oom-2*"))) == 2 * report_file.MAX_KEPT + report_file.MAX_KEPT_SNAPSHOTS


@pytest.mark.parametrize("hook", ["raise ValueError", "sys.exit(3)"])
def test_hooks_of_the_program(place: Path, exporter: FakeExporter, hook: str) -> None:
    """A program's own hooks that fail do so as without the agent, and the agent continues."""
    code = textwrap.dedent(f"""
        import gc
        def theirs(*_):
            {hook}
        gc.callbacks.append(theirs)
        sys.stderr = open('/dev/null', 'w')
        sys.unraisablehook = lambda _: None
        kept = torch.Tensor(8)
        gc.collect()
        wait_for_report()
        gc.callbacks.remove(theirs)
    """)
    assert reported(exporter, place, code)["collector"]["collections"] >= 1


@pytest.mark.both
def test_prometheus_collector_alone(place: Path) -> None:
    """The program's own registry has the figures of now, without ``start()``; no scrape counts for growth."""
    code = """
        import vramledger_agent
        from prometheus_client import CollectorRegistry, generate_latest
        registry = CollectorRegistry()
        registry.register(vramledger_agent.PrometheusCollector())
        print('device="0"' in generate_latest(registry).decode())
        kept = torch.Tensor(2**20)
        line = 'vramledger_torch_allocated_bytes{device="0"} 1.048576e+06'
        print(line in generate_latest(registry).decode())
        from vramledger_agent.worker import worker
        allocator = worker.poller.states["torch"].provider.allocator
        before = len(allocator.minima(0))
        for _ in range(300):
            generate_latest(registry)
        print(len(allocator.minima(0)) - before < 100)
    """
    environ = environment(place, FAKE, listening.AGENT_ROOT, VRAMLEDGER_AGENT="0")
    assert finish(start(BEGINNING + textwrap.dedent(code), environ)) == "False\nTrue\nTrue\n"


def test_a_hung_exporter_is_waited_for_once(place: Path) -> None:
    """A program that catches many failures waits for an exporter that does not answer only at the first."""
    code = """
        from vramledger_agent import transport
        kept = torch.Tensor(8)
        from vramledger_agent.oom import handler
        while not handler.observer.attached:
            time.sleep(0.01)
        asked = []
        real = transport.request
        def request(*arguments):
            asked.append(arguments)
            return real(*arguments)
        transport.request = request
        for _ in range(20):
            try:
                torch.Tensor(2**40)
            except torch._C.OutOfMemoryError:
                pass
        print(len(asked))
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hung:
        hung.bind(str(place / "agent.sock"))
        hung.listen(1)
        assert run(place, code) == "1\n"


def test_an_answer_that_is_too_deep_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that asks an exporter runs on, whatever is said."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(transport, "connect", lambda _: ours)
    with theirs:
        theirs.send(b"[" * 60_000)
        assert transport.request("", {}, 1.0) is None


STEPS = """
parameter = torch.Tensor(100)
parameter.grad = torch.Tensor(100)
class Unhashable(torch.optim.Adam):
    __hash__ = None
    def __eq__(self, other): return True
class Unreferable:
    __slots__ = ("param_groups", "state")
optimizers = [Unhashable([parameter]) for _ in range(2)] + [torch.optim.Adam([parameter])]
wait_for_report()
from vramledger_agent.worker import worker
steps = worker.poller.states["torch"].provider.optimizer_steps
for optimizer in optimizers:
    optimizer.step()
"""


def test_an_unusual_optimizer(place: Path, exporter: FakeExporter) -> None:
    """An optimizer that cannot be hashed is counted; one that cannot be watched costs the sums, no more."""
    code = STEPS + textwrap.dedent("""
        print([count.bytes for count in steps.counts.values()], steps.categories(0, 10**6) is not None)
        steps.after_step(Unreferable())
        print(worker.errors, bool(steps._hook_handles), steps.categories(0, 10**6))
    """)
    assert run(place, code).splitlines() == [f"{[{0: [100, 100, 200]}] * 3} True", "{} True None"]
    assert exporter.reports


def test_a_step_in_the_backward_pass_is_no_boundary(place: Path, exporter: FakeExporter) -> None:
    """An optimizer that steps inside the backward pass is not counted there, and nothing else runs there."""
    code = "torch._C.graph_task = 7\n" + STEPS + textwrap.dedent("""
        from vramledger_agent import step_boundary
        import _thread
        ran = []
        _thread.start_new_thread(step_boundary.run, (lambda: ran.append(torch._C.graph_task), 30))
        while not step_boundary.is_awaited():
            time.sleep(0.01)
        optimizer.step()
        print(steps.counts, ran)
        torch._C.graph_task = -1
        optimizer.step()
        print(len(steps.counts), ran)
    """)  # fmt: skip
    assert run(place, code) == "{} []\n1 [-1]\n"
    assert exporter.reports


@pytest.mark.parametrize("name", ["cupy", "rmm"])
def test_a_framework_that_is_the_last_import(place: Path, name: str) -> None:
    """A framework whose import is the program's last one is noticed: it imports its own parts."""
    (place / name).mkdir()
    (place / name / "__init__.py").write_text(f"from {name} import part")
    (place / name / "part.py").write_text("")
    code = f"import {name}, sys; print(*sys.modules['vramledger_agent.worker'].worker.poller.states)"
    assert finish(start(code, environment(place, place))) == f"{name}\n"


def test_the_requester_is_told_of_a_signal(place: Path, exporter: FakeExporter) -> None:
    """A signal during what a request does at a step's end is the program's; the requester gets an error."""
    code = """
        import signal, _thread
        from vramledger_agent import step_boundary
        told = []
        def ask(function):
            def wait():
                try:
                    told.append(step_boundary.run(function, 30))
                except BaseException as error:
                    told.append(type(error).__name__)
            _thread.start_new_thread(wait, ())
            while not step_boundary.is_awaited():
                time.sleep(0.01)
        works = (lambda: signal.raise_signal(signal.SIGINT), lambda: 1 / 0, lambda: 3)
        for done, function in enumerate(works):
            ask(function)
            try:
                step_boundary.run_pending()
            except KeyboardInterrupt:
                print("theirs")
            while len(told) <= done or step_boundary.is_awaited():
                time.sleep(0.01)
        print(told)
    """
    assert run(place, code) == "theirs\n['InterruptedError', 'ZeroDivisionError', 3]\n"
    assert not exporter.reports
