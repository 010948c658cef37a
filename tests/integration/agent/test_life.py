"""The agent's thread and socket exist only if there is something to report; they do not disturb a program."""

import socket
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.listening import (
    FAKE,
    WAIT_FOR_REPORT,
    FakeExporter,
    environment,
    finish,
    go_on,
    run,
    start,
)
from tests.support.requirements import require_root
from tests.support.sure import sure
from tests.support.waiting import wait_until

TENSOR = "import sys, torch\nkept = torch.Tensor(2**20)\n"
WAIT = "print('ready', flush=True)\nsys.stdin.read()\n"
THREADS = "len(__import__('os').listdir('/proc/self/task'))"


def test_no_thread_and_no_socket_before_cuda(place: Path, exporter: FakeExporter) -> None:
    """A program that imports torch and never uses the GPU has no thread, no connection, no CUDA."""
    code = f"import torch, socket, time; time.sleep(0.5); print({THREADS}, torch.calls, torch._C.observers)"
    assert run(place, code) == "1 [] []\n"
    assert exporter.reports == {}


def test_reports_while_it_holds_memory(place: Path, exporter: FakeExporter) -> None:
    """A program that uses the GPU is reported, with figures and growing sequence numbers, until it ends."""
    process = start(TENSOR + WAIT, environment(place, FAKE))
    wait_until(lambda: len(exporter.reports.get(process.pid, [])) > 2, "one more report")
    finish(process)
    last = exporter.last_report(process)
    sequence = [report["sequence"] for report in exporter.reports[process.pid]]
    assert sequence == sorted(set(sequence))
    assert last["frameworks"][0]["devices"][0]["allocated"] == 2**20
    assert last["errors"] == {}
    assert last["visible"] == {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None}


def test_a_rank_that_the_program_sets_itself_is_reported(place: Path, exporter: FakeExporter) -> None:
    """A rank that is set after the start is in the reports, as long as the environment has it."""
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}
    code = f"{TENSOR}import os\nsys.stdin.readline()\nos.environ.update({rank})\n{WAIT}"
    process = exporter.watch(start(code, environment(place, FAKE)))
    assert "rank" not in exporter.reports[process.pid][0]
    go_on(process)
    wait_until(lambda: exporter.reports[process.pid][-1].get("rank"), "a report with a rank")
    finish(process)
    last = exporter.reports[process.pid][-1]
    assert (last["rank"], last["errors"]) == ({"number": 1, "size": 2, "job": ":9"}, {})


@pytest.mark.parametrize(
    "child",
    [
        "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)\n",
        "import subprocess; subprocess.run([sys.executable, '-c', ''], check=True)\n",
        "multiprocessing.get_context('fork').Process(target=int).start()\n",
        "multiprocessing.get_context('forkserver').Process(target=int).start()\n",
        "multiprocessing.get_context('spawn').Process(target=int).start()\n",
    ],
)
def test_goes_on_after_a_child(place: Path, exporter: FakeExporter, child: str) -> None:
    """A process that starts children in any way is reported afterwards, and gets no warning."""
    code = (
        f"import multiprocessing, os, time\n{TENSOR}sys.stdin.readline()\n{child}"
        "for _ in range(100): time.sleep(0.01); junk = [[] for _ in range(1000)]\n"
        f"kept = torch.Tensor(2**22)\n{WAIT}"
    )
    process = exporter.watch(start(code, environment(place, FAKE), "-W", "error"))
    go_on(process)
    reports = exporter.reports[process.pid]
    wait_until(lambda: reports[-1]["frameworks"][0]["devices"][0]["reserved"] >= 2**22, "it to be reported")
    finish(process)
    assert [pid for pid in exporter.reports if pid != process.pid] == []


def test_child_reports_for_itself(place: Path, exporter: FakeExporter) -> None:
    """A server's worker that was forked before CUDA was initialised is reported; its parent is not."""
    code = textwrap.dedent("""
        import os, sys, torch
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            kept = torch.Tensor(2**20)
            os.write(write, b"x")
            sys.stdin.read()
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
    """)
    process = start(code, environment(place, FAKE), "-W", "error")
    child = int(sure(process.stdout).readline())
    wait_until(lambda: exporter.reports.get(child), "a report")
    finish(process)
    wait_until(lambda: child in exporter.ended, "the end of its connection")
    assert list(exporter.reports) == [child]


def test_fork_after_cuda_leaves_the_child_alone(place: Path, exporter: FakeExporter) -> None:
    """A child of a process with CUDA has no agent thread, reports nothing, and its death ends nothing."""
    code = TENSOR + textwrap.dedent(f"""
        import os, time
        sys.stdin.readline()
        pid = os.fork()
        if pid == 0:
            junk = [[[]] for _ in range(10000)]
            time.sleep(0.5)
            os._exit({THREADS})
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        sys.stdin.read()
    """)
    process = exporter.watch(start(code, environment(place, FAKE)))
    go_on(process)
    assert sure(process.stdout).readline() == "1\n"
    seen = len(exporter.reports[process.pid])
    if sys.version_info < (3, 13):  # since then the thread waits for the program to do something
        wait_until(lambda: len(exporter.reports[process.pid]) > seen, "one more report")
    finish(process)
    assert list(exporter.reports) == [process.pid]


def test_exporter_comes_and_goes(place: Path) -> None:
    """A program that starts before its exporter and outlives it is reported to each exporter in turn."""
    process = start(TENSOR + WAIT, environment(place, FAKE))
    assert sure(process.stdout).readline() == "ready\n"
    for _ in range(2):
        with FakeExporter(place / "agent.sock") as exporter:
            wait_until(lambda: exporter.reports.get(process.pid), "a report")
    finish(process)


def test_hung_exporter_costs_reports_only(place: Path) -> None:
    """An exporter that reads nothing causes dropped reports, which are counted; the program never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hung:
        hung.bind(str(place / "agent.sock"))
        hung.listen(1)
        code = TENSOR + (
            "import time\nfrom vramledger_agent.worker import worker\n"
            "worker.settings.interval = 0.001\nworker.stop_thread(1); worker.start()\n"
            "while not worker.session.transport.dropped: time.sleep(0.01)\nprint('ran')\n"
        )
        assert run(place, code) == "ran\n"


def test_closed_descriptors(place: Path, exporter: FakeExporter) -> None:
    """A program that closes all descriptors and opens its own never gets a byte of ours in them."""
    code = f"""{TENSOR}{WAIT_FOR_REPORT}
import os
sys.stdin.readline()
os.closerange(3, 100)
own = [os.open({str(place)!r} + "/own%d" % number, os.O_RDWR | os.O_CREAT) for number in range(8)]
wait_for_report()
print([os.fstat(descriptor).st_size for descriptor in own])
"""
    process = exporter.watch(start(code, environment(place, FAKE)))
    seen = len(exporter.reports[process.pid])
    assert finish(process) == f"{[0] * 8}\n"
    wait_until(lambda: len(exporter.reports[process.pid]) > seen, "one more report")


def test_closed_standard_streams(place: Path, exporter: FakeExporter) -> None:
    """A program that has closed its standard streams never has the socket in their place."""
    code = (
        f"import os\nout = os.dup(1)\n[os.close(number) for number in (0, 1, 2)]\nimport torch\n"
        f"{WAIT_FOR_REPORT}"
        "kept = torch.Tensor(8)\nwait_for_report()\nfrom vramledger_agent.worker import worker\n"
        "os.write(out, str(worker.session.transport._socket.fileno() > 2).encode())\n"
    )
    process = start(code, environment(place, FAKE))
    assert process.communicate()[0] == "True"
    wait_until(lambda: exporter.reports.get(process.pid), "a report")


def test_requests_of_another_user_are_refused(place: Path, exporter: FakeExporter) -> None:
    """Only root and the program's own user may send requests; the agent trusts only the kernel for that."""
    require_root()
    process = exporter.watch(
        start(TENSOR + WAIT, environment(place, FAKE, VRAMLEDGER_AGENT_CONSENT="reclaim"))
    )
    question = {"version": 1, "ask": "reclaim", "seconds": 0.2}
    refused = exporter.request(process.pid, question, user=65534)
    assert (refused["ok"], "only root and the user" in refused["error"]) == (False, True)
    assert "no training step" in exporter.request(process.pid, question)["error"]
    finish(process)


def test_framework_that_fails(place: Path, exporter: FakeExporter) -> None:
    """If torch's counters raise, figures are missing and the error is counted; the program sees nothing."""
    code = "import sys, torch\ndel torch._C._cuda_getAllocatorBackend\nkept = torch.Tensor(8)\n" + WAIT
    process = exporter.watch(start(code, environment(place, FAKE)))
    wait_until(lambda: exporter.reports[process.pid][-1]["errors"].get("torch"), "the error in a report")
    finish(process)
