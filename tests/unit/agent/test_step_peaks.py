"""The peaks within training steps follow from the events alone, whatever the recording missed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.torch_snapshots import FORWARD, LINEAR, MAIN, MIB, STEP, TORCH, Frames, Heap, user
from vramledger_agent.oom.handler import PartPeak, Step, fitting_batch
from vramledger_agent.protocol.user_code import phase_of
from vramledger_agent.torch.step_peaks import AddressBook, StepMark, StepPeaks, step_peaks

MODEL = [{"filename": f"{TORCH}/nn/modules/module.py", "line": 900, "name": "_apply"}, *user(MAIN)]
IN_FORWARD = LINEAR + user(FORWARD, STEP, MAIN)
IN_BACKWARD: Frames = []
IN_OPTIMIZER = [{"filename": f"{TORCH}/optim/adamw.py", "line": 90, "name": "step"}, *user(STEP, MAIN)]
ENGINE = [("??", "unwind"), ("/pytorch/torch/csrc/autograd/engine.cpp", "evaluate_function"), ("", "run")]
START = [("/usr/include/c++/13/functional", "operator()"), ("/lib/libc.so.6", "start"), ("??", "clone3")]
SITE = "/venv/lib/python3.12/site-packages"
LIMIT = 6 * 2**30


class Program:
    """A training of steps with these activations, on a heap, with the marks that hooks would have made."""

    def __init__(self, *activations: int) -> None:
        self.heap = Heap()
        self.marks: list[StepMark] = []
        self.known: dict[int, str] = {}
        self.gradients: list[int] = []
        self.model = self.heap.allocate(4 * MIB, MODEL)
        self.known[self.model] = "parameters"
        self.state: int | None = None
        for each in activations:
            self.step(each)

    def step(self, activations: int, *, clear: bool = True, marked: bool = True) -> None:
        """Train one step."""
        if clear:
            for address in self.gradients:
                self.heap.release(address)
                self.known.pop(address)
            self.gradients.clear()
        saved = self.heap.allocate(activations * MIB, IN_FORWARD)
        passing = self.heap.allocate(1 * MIB, IN_BACKWARD)
        made = self.heap.allocate(4 * MIB, IN_BACKWARD)
        self.heap.release(saved)
        self.heap.release(passing)
        if self.gradients:
            self.heap.release(made)
        else:
            self.gradients.append(made)
            self.known[made] = "gradients"
        begun = self.heap.now + 100
        if self.state is None:
            self.state = self.heap.allocate(8 * MIB, IN_OPTIMIZER)
            self.known[self.state] = "optimizer"
        if marked:
            self.marks.append(StepMark(begun, self.heap.now + 500, None, {}, {}))

    def peaks(self, *, drop: int = 0) -> list[StepPeaks]:
        """Return the peaks of a recording that has lost its first events."""
        snapshot = self.heap.snapshot()
        snapshot["device_traces"] = [trace[drop:] for trace in snapshot["device_traces"]]
        return step_peaks(snapshot, 0, self.marks, self.known, whole=drop == 0)


def sizes(step: StepPeaks) -> dict[str, float]:
    """Return the peaks in MiB."""
    return {name: peak.bytes / MIB for name, peak in step.phases.items()}


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_native_frames_say_nothing_of_the_phase(phase: str) -> None:
    """With C++ frames around and between them, the frames of Python tell the same part of the step."""
    stacks = {"forward": IN_FORWARD, "backward": IN_BACKWARD, "optimizer": IN_OPTIMIZER}
    frames = [(frame["filename"], frame["name"]) for frame in stacks[phase]]
    assert phase_of(frames) == phase
    assert phase_of([*ENGINE, *frames, *START]) == phase
    assert phase_of([*ENGINE, *(each for frame in frames for each in (frame, *START)), *START]) == phase


def test_each_part_has_its_peak() -> None:
    """The peak of a part is the maximum that lived while it ran, and its categories add up to it."""
    first, second = Program(10, 20).peaks()
    assert sizes(first) == {"forward": 14, "backward": 19, "optimizer": 16}
    assert sizes(second) == {"forward": 32, "backward": 37, "optimizer": 16}
    assert second.phases["backward"].categories == {
        "parameters": 4 * MIB, "gradients": 4 * MIB, "optimizer": 8 * MIB, "activations": 21 * MIB,
    }  # fmt: skip
    assert (first.whole, second.whole) == (True, True)
    assert (first.gradients_before_backward, second.gradients_before_backward) == (0, 0)


def test_a_workspace_of_the_backward_pass_is_no_gradient() -> None:
    """What no optimizer knows counts as none of its gradients; one that allocates nothing has a peak."""
    program = Program()
    program.heap.allocate(32 * MIB, IN_BACKWARD)  # as cuBLAS does on the thread of the backward pass
    program.step(10)
    program.step(10)
    last = program.peaks()[-1]
    assert (last.gradients_before_backward, last.phases["optimizer"].categories["gradients"]) == (0, 4 * MIB)
    assert last.phases["optimizer"].categories["activations"] == 32 * MIB
    assert Program(10, 10).peaks()[-1].phases["optimizer"].categories["gradients"] == 4 * MIB


def test_what_an_optimizer_frees_again_is_not_its_state() -> None:
    """Memory that an optimizer frees within its step is not counted as its state."""
    program = Program(10)
    program.step(10, marked=False)
    begun = program.heap.now + 100
    program.heap.release(program.heap.allocate(6 * MIB, IN_OPTIMIZER))
    program.marks.append(StepMark(begun, program.heap.now + 500, None, {}, {}))
    peak = program.peaks()[-1].phases["optimizer"]
    assert (peak.bytes, peak.categories["optimizer"]) == (22 * MIB, 8 * MIB)


def test_kept_gradients_exist_before_the_backward_pass() -> None:
    """Gradients that no zero_grad freed are counted when the backward pass begins."""
    program = Program()
    for _ in range(3):
        program.step(10, clear=False)
    assert [step.gradients_before_backward for step in program.peaks()] == [0, 4 * MIB, 4 * MIB]


@given(drop=st.integers(0, 40), batches=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_lost_events_change_no_whole_step(drop: int, batches: list[int]) -> None:
    """A ring that has dropped its oldest events gives the same peaks for the steps that it has in full."""
    program = Program(*batches)
    everything = {step.ended: sizes(step) for step in program.peaks()}
    found = program.peaks(drop=drop)
    assert all(everything[step.ended] == sizes(step) for step in found if step.whole)
    peaks = [peak for step in found for peak in step.phases.values()]
    assert all(sum(peak.categories.values()) == peak.bytes >= 0 for peak in peaks)
    assert not any(step.whole for step in found[:1]) or drop == 0


def test_an_unfinished_step_is_shown_as_such() -> None:
    """What happens after the last mark is a step of its own, that has not ended."""
    program = Program(10)
    program.heap.allocate(50 * MIB, IN_FORWARD)
    *_, last = program.peaks()
    assert (last.ended, last.whole, sizes(last)) == (None, False, {"forward": 66})


@pytest.mark.parametrize("data", [{"segments": []}, {"segments": [], "device_traces": [[]]}])
def test_nothing_recorded_is_no_step(data: dict[str, Any]) -> None:
    """Without an event there is no peak, not a peak of zero."""
    assert step_peaks(data, 0, [StepMark(1, 2, None, {}, {})], {}) == []
    assert step_peaks(data, 3, [], {}) == []


def test_a_part_of_a_block_is_known_by_its_address() -> None:
    """A gradient that is a part of a larger block, as data parallel training makes them, names the block."""
    book = AddressBook({1000: "gradients", 5000: "parameters"})
    assert book.category(500, 1000) == "gradients"
    assert book.category(1000, 1) == "gradients"
    assert book.category(0, 1000) is None
    assert book.category(1001, 3000) is None


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([("/home/ann/train.py", "step")], "forward"),
        ([(f"{TORCH}/nn/functional.py", "linear"), ("/home/ann/train.py", "<module>")], "forward"),
        ([("/home/ann/train.py", "main"), ("<frozen runpy>", "_run_code")], "forward"),
        ([("/home/ann/train.py", "f"), ("/usr/lib/python3.12/threading.py", "_bootstrap")], "forward"),
        ([("<string>", "<module>")], "forward"),
        ([(f"{SITE}/ray/worker.py", "main")], "forward"),
        ([], "backward"),
        ([("/home/ann/op.py", "backward"), (f"{TORCH}/autograd/function.py", "apply")], "backward"),
        ([("/home/ann/op.py", "f"), (f"{TORCH}/autograd/graph.py", "_engine_run_backward"), ("t.py", "g")],
         "backward"),
        ([(f"{TORCH}/optim/adamw.py", "step"), ("/home/ann/train.py", "<module>")], "optimizer"),
        ([(f"{TORCH}/nn/utils/clip_grad.py", "clip_grad_norm_"), ("train.py", "f")], "optimizer"),
        ([(f"{TORCH}/amp/grad_scaler.py", "unscale_"), ("train.py", "f")], "optimizer"),
        ([(f"{TORCH}/amp/grad_scaler.py", "scale"), ("train.py", "f")], "forward"),
        ([("/home/ann/torch/train.py", "f")], "forward"),
    ],
)  # fmt: skip
def test_the_part_of_a_step_is_in_the_stack(frames: list[tuple[str, str]], phase: str) -> None:
    """A stack shows the part of the step, however the program was started."""
    assert phase_of(frames) == phase


def step(batch: int, forward: tuple[int, int], backward: tuple[int, int], optimizer: tuple[int, int]) -> Step:
    """Return a step with the peaks of its parts: bytes, and the activations among them."""
    peaks = {"forward": forward, "backward": backward, "optimizer": optimizer}
    parts = {name: PartPeak(*peak) for name, peak in peaks.items()}
    return Step(batch, max(peak.bytes for peak in parts.values()), parts)


# A training on an H200, torch 2.11: the small batch has its peak in the optimizer, the large one in the
# backward pass. A line through these two peaks said 70,143, and one through the peaks of the backward passes,
# of which that of the small batch is at its end, 54,875. It failed with both.
SMALL = step(2048, (638_781_448, 235_931_656), (689_168_456, 168_820_808), (739_573_764, 202_440_708))
LARGE = step(4096, (806_553_672, 403_703_880), (907_214_856, 504_365_064), (739_573_764, 202_440_708))


def test_only_peaks_at_the_same_moment_of_a_step_are_on_one_line() -> None:
    """Beside other gradients a peak is of another moment, and its slope is not that of a larger batch."""
    fits = fitting_batch([SMALL, LARGE, LARGE], 90_000, LIMIT)
    others, activations = 907_214_856 - 504_365_064, 504_365_064 / 4096  # of the large batch's backward pass
    assert fits == pytest.approx((0.98 * LIMIT - others) / activations, abs=2)


def test_each_part_of_a_step_has_its_own_slope() -> None:
    """The smallest batch that a part allows; below 0 the largest batch says what fits."""
    one = step(100, (3000, 2000), (4000, 3000), (9000, 100))
    other = step(200, (5000, 4000), (6500, 5500), (9000, 100))
    assert fitting_batch([one, other], 1000, 20_000) == int((0.98 * 20_000 - 1500) / 25)
    one = step(4, (2100, 2000), (3900, 3800), (100, 10))
    other = step(8, (4100, 4000), (8100, 8000), (100, 10))
    assert fitting_batch([one, other], 32, 16_000) == int((0.98 * 16_000 - 100) / 1000)
    assert fitting_batch([Step(4, 3900, {}), Step(8, 8100, {})], 32, 16_000) is None


def test_the_optimizers_peak_does_not_follow_a_single_batch_size() -> None:
    """Where all steps had one size, what the optimizer takes is not spread over the batch."""
    fits = fitting_batch([SMALL, SMALL], 90_000, LIMIT)
    forward = (0.98 * LIMIT - (638_781_448 - 235_931_656)) / (235_931_656 / 2048)
    assert fits == pytest.approx(forward, abs=2)


def test_peaks_without_parts_show_a_slope_only_with_several_sizes() -> None:
    """PyTorch's own peaks alone say which batch fits if the batches had several sizes."""
    small, large = Step(10, 2000, {}), Step(20, 3000, {})
    assert fitting_batch([small, large], 100, 10_000) == 88
    assert fitting_batch([small, small], 100, 10_000) is None
    assert fitting_batch([], 100, 10_000) is None
