"""What a recording tells of a program: at a failed allocation, and of the training steps before it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.listening import AGENT_ROOT
from tests.support.recorded_torch import CONSENT, FROM_START, MIB, REQUEST, peak, reports, run
from tests.support.sure import sure
from vramledger_agent.oom import report_file
from vramledger_agent.torch_snapshots.safe_pickle import load_plain
from vramledger_agent.torch_snapshots.snapshot import AllocationSnapshot, parse_snapshot
from vramledger_agent.torch_snapshots.text import snapshot_text, training_text


def snapshot_of(report: dict[str, Any]) -> AllocationSnapshot:
    return parse_snapshot(load_plain(Path(report["snapshot"])))


def reported(place: Path, code: str, **variables: str) -> tuple[dict[str, Any], str]:
    """Run a program to its end; return the one report that it wrote, and the report's text."""
    run(place, code, **variables)
    (report,), (path,) = reports(place), (place / "reports").glob("*.txt")
    return report, path.read_text()


def test_the_failing_stack_needs_no_recording(place: Path) -> None:
    """Every report names the lines that failed; without consent nothing is recorded or dumped."""
    report, text = reported(place, "step(); fail(); assert torch.cuda.memory.recording is None")
    assert report["stack"]["phase"] == "forward"
    assert [frame["function"] for frame in report["stack"]["frames"]][-2:] == ["fail", "<module>"]
    assert "snapshot" not in report
    assert "flight" not in report
    assert "Where it failed" in text
    assert not list((place / "reports").glob("*.pickle"))


def test_a_recording_from_the_start_has_every_line(place: Path) -> None:
    """Parameters made before anything else have their line of code, at a failure and in its snapshot."""
    report, _ = reported(place, "step(); fail()", **FROM_START)
    lines = {line["function"]: line["bytes"] for line in report["flight"]["lines"]}
    assert lines["make_model" if "make_model" in lines else "<listcomp>"] == 3 * MIB
    assert lines["step"] == 6 * MIB, "the optimizer's state, by the line that stepped"
    assert report["flight"]["from_start"] is True
    assert "before the recording" not in snapshot_text(snapshot_of(report))
    assert Path(report["snapshot"]).stat().st_mode & 0o777 == 0o600


def test_old_blocks_keep_their_lines_when_the_ring_is_full(place: Path) -> None:
    """A recording drops old events, and still names the line of a block that was allocated before them."""
    code = "kept = torch.Tensor(7 * M)\nfor _ in range(1000):\n    step()\nfail()"
    report, _ = reported(place, code, **FROM_START)
    assert len(snapshot_of(report).events) == 10_000
    assert (7 * MIB, 1) in [(line["bytes"], line["blocks"]) for line in report["flight"]["lines"]]
    assert all(step["whole"] for step in report["flight"]["steps"] if step["finished"])


def test_a_list_of_all_objects_makes_no_allocator(place: Path) -> None:
    """A program that lists all objects, as profilers of memory do, is reported on all the same."""
    reported(place, "import gc\nkept = gc.get_objects()\nstep()\nfail()")  # it has one report


def test_peaks_within_the_steps(place: Path) -> None:
    """The peaks of forward, backward and optimizer are exact, each with its categories."""
    report, _ = reported(place, "step(); step(); step(); fail()", **FROM_START)
    last = [step for step in report["flight"]["steps"] if step["finished"]][-1]
    assert (last["whole"], last["batch"]) == (True, 8)
    assert last["phases"] == {
        "forward": peak(parameters=3, optimizer=6, activations=8),
        "backward": peak(parameters=3, gradients=3, optimizer=6, activations=8),
        "optimizer": peak(parameters=3, gradients=3, optimizer=6, activations=8),
    }
    assert last["gradients_before_backward"] == 0
    assert "20.0 MiB" in training_text(sure(snapshot_of(report).training))


@pytest.mark.parametrize("variables", [FROM_START, {}])
@pytest.mark.parametrize("clear", [True, False])
def test_a_missing_zero_grad(place: Path, clear: bool, variables: dict[str, str]) -> None:
    """Gradients that live from step to step are named, with a recording and without; others never."""
    report, text = reported(place, f"for _ in range(6):\n    step(clear={clear})\nfail()", **variables)
    assert report["gradients_kept"] is not clear
    assert ("zero_grad() is missing" in text) is not clear
    if variables:
        steps = [step for step in report["flight"]["steps"] if step["finished"]]
        assert steps[-1]["gradients_before_backward"] == (0 if clear else 3 * MIB)
        assert ("zero_grad()" in training_text(sure(snapshot_of(report).training))) is not clear


def test_a_gradient_in_a_bucket_says_nothing(place: Path) -> None:
    """A gradient that is a part of a larger tensor has the version of that, so nothing is said of it."""
    code = "torch.Tensor.view = True\nfor _ in range(6):\n    step(clear=False)\nfail()"
    report, text = reported(place, code)
    assert report["gradients_kept"] is None
    assert "zero_grad" not in text


def test_only_our_own_files_are_removed(tmp_path: Path) -> None:
    """Of many snapshots the newest stay; a file that the program has named in a similar way always stays."""
    theirs = [tmp_path / "oom-rank0.pickle", tmp_path / "oom-1.json", tmp_path / "oom-.txt"]
    for path in theirs:
        path.write_text("theirs")
    for _ in range(report_file.MAX_KEPT + 3):
        report_file.write_report({"verdict": "unknown"}, str(tmp_path), {"segments": []})
    assert all(path.read_text() == "theirs" for path in theirs)
    assert len(list(tmp_path.glob("oom-2*.pickle"))) == report_file.MAX_KEPT_SNAPSHOTS
    for ending in ("json", "txt"):
        assert len(list(tmp_path.glob(f"oom-2*.{ending}"))) == report_file.MAX_KEPT
    assert report_file.write_report({"verdict": "unknown"}, "/proc/nowhere") is None


def test_types_of_numbers(place: Path) -> None:
    """Bytes by type of number show whether mixed precision is on, and so does the state of autocast."""
    code = "torch.autocast = torch.bfloat16\nstep()\nkept = forward(4)\nfail()"
    report, text = reported(place, code, **FROM_START)
    assert report["autocast"] == "bfloat16"
    assert report["flight"]["types"] == {
        "parameters": {"float32": 3 * MIB},
        "gradients": {"float32": 3 * MIB},
        "optimizer": {"float32": 6 * MIB},
    }
    assert report["flight"]["forward_types"] == {"bfloat16": 3 * 4 * 512 * 2}
    assert "100% bfloat16" in text


@pytest.mark.parametrize("phase", ["optimizer", "backward"])
def test_autocast_outside_of_the_forward_pass_says_nothing(place: Path, phase: str) -> None:
    """Programs that use AMP leave autocast before backward and step, so no report says that it is off."""
    code = f"""
        file = {{"optimizer": "/x/torch/optim/adam.py", "backward": "/x/torch/nn/checkpoint.py"}}["{phase}"]
        source = compile("def inner():\\n    torch.Tensor(2**40)", file, "exec")
        exec(source)
        def attempt():
            try:
                inner()
            except torch._C.OutOfMemoryError:
                pass
        thread_main = compile("def run():\\n    attempt()", "/x/torch/autograd/graph.py", "exec")
        exec(thread_main)
        attempt() if "{phase}" == "optimizer" else __import__("_thread").start_new_thread(run, ())
        while handler.observer._reports < 1:
            time.sleep(0.01)
        with handler.observer._busy:  # it is written
            pass
    """
    report, text = reported(place, code)
    assert report["stack"]["phase"] == phase
    assert report["autocast"] is None
    assert "Autocast" not in text


@pytest.mark.parametrize(
    ("batches", "failed", "fits"),
    [
        ((8, 8, 16, 16, 24), 100, 38),
        ((8, 16), 64, 38),  # 52 MiB, of which 2 % stay free: 12 for the model, one for each of the batch
        ((8, 8), 64, 38),
        ((8,), 8, None),  # it has just fitted, so its size is not why this failed
        ((), 64, None),
    ],
)
def test_the_batch_that_fits(place: Path, batches: tuple[int, ...], failed: int, fits: int | None) -> None:
    """Where the last steps show how the memory follows the batch, the report says which batch fits."""
    code = f"""
        torch._C.CAPACITY = 52 * M
        torch._C.allocators[0].free = 52 * M - torch._C.allocators[0].reserved
        step(2)
        for batch in {batches}:
            step(batch)
        optimizer.zero_grad()
        kept = forward(1)
        kept[-1].grad_fn = None
        node = torch.Node("MmBackward0", torch.float32, ({failed}, 512))
        kept[-1].grad_fn = torch.Node("ReluBackward0", torch.float32, ({failed}, 512), node)
        fail(64 * M)
    """
    report, text = reported(place, code, **FROM_START)
    assert (report["flight"]["batch"], report["flight"]["fitting_batch"]) == (failed, fits)
    assert (f"By the slope of the last steps {fits} fits" in text) is (fits is not None)


def test_a_collector_that_is_off_costs_nothing(place: Path) -> None:
    """Where a program has turned the collector off, all objects are young, and none is looked at."""
    code = """
        import gc
        from vramledger_agent.torch.recording import recording
        step(4)
        gc.disable()
        kept = [[] for _ in range(40_000)]
        asked = gc.get_objects
        gc.get_objects = lambda *_: print("asked")
        step(4)
        gc.get_objects = asked
        print([mark.batch for mark in recording.marks])
    """
    assert run(place, code, **FROM_START) == "[4, None]\n"


def test_a_stale_view_costs_nothing(place: Path) -> None:
    """A view whose base a step has changed is left out; batch and flight of all others stay known."""
    code = """
        stale = forward(4)
        stale[-1].stale = True
        on_the_host = torch.Tensor(4, kind="cpu")
        on_the_host.stale = True
        from vramledger_agent.torch.recording import recording
        step(8)
        kept = forward(16)
        fail()
        print([mark.batch for mark in recording.marks])
    """
    assert run(place, code, **FROM_START) == "failed\n[8]\n"
    (report,) = reports(place)
    assert report["flight"]["batch"] == 16
    assert report["flight"]["types"]["parameters"] == {"float32": 3 * MIB}


UNREADABLE = """
def unreadable(*_):
    raise AttributeError("no such attribute")
"""


@pytest.mark.parametrize("broken", ["gc.get_objects", "torch._C._cuda_memoryStats"])
def test_what_cannot_be_read_ends_no_request(place: Path, broken: str) -> None:
    """If a step cannot be read, a request still has its snapshot, and the errors are counted."""
    path = place / "snapshot.pickle"
    code = f"""
        import gc
        {broken} = unreadable
        print(request(step, step=True, seconds=30.0), worker.errors["torch"] > 0)
        worker.errors.clear()
        worker.stop()
        worker.errors.clear()
    """
    out = run(place, f"PATH = {str(path)!r}\n{REQUEST}\n{UNREADABLE}{textwrap.dedent(code)}", **CONSENT)
    assert out == "agent True\n"
    assert parse_snapshot(load_plain(path)).training is not None


def test_a_failure_keeps_its_lines_without_the_tensors(place: Path) -> None:
    """If the tensors cannot be read, the report still has the lines that hold the memory."""
    code = UNREADABLE + textwrap.dedent("""
        import gc
        step()
        asked, gc.get_objects = gc.get_objects, unreadable
        fail()
        gc.get_objects = asked
        print(worker.errors.pop("torch"))
    """)
    assert run(place, code, **FROM_START) == "failed\n1\n"
    (report,) = reports(place)
    assert report["flight"]["lines"]


def test_a_forked_child_reads_nothing(place: Path) -> None:
    """In a forked child the allocator's lock may be held for ever: a step there reads and marks nothing."""
    code = """
        import os
        from vramledger_agent.torch.recording import recording
        step()
        marks = len(recording.marks)
        pid = os.fork()
        if pid == 0:
            torch._C._cuda_memoryStats = lambda ordinal: os._exit(3)
            torch.optim.Adam([]).step()
            os._exit(len(recording.marks) - marks)
        print(os.waitpid(pid, 0)[1])
    """
    assert run(place, code, **FROM_START) == "0\n"


@pytest.mark.parametrize(("variables", "hooks"), [({}, 0), (CONSENT, 1), (FROM_START, 1)])
def test_the_start_of_steps_is_seen_by_consent(place: Path, variables: dict[str, str], hooks: int) -> None:
    """The hook before a step, which every step would pay for, is there only where a recording may come."""
    code = "import torch.optim.optimizer as module\nprint(len(module._pre_hooks), len(module._hooks))"
    assert run(place, code, **variables) == f"{hooks} 1\n"


def test_more_than_there_is(place: Path) -> None:
    """The report says how many bytes were missing, from what the allocator and the device have left."""
    report, text = reported(place, "fail(100 * 2**30)")
    assert report["missing"] == 100 * 2**30 + report["pool"]["active"] - 80 * 2**30
    assert "more than it could get    20.00 GiB" in text


def test_a_report_keeps_no_tensor(place: Path) -> None:
    """What the failing frames held is free as soon as the program has left them."""
    code = """
        import gc
        gc.disable()
        def deep():
            held = torch.Tensor(10 * M)
            fail()
        before = torch._C.allocators[0].allocated
        deep()
        print(torch._C.allocators[0].allocated - before)
    """
    assert run(place, code, **FROM_START) == "failed\n0\n"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_recording_of_the_program_stays(place: Path, moment: str) -> None:
    """A program that records by itself keeps its recording: ours does not begin, or has ended with it."""
    record = "torch.cuda.memory._record_memory_history(max_entries=5)"
    first, second = (record, "") if moment == "before" else ("", record)
    code = f"""
        {second}
        step()
        fail()
        print(torch.cuda.memory.recording["most"])
        torch.cuda.memory._record_memory_history(None)
        step()
        time.sleep(5.1)
        fail()
        print(torch.cuda.memory.recording)
    """
    assert run(place, code, before=first, **FROM_START) == "failed\n5\nfailed\nNone\n"
    assert [("flight" in report) for report in reports(place)] == [False, False]


def test_a_torch_that_cannot_record_is_watched_all_the_same(place: Path) -> None:
    """Before PyTorch 2.2 there is no recording, but optimizer steps, categories and reports are there."""
    code = """
        import torch.optim.optimizer as module
        step()
        fail()
        print(len(module._hooks), torch.cuda.memory.recording, worker.errors.pop("torch") > 0)
    """
    out = run(place, code, before="del torch._C._cuda_isHistoryEnabled", **FROM_START)
    (report,) = reports(place)
    assert out == "failed\n1 None True\n"
    assert report["categories"]["parameters"] == 3 * MIB
    assert "flight" not in report


REPLACED = """
import vramledger_agent
torch.cuda.memory._record_memory_history(max_entries=100_000)
"""


@pytest.mark.parametrize("work", ["vramledger_agent.stop()", "request(lambda: None, seconds=1.0)"])
def test_what_replaced_our_recording_goes_on(place: Path, work: str) -> None:
    """A recording of the program that has replaced ours outlives the agent, and is not called ours."""
    beginning = f"PATH = {str(place / 'snapshot.pickle')!r}\n{REQUEST}{REPLACED}"
    code = f"step()\nprint({work}, torch.cuda.memory.recording['most'])"
    out = run(place, beginning + code, **FROM_START)
    assert out.split()[-1] == "100000"
    if "request" in work:
        assert out == "program 100000\n"
        added = sure(parse_snapshot(load_plain(place / "snapshot.pickle")).training)
        assert not added.from_start
        assert not any(step.whole for device in added.devices for step in device.steps)


def test_a_failure_waits_for_no_frames_of_the_program(place: Path) -> None:
    """The blocks show that ours was replaced, so the failing thread waits for no C++ frames of events."""
    code = REPLACED + textwrap.dedent("""
        step()
        taken = torch.cuda.memory._snapshot
        torch._C._cuda_memorySnapshot = lambda *_: taken()
        torch.cuda.memory._snapshot = lambda *_: print("waited")
        fail()
    """)
    assert run(place, code, **FROM_START) == "failed\n"


def test_run_asks_for_a_recording() -> None:
    """``run --snapshot-from-start`` records and consents to snapshots; without it a variable stays."""
    names = ("VRAMLEDGER_AGENT_CONSENT", "VRAMLEDGER_AGENT_SNAPSHOT_FROM_START")
    show = [sys.executable, "-c", f"import os; print(*map(os.environ.get, {names}))"]
    environ = {**os.environ, "PYTHONPATH": str(AGENT_ROOT)}
    for flags, expected in (
        (("--snapshot-from-start",), "snapshot 1\n"),
        (("--snapshot-from-start", "--allow-reclaim"), "reclaim,snapshot 1\n"),
        ((), "None None\n"),
    ):
        command = [sys.executable, "-m", "vramledger_agent", "run", *flags, "--", *show]
        assert subprocess.check_output(command, env=environ, text=True) == expected
