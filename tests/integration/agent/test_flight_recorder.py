"""What a recording tells of a program: at a failed allocation, and of the training steps before it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.listening import FAKE, PROJECT, environment, finish, start
from vramledger.torch_snapshots.safe_pickle import load_plain
from vramledger.torch_snapshots.snapshot import AllocationSnapshot, parse_snapshot
from vramledger.torch_snapshots.text import snapshot_text
from vramledger.torch_snapshots.training_text import training_text

MIB = 2**20

BEGINNING = """
import sys, time, torch
M = 2**20
def make_model():
    return [torch.Tensor(M) for _ in range(3)]
model = make_model()
from vramledger.agent.oom import handler
from vramledger.agent.worker import worker
while not handler.observer.attached:
    time.sleep(0.01)
optimizer = torch.optim.Adam(model)

def forward(batch):
    node = torch.Node("torch::autograd::AccumulateGrad", torch.float32, (512, 512))
    for number in range(3):
        node = torch.Node(f"MmBackward{number}", torch.bfloat16, (batch, 512), node)
    activations = [torch.Tensor(batch * M // 4, dtype=torch.bfloat16) for _ in range(4)]
    activations[-1].grad_fn = node
    return activations

def step(batch=8, clear=True):
    if clear:
        optimizer.zero_grad()
    loss = forward(batch)
    torch.backward(model)
    optimizer.step()

def fail(size=2**40):
    try:
        torch.Tensor(size)
    except torch._C.OutOfMemoryError:
        print("failed")
"""

FROM_START = {"VRAMLEDGER_AGENT_SNAPSHOT_FROM_START": "1"}


def run(place: Path, code: str, **variables: str) -> str:
    """Run a program to its end; return its output."""
    program = BEGINNING + textwrap.dedent(code) + "\nassert worker.errors == {}, worker.errors\n"
    return finish(start(program, environment(place, FAKE, **variables)))


def reports(place: Path) -> list[dict[str, Any]]:
    """Return the reports that a program wrote, the oldest first."""
    return [json.loads(path.read_text()) for path in sorted((place / "reports").glob("*.json"))]


def snapshot_of(report: dict[str, Any]) -> AllocationSnapshot:
    """Read the snapshot that belongs to a report, as the command does."""
    return parse_snapshot(load_plain(Path(report["snapshot"])))


def text_of(place: Path) -> str:
    """Return the text of the only report."""
    (path,) = (place / "reports").glob("*.txt")
    return path.read_text()


def functions(entries: list[dict[str, Any]]) -> list[str]:
    """Return the functions of some frames."""
    return [entry["function"] for entry in entries]


def test_the_failing_stack_needs_no_recording(place: Path) -> None:
    """Every report names the lines that failed; without consent nothing is recorded or dumped."""
    run(place, "step(); fail(); assert torch.cuda.memory.recording is None")
    (report,) = reports(place)

    assert report["stack"]["phase"] == "forward"
    assert functions(report["stack"]["frames"])[-2:] == ["fail", "<module>"]
    assert "snapshot" not in report
    assert "flight" not in report
    assert "Where it failed" in text_of(place)
    assert not list((place / "reports").glob("*.pickle"))


def test_a_recording_from_the_start_has_every_line(place: Path) -> None:
    """Parameters made before anything else have their line of code, at a failure and in its snapshot."""
    run(place, "step(); fail()", **FROM_START)
    (report,) = reports(place)
    lines = {line["function"]: line["bytes"] for line in report["flight"]["lines"]}

    assert lines["make_model" if "make_model" in lines else "<listcomp>"] == 3 * MIB
    assert lines["step"] == 6 * MIB, "the optimizer's state, by the line that stepped"
    assert report["flight"]["from_start"] is True
    shown = snapshot_text(snapshot_of(report))
    assert "before the recording" not in shown
    assert Path(report["snapshot"]).stat().st_mode & 0o777 == 0o600


def test_old_blocks_keep_their_lines_when_the_ring_is_full(place: Path) -> None:
    """A recording drops old events, and still names the line of a block that was allocated before them."""
    code = "kept = torch.Tensor(7 * M)\nfor _ in range(4000):\n    step()\nfail()"
    run(place, code, **FROM_START)
    (report,) = reports(place)

    assert len(snapshot_of(report).events) <= 10_000
    assert {"bytes": 7 * MIB, "blocks": 1} in [
        {name: line[name] for name in ("bytes", "blocks")} for line in report["flight"]["lines"]
    ]
    assert all(step["whole"] for step in report["flight"]["steps"] if step["finished"])


def test_peaks_within_the_steps(place: Path) -> None:
    """The peaks of forward, backward and optimizer are exact, each with its categories."""
    run(place, "step(); step(); step(); fail()", **FROM_START)
    (report,) = reports(place)
    last = [step for step in report["flight"]["steps"] if step["finished"]][-1]

    assert (last["whole"], last["batch"]) == (True, 8)
    assert last["phases"] == {
        "forward": peak(parameters=3, optimizer=6, activations=8),
        "backward": peak(parameters=3, gradients=3, optimizer=6, activations=8),
        "optimizer": peak(parameters=3, gradients=3, optimizer=6, activations=8),
    }
    assert last["gradients_before_backward"] == 0
    snapshot = snapshot_of(report)
    assert snapshot.training is not None
    assert "20.0 MiB" in training_text(snapshot.training)


def peak(
    *, parameters: int = 0, gradients: int = 0, optimizer: int = 0, activations: int = 0
) -> dict[str, Any]:
    """Return a peak as reports have it, from MiB."""
    categories = {
        "parameters": parameters * MIB,
        "gradients": gradients * MIB,
        "optimizer": optimizer * MIB,
        "activations": activations * MIB,
    }
    return {"bytes": sum(categories.values()), "categories": categories}


@pytest.mark.parametrize("variables", [FROM_START, {}])
@pytest.mark.parametrize("clear", [True, False])
def test_a_missing_zero_grad(place: Path, clear: bool, variables: dict[str, str]) -> None:
    """Gradients that live from step to step are named, with a recording and without; others never."""
    run(place, f"for _ in range(6):\n    step(clear={clear})\nfail()", **variables)
    (report,) = reports(place)

    assert report["gradients_kept"] is not clear
    assert ("zero_grad() is missing" in text_of(place)) is not clear
    if variables:
        steps = [step for step in report["flight"]["steps"] if step["finished"]]
        assert steps[-1]["gradients_before_backward"] == (0 if clear else 3 * MIB)
        snapshot = snapshot_of(report)
        assert snapshot.training is not None
        assert ("zero_grad()" in training_text(snapshot.training)) is not clear


def test_types_of_numbers(place: Path) -> None:
    """Bytes by type of number show whether mixed precision is on, and so does the state of autocast."""
    code = """
        torch.autocast = torch.bfloat16
        step()
        kept = forward(4)
        fail()
    """
    run(place, code, **FROM_START)
    (report,) = reports(place)

    assert report["autocast"] == "bfloat16"
    assert report["flight"]["types"] == {
        "parameters": {"float32": 3 * MIB},
        "gradients": {"float32": 3 * MIB},
        "optimizer": {"float32": 6 * MIB},
    }
    assert report["flight"]["forward_types"] == {"bfloat16": 3 * 4 * 512 * 2}
    assert "100% bfloat16" in text_of(place)


@pytest.mark.parametrize(
    ("batches", "failed", "fits"),
    [
        ((8, 16), 64, 41),  # the device has 48 MiB: 9 for the model, a MiB for each of the batch
        ((8, 8), 64, 41),
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
    run(place, code, **FROM_START)
    (report,) = reports(place)

    assert report["flight"]["batch"] == failed
    found = report["flight"]["fitting_batch"]
    assert (found is None) == (fits is None or not batches)
    if found is not None:
        assert 30 <= found <= 44
        assert f"a batch of {found} fits" in text_of(place)


def test_more_than_there_is(place: Path) -> None:
    """The report says how many bytes were missing, from what the allocator and the device have left."""
    run(place, "fail(100 * 2**30)")
    (report,) = reports(place)

    in_use = report["pool"]["active"]
    assert report["missing"] == 100 * 2**30 + in_use - 80 * 2**30
    assert "more than it could get    20.00 GiB" in text_of(place)


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
    first = record if moment == "before" else "None"
    code = f"""
        {record if moment == "after" else ""}
        step()
        fail()
        print(torch.cuda.memory.recording["most"])
        torch.cuda.memory._record_memory_history(None)
        step()
        time.sleep(5.1)
        fail()
        print(torch.cuda.memory.recording)
    """
    program = f"import torch\n{first}\n{BEGINNING}{textwrap.dedent(code)}"
    out = finish(start(program, environment(place, FAKE, **FROM_START)))

    assert out == "failed\n5\nfailed\nNone\n"
    assert [("flight" in report) for report in reports(place)] == [moment == "after", False]


def test_run_asks_for_a_recording() -> None:
    """``run --snapshot-from-start`` records and consents to snapshots; without it a variable stays."""
    import os  # noqa: PLC0415
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    show = (
        "import os; names = 'CONSENT', 'SNAPSHOT_FROM_START';"
        " print([os.environ.get('VRAMLEDGER_AGENT_' + name) for name in names])"
    )
    for flags, expected in (
        (("--snapshot-from-start",), "['snapshot', '1']\n"),
        (("--snapshot-from-start", "--allow-reclaim"), "['reclaim,snapshot', '1']\n"),
        ((), "[None, None]\n"),
    ):
        command = [sys.executable, "-m", "vramledger", "run", *flags, "--", sys.executable, "-c", show]
        environ = {**os.environ, "PYTHONPATH": str(PROJECT / "exporter")}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert done.stdout == expected
