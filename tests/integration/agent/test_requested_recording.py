"""What a recording has that was asked for while the program runs: a whole step, and reference cycles."""

import textwrap
from pathlib import Path

import pytest

from tests.support.recorded_torch import CONSENT, FROM_START, MIB, REQUEST, reports, run
from tests.support.sure import sure
from vramledger_agent.torch_snapshots.safe_pickle import load_plain
from vramledger_agent.torch_snapshots.snapshot import Training, parse_snapshot
from vramledger_agent.torch_snapshots.text import training_text


def requested(place: Path, code: str, **variables: str) -> tuple[str, Training]:
    """Run a program that asks itself for a snapshot; return its output and the training in the snapshot."""
    path = place / "snapshot.pickle"
    out = run(place, f"PATH = {str(path)!r}\n{REQUEST}\n{textwrap.dedent(code)}", **variables)
    return out, sure(parse_snapshot(load_plain(path)).training)


def test_a_recorded_step_is_whole(place: Path) -> None:
    """``snapshot --step`` has the peaks of exactly one step, and the recording has ended afterwards."""
    code = "print(request(step, step=True, seconds=30.0), torch.cuda.memory.recording)"
    out, training = requested(place, code, **CONSENT)
    assert out == "agent None\n"
    (step,) = [step for device in training.devices for step in device.steps if step.finished]
    assert (step.whole, step.batch) == (True, 8)
    assert step.peaks["backward"].size == 20 * MIB


def test_a_recording_from_the_start_answers_at_once_and_goes_on(place: Path) -> None:
    """A snapshot of a program that records from its start has that recording, which does not end."""
    code = """
        step()
        print(request(lambda: None, seconds=200.0), torch.cuda.memory.recording is not None)
        step()
        fail()
    """
    out, training = requested(place, code, **FROM_START)
    (report,) = reports(place)
    assert out == "start True\nfailed\n"
    assert training.from_start
    assert len([step for step in report["flight"]["steps"] if step["finished"]]) == 2


def test_a_snapshot_between_steps_keeps_nothing_alive(place: Path) -> None:
    """A snapshot on the agent's thread asks for no object of the program, and claims no category."""
    code = """
        import gc
        step()
        gc.get_objects = lambda *_: threads.append(threading.current_thread().name) or []
        threads = []
        request(lambda: None, seconds=0.5)
        print(set(threads) - {"MainThread"})
    """
    out, training = requested(place, code, **FROM_START)
    assert out == "set()\n"
    steps = [step for device in training.devices for step in device.steps]
    assert steps
    assert not any(peak.categories for step in steps for peak in step.peaks.values())
    assert all(step.gradients_before is None for step in steps)
    assert "--step" in training_text(training)


def test_a_step_that_ends_during_the_snapshot_is_in_none(place: Path) -> None:
    """A snapshot has the steps that ended before it was taken: a later one has events that it lacks."""
    code = """
        step()
        take = torch.cuda.memory._snapshot
        def take_while_it_steps(*arguments, **named):
            taken = take(*arguments, **named)
            step()
            return taken
        torch.cuda.memory._snapshot = take_while_it_steps
        request(lambda: None, seconds=0.5)
    """
    _, training = requested(place, code, **FROM_START)
    assert len([step for device in training.devices for step in device.steps if step.finished]) == 1


CYCLES = """
class Holder:
    def __init__(self, size):
        self.tensor = torch.Tensor(size)
        self.hook = lambda: self

class Finalised(Holder):
    def __del__(self):
        finalised.append(1)

finalised = []

def make(kind, size):
    kind(size)

def work():
    step()
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_reference_cycles_by_place(place: Path, enabled: bool) -> None:
    """``snapshot --cycles`` names the lines whose memory the collector freed and the code of the cycles."""
    code = CYCLES + textwrap.dedent(f"""
        import gc, weakref
        gc.collect()
        gc.disable()
        callbacks, flags, ours = list(gc.callbacks), gc.get_debug(), ["theirs"]
        gc.garbage.append(ours)
        kept = Holder(3 * M)
        watch = weakref.ref(kept)
        make(Holder, 1 * M)
        make(Holder, 4 * M)
        make(Finalised, 2 * M)
        if {enabled}:
            gc.enable()
        before = torch._C.allocators[0].allocated
        request(work, cycles=True, seconds=30.0)
        optimizer.zero_grad()
        print(gc.isenabled(), gc.get_debug() == flags, gc.callbacks == callbacks, gc.garbage == [ours])
        print(finalised, watch() is kept)
    """)
    out, training = requested(place, code, **CONSENT)
    assert out == f"{enabled} True True True\n[1] True\n"
    garbage = sure(training.garbage)
    if not enabled:  # otherwise the collector may have come before us
        assert sum(block.size for block in garbage.blocks) == 7 * MIB
        assert [(cycle.size, cycle.cycles) for cycle in garbage.cycles] == [(5 * MIB, 2), (2 * MIB, 1)]
        assert ("function", "<lambda>") in [(kind, frame.name) for kind, frame in garbage.cycles[0].objects]
        assert "Holder" in [kind for kind, _ in garbage.cycles[0].objects]
        assert "collector freed 7.0 MiB" in training_text(training)


def test_no_cycle_is_said_to_be_none(place: Path) -> None:
    """Where no cycle kept GPU memory, the snapshot says so."""
    _, training = requested(place, CYCLES + "\nrequest(work, cycles=True, seconds=30.0)\n", **CONSENT)
    assert "no reference cycle" in training_text(training)


LAZY = """
import importlib
from vramledger_agent.torch.allocator import BlockSurvey
imported_by = []

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._inductor":
            imported_by.append(threading.current_thread() is threading.main_thread())

sys.meta_path.append(Finder())

def lazy(name):
    "As PyTorch does."
    if name == "_inductor":
        return importlib.import_module("torch._inductor")
    raise AttributeError(name)

torch.__dict__.update(__getattr__=lazy, _lazy_modules={"_inductor"})

def naming(take):
    "As PyTorch does: to name the lines of a recording, it asks itself for a part that this imports."
    def taken(*arguments):
        if torch.cuda.memory.recording is not None:
            try:
                hasattr(torch, "_inductor")
            except ImportError:  # there is none here
                pass
        return take(*arguments)
    return taken

torch._C._cuda_memorySnapshot = naming(torch._C._cuda_memorySnapshot)
torch.cuda.memory._snapshot = naming(torch.cuda.memory._snapshot)

def survey():
    thread = threading.Thread(target=BlockSurvey(torch).survey_now)
    thread.start()
    thread.join()
"""


def test_a_snapshot_imports_no_part_of_torch(place: Path) -> None:
    """To name lines, PyTorch imports nothing, on our thread or at the end of a step; the program can."""
    code = LAZY + textwrap.dedent("""
        survey()
        print(request(lambda: None, seconds=0.1), request(step, step=True, seconds=30.0), imported_by)
        naming(lambda: None)()
        print(imported_by)
    """)
    out, _ = requested(place, code, **FROM_START)
    assert out == "start start []\n[True]\n"


def test_without_our_import_hook_only_a_step_has_a_snapshot(place: Path) -> None:
    """If the program has taken the hook away, no snapshot is taken on our thread."""
    code = LAZY + textwrap.dedent("""
        sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "ImportHook"]
        survey()
        try:
            request(lambda: None, seconds=0.1)
        except RuntimeError as error:
            print("torch._inductor" in str(error), imported_by)
        print(request(step, step=True, seconds=30.0), imported_by)
        imported_by.clear()
        torch._inductor = torch
        survey()
        print(request(lambda: None, seconds=0.1), imported_by)
    """)
    out, _ = requested(place, code, **FROM_START)
    assert out == "True []\nstart [True]\nstart []\n"
