"""What the program's signal handlers raise arrives in the program, wherever the agent is at work."""

import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.examples import examples
from tests.support.listening import WAIT_FOR_REPORT, FakeExporter, run

BEGINNING = """
import os, random, signal, sys, time

class Alarm(Exception):
    pass

raised = arrived = dropped = 0

def note(unraisable):
    "Count what Python itself drops in an import: exceptions in the callback of a weak reference."
    global dropped
    begun = unraisable.exc_traceback and unraisable.exc_traceback.tb_frame.f_code.co_filename
    if unraisable.exc_type is Alarm and begun == "<frozen importlib._bootstrap>":
        dropped += 1
    else:
        sys.__unraisablehook__(unraisable)

sys.unraisablehook = note

def handler(number, frame):
    global raised
    raised += 1
    raise Alarm

def until_raised(work, before):
    while raised == before:
        work()
    for _ in range(100):  # what a hook caught arrives after it
        pass

def count(work, tries, longest):
    "Run some work again and again, each time until a signal comes at a random moment."
    global arrived
    random.seed(7)
    signal.signal(signal.SIGALRM, handler)
    for _ in range(tries):
        before = raised
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, longest))
            until_raised(work, before)
        except Alarm:
            arrived += 1
    print(raised == tries, arrived + dropped == tries)
"""

NO_WARNING = ("-W", "ignore:This process:DeprecationWarning")
"""A signal in the hook before a fork may keep our thread alive, of which Python 3.12 then warns."""

WORK = {
    "collections": ("[[[]] for _ in range(3000)]", 0.001),
    "forks": ("fork()", 0.002),
    "steps": ("optimizer.step()", 0.0003),
    "counted steps": ("(steps.counts.clear(), optimizer.step())", 0.0003),
    "failed allocations": ("torch._C.observers[0](0, 2**50, 2**36, 2**20)", 0.003),
    "imports": ("import_again()", 0.001),
    "recorded steps": ("optimizer.step()", 0.0005),
    "recorded failures": ("fail_again()", 0.01),
    "cycles": ("collect_cycles(torch)", 0.01),
}

SETUP = """
import torch
kept = torch.Tensor(8)

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def import_again():
    "Look for a framework as an import does, as if for the first time."
    hook = import_hook._hook
    hook.awaited.add("rmm")
    worker.poller.states.pop("rmm", None)
    hook.find_spec("rmm")

def fail_again():
    "Fail as if no report had been written yet."
    oom_handler.observer._next_report = oom_handler.observer._reports = 0
    torch._C.observers[0](0, 2**50, 2**36, 2**20)

wait_for_report()
from vramledger_agent import import_hook
from vramledger_agent.oom import handler as oom_handler
from vramledger_agent.torch.memory_history import collect_cycles
from vramledger_agent.worker import worker
parameter = torch.Tensor(8)
parameter.grad = torch.Tensor(8)
optimizer = torch.optim.Adam([parameter])
steps = worker.poller.states["torch"].provider.optimizer_steps
"""


@pytest.mark.parametrize("work", WORK)
def test_every_exception_of_a_handler_arrives(place: Path, exporter: FakeExporter, work: str) -> None:
    """Signals at random moments raise as many exceptions in the program as they would without the agent."""
    statement, longest = WORK[work]
    code = f"{BEGINNING}{WAIT_FOR_REPORT}{SETUP}count(lambda: {statement}, {examples(500)}, {longest})\n"
    recorded = {"VRAMLEDGER_AGENT_SNAPSHOT_FROM_START": "1"} if work.startswith("recorded") else {}
    if work != "imports":
        code += "assert not dropped, dropped\n"
    assert run(place, code, *NO_WARNING, **recorded) == "True True\n"
    assert exporter.reports


@pytest.mark.parametrize(
    "kind",
    [
        "def raiser(number, frame): raise Alarm",
        "class C:\n    def __call__(self, *_): raise Alarm\nraiser = C()",
        "class C:\n    def end(self, number, _): raise Alarm\nraiser = C().end",
        "import functools\ndef end(what, number, frame): raise what\nraiser = functools.partial(end, Alarm)",
        "def raiser(number, frame):\n    del frame\n    inner()\ndef inner(): raise Alarm",
        "raiser = signal.default_int_handler; Alarm = KeyboardInterrupt",
    ],
)
def test_handlers_of_every_kind(place: Path, kind: str) -> None:
    """A handler's exception is known for what it is, whatever Python object the handler is."""
    code = "import signal, sys\nclass Alarm(Exception): pass\n" + kind + textwrap.dedent("""
        from vramledger_agent import program_errors
        signal.signal(signal.SIGALRM, raiser)
        def interrupted():
            signal.raise_signal(signal.SIGALRM)
        def ours():
            raise ValueError
        counted = []
        for function in (interrupted, ours):
            try:
                program_errors.make_hook(function, lambda: counted.append("error"))()
                program_errors.raise_caught()
            except Alarm:
                print("arrived", counted)
        print(counted)
    """)  # fmt: skip
    assert run(place, code) == "arrived []\n['error']\n"


def test_a_signal_reaches_the_thread_that_waits_for_it(place: Path, exporter: FakeExporter) -> None:
    """A program that blocks a signal and waits for it gets it, from the first moment of our thread on."""
    code = textwrap.dedent("""
        import os, signal, sys, torch
        kept = torch.Tensor(8)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        for _ in range(300):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signal.sigtimedwait({signal.SIGUSR1}, 20), "lost"
        wait_for_report()
        print("all")
    """)
    assert run(place, WAIT_FOR_REPORT + code) == "all\n"
    assert exporter.reports


@pytest.mark.skipif(sys.version_info < (3, 12), reason="before 3.12 no thread is stopped for a fork")
def test_a_fork_interrupted_at_any_step_leaves_one_thread(place: Path, exporter: FakeExporter) -> None:
    """Wherever a signal interrupts our steps before a fork, the parent gets it, and we have one thread."""
    code = textwrap.dedent("""
        import os, signal, sys, time, torch
        class Alarm(Exception): pass
        def handler(number, frame):
            raise Alarm
        signal.signal(signal.SIGALRM, handler)
        kept = torch.Tensor(8)
        wait_for_report()
        from vramledger_agent import worker as module
        worker, left = module.worker, 0
        OURS = {f.__code__ for f in (module.Worker._stop_before_fork, module.WorkerRun.request_stop,
                                     module.WorkerRun.wait_until_gone)}
        def trace(frame, event, argument):
            global left
            if frame.f_code not in OURS:
                return None
            frame.f_trace_opcodes = True
            if event in ("line", "opcode"):  # Python 3.12 tells lines alone
                left -= 1
                if left == 0:
                    signal.raise_signal(signal.SIGALRM)
            return trace
        def threads():
            return len(os.listdir("/proc/self/task"))
        def wait_for(number):
            deadline = time.monotonic() + 20
            while threads() != number or worker.current_run is None or worker.suspended:
                assert time.monotonic() < deadline, (step, threads(), worker.current_run, worker.suspended)
                worker.resume()
                time.sleep(0.001)
        parent = os.getpid()
        for step in range(1, 400):
            worker._alone, left, arrived = True, step, False
            try:
                sys.settrace(trace)
                os.fork()
                sys.settrace(None)
                for _ in range(100):  # what the hook caught arrives after it
                    pass
            except Alarm:
                arrived = True
            if os.getpid() != parent:
                os._exit(arrived)
            sys.settrace(None)
            assert os.wait()[1] == 0, "it arrived in the child"
            wait_for(2)
            if left > 0:
                break
            assert arrived, step
        print(step > 10, worker.errors)
    """)
    assert run(place, WAIT_FOR_REPORT + code, *NO_WARNING) == "True {}\n"
    assert exporter.reports


@pytest.mark.parametrize("exporter_there", [True, False])
def test_a_fork_leaves_the_thread_where_the_program_has_others(place: Path, exporter_there: bool) -> None:
    """In a program with threads of its own, as every one that uses a GPU, a fork does not touch ours."""
    code = textwrap.dedent("""
        import os, sys, threading, torch, warnings
        warnings.simplefilter("ignore")
        end = threading.Event()
        threading.Thread(target=end.wait).start()
        kept = torch.Tensor(8)
        wait_for_report()
        from vramledger_agent.worker import worker
        run = worker.current_run
        for _ in range(50):
            pid = os.fork()
            if pid == 0:
                os._exit(len(os.listdir("/proc/self/task")) != 1)
            assert os.waitpid(pid, 0)[1] == 0
        print(worker.current_run is run)
        end.set()
    """)
    if not exporter_there:
        code = code.replace("wait_for_report()", "__import__('time').sleep(0.6)")
    with FakeExporter(place / "agent.sock") if exporter_there else nullcontext():
        assert run(place, WAIT_FOR_REPORT + code) == "True\n"


def test_a_report_interrupted_anywhere_is_passed_on(place: Path, exporter: FakeExporter) -> None:
    """Wherever a signal comes while a failure is reported, it arrives, and later reports are written.

    ``make test`` tries each fifth place.
    """
    code = textwrap.dedent("""
        import inspect, os, signal, sys
        class Alarm(TimeoutError, ValueError, RuntimeError, TypeError, LookupError):
            "What any narrow clause for errors of ours would catch, too."
        def handler(number, frame):
            raise Alarm
        signal.signal(signal.SIGALRM, handler)
        AGENT = "vramledger_agent" + os.sep
        def profile(frame, event, argument):
            "Send a signal where Python looks for one: as a function begins, and behind a built-in one."
            global left, here
            begins = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR  # or it is closed
            if AGENT in frame.f_code.co_filename and (begins or event == "c_return"):
                left -= 1
                if left == 0:
                    here = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                    sys.setprofile(None)
                    signal.raise_signal(signal.SIGALRM)
        lost, step = [], 0
        while True:
            step += STRIDE
            left, arrived = step, False
            try:
                sys.setprofile(profile)
                fail_again()
            except Alarm:
                arrived = True
            sys.setprofile(None)
            if left > 0:
                break
            if not arrived:
                lost.append((step, here))
            for lock in (worker.session._lock, oom_handler.observer._busy):
                assert not lock._is_owned(), f"a lock is left after step {step}: {here}"
            fail_again()
            assert oom_handler.observer._reports == 1, f"no report is written after step {step}"
        print(step > 100, lost)
    """).replace("STRIDE", str(100 // examples(100)))
    assert run(place, WAIT_FOR_REPORT + SETUP + code) == "True []\n"
    assert exporter.reports
