"""The situations: each is set up with real programs, recorded, and has its expected verdict."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.recordings.recorder import PROGRAMS, Recorder, TroubleError
from tests.lab.recordings.stage import Program, Stage, child_of
from tests.support.judging import Entry, hidden
from vramledger.model.snapshot import Snapshot

GIB = 2**30

# A launcher gets its own process group, as from an interactive shell.


@dataclass(frozen=True)
class Scenario:
    """One situation.

    Attributes:
        name: what ``--only`` selects.
        play: plants it.
        seconds: about how long it takes on a real host, to know whether there is time left.
        needs: a module without which the programs' interpreter cannot play it, so it is left out.
    """

    name: str
    play: Callable[[Stage], None]
    seconds: float = 12.0
    needs: str = ""


def idle_card(stage: Stage) -> None:
    """Record, with the command itself, a card without users."""
    entry = Entry(
        "idle-card",
        "idle-card.jsonl.gz",
        "nobody holds memory",
        hidden=[],
        host_pid_namespace=True,
        gpu=stage.gpu,
    )
    _capture(stage, stage.home / entry.file, entry.note)
    stage.judge(entry)


def _capture(stage: Stage, path: Path, note: str, *before: str, env: Mapping[str, str] | None = None) -> None:
    command = [*before, sys.executable, "-m", "vramledger", "capture", str(path)]
    command += ["--duration", "4s", "--sample.interval=500ms", "--sample.timeout=2s", "--note", note]
    done = subprocess.run(
        command, env=stage.env(env), capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        message = f"vramledger capture ended with {done.returncode}: {done.stderr.strip()[-1500:]}"
        raise TroubleError(message)


def busy_and_idle(stage: Stage) -> None:
    """Two torch programs, one with matrix products, one that sleeps."""
    recorder = stage.record(
        "busy-and-idle", "a torch matmul loop with 10 GiB, and 20 GiB asleep", idle_after=4.0
    )
    busy = stage.hold("busy", 10, "--framework", "torch", "--busy")
    idle = stage.hold("idle", 20, "--framework", "torch")
    roles = {**busy.wait_for("busy"), **idle.wait_for("idle")}
    recorder.listed(*roles.values())
    stage.finish(recorder, roles, {"busy": "active", "idle": "idle"})


def _orphans(stage: Stage, how: str, note: str) -> None:
    """Kill a launcher with two workers; record it from the start, and from after the kill."""
    recorder = stage.record(f"orphans-{how}", f"{note}, seen from the start")
    launcher = stage.start("launcher.py", "--how", how, preexec_fn=os.setpgrp)
    roles = launcher.wait_for("worker-1", "worker-2")
    recorder.listed(*roles.values())
    recorder.more(1)
    launcher.kill()
    late = stage.record(f"orphans-{how}-late", f"{note}, seen only afterwards")
    _finish_both(stage, (recorder, late), roles)


def _finish_both(stage: Stage, recorders: tuple[Recorder, Recorder], roles: Mapping[str, int]) -> None:
    """Finish two recordings of orphans, which must say what ties them."""
    for each in recorders:
        each.tied(*roles.values())
    for each in recorders:
        stage.finish(each, roles, dict.fromkeys(roles, "orphaned"))


def orphans_subprocess(stage: Stage) -> None:
    """Children of subprocess."""
    _orphans(stage, "subprocess", "a python program with two subprocess children was SIGKILLed")


def orphans_spawn(stage: Stage) -> None:
    """Workers of multiprocessing, spawned."""
    _orphans(stage, "spawn", "a python program with two spawned multiprocessing workers was SIGKILLed")


def orphans_fork(stage: Stage) -> None:
    """Workers of multiprocessing, forked before CUDA."""
    _orphans(stage, "fork", "a python program with two forked multiprocessing workers was SIGKILLed")


def torchrun_ranks(stage: Stage) -> None:
    """Ranks of torchrun, whose launcher is killed."""
    note = "torchrun with two ranks was SIGKILLed"
    recorder = stage.record("torchrun-ranks", f"{note}, seen from the start")
    if stage.rehearsing:
        launcher = stage.start("launcher.py", "--how", "ranks", "--devices", "0,1", preexec_fn=os.setpgrp)
        roles = launcher.wait_for("worker-1", "worker-2")
    else:
        arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        launcher = stage.start(*arguments, PROGRAMS / "rank.py", preexec_fn=os.setpgrp)
        roles = launcher.wait_for("rank-0", "rank-1", timeout=90)
    recorder.listed(*roles.values())
    recorder.more(1)
    launcher.kill()
    late = stage.record("torchrun-ranks-late", f"{note}, seen only afterwards")
    _finish_both(stage, (recorder, late), roles)


def zombie_leader(stage: Stage) -> None:
    """A main thread that has ended alone."""
    recorder = stage.record(
        "zombie-leader", "the main thread has ended by SYS_exit, another lives on with 3 GiB"
    )
    roles = stage.start("zombie_leader.py").wait_for("leader")
    stage.finish(recorder, roles, {"leader": "active"})


def stopped(stage: Stage) -> None:
    """A process under SIGSTOP."""
    recorder = stage.record("stopped", "a holder of 4 GiB under SIGSTOP")
    program = stage.hold("holder", 4)
    roles = program.wait_for("holder")
    recorder.listed(*roles.values())
    program.signal(signal.SIGSTOP)
    pid = roles["holder"]
    stage.finish(recorder, roles, {"holder": "stopped"}, passed=[(pid, "active")])


def ipc_dead_producer(stage: Stage) -> None:
    """Memory shared by CUDA IPC whose producer is killed: the bytes move to the consumer."""
    recorder = stage.record("ipc-dead-producer", "the producer of 8 GiB shared by CUDA IPC was SIGKILLed")
    producer = stage.start("share.py")
    dead = producer.wait_for("producer")["producer"]
    handle = producer.roles["producer"]["handle"]
    roles = stage.start("share.py", handle).wait_for("consumer")
    recorder.listed(dead, *roles.values())
    recorder.more(1)
    producer.kill()
    recorder.until("the bytes have moved", lambda shot: _held(shot, roles["consumer"]) > 8 * GIB)
    stage.finish(recorder, {**roles, "producer": dead}, {"consumer": "active"}, absent=[dead])


def _held(shot: Snapshot, pid: int) -> int:
    return sum(held.memory or 0 for device in shot.devices for held in device.holdings if held.pid == pid)


def jax_preallocation(stage: Stage) -> None:
    """JAX's default policy."""
    recorder = stage.record("jax-preallocation", "a 4 MiB array under JAX's default policy")
    roles = stage.start("jax_array.py").wait_for("holder", timeout=90)
    recorder.until("JAX holds most of a card", lambda shot: _held(shot, roles["holder"]) > 64 * GIB)
    stage.finish(recorder, roles, {"holder": "active"})


def jax_no_preallocate(stage: Stage) -> None:
    """JAX without preallocation."""
    recorder = stage.record("jax-no-preallocate", "a 4 MiB array with XLA_PYTHON_CLIENT_PREALLOCATE=false")
    program = stage.start("jax_array.py", env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    stage.finish(recorder, program.wait_for("holder", timeout=90), {"holder": "active"})


def policies(stage: Stage) -> None:
    """Programs of several frameworks and policies side by side on one card, each with its own evidence."""
    recorder = stage.record("policies", "torch, JAX by three policies and plain CUDA on one card")
    only = {"CUDA_VISIBLE_DEVICES": "0"}  # JAX takes its share of every card that it sees
    tuned = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    programs: dict[str, tuple[list[object], dict[str, str]]] = {
        # Of the 140 GiB: 1 + 4 + 2, a little, 14, and then JAX's three quarters.
        "cuda": (["holder.py", "--gib", 1, "--role"], {}),
        "torch": (["holder.py", "--gib", 4, "--framework", "torch", "--role"], {}),
        "tuned": (["holder.py", "--gib", 2, "--framework", "torch", "--role"], tuned),
        "growth": (["jax_array.py"], {**only, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        "fraction": (["jax_array.py"], {**only, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}),
        "jax": (["jax_array.py"], only),
    }
    roles: dict[str, int] = {}
    for role, (command, env) in programs.items():
        roles |= stage.start(*command, role, env=env).wait_for(role, timeout=90)
        recorder.listed(*roles.values())
    expected = {
        "cuda": "cuda/unknown/none", "torch": "torch/caching/default", "tuned": "torch/caching/environ",
        "growth": "jax/growth/environ", "fraction": "jax/fraction/environ", "jax": "jax/fraction/pattern",
    }  # fmt: skip
    stage.finish(
        recorder, roles, dict.fromkeys(roles, "active"),
        policies={roles[role]: policy for role, policy in expected.items()},
    )  # fmt: skip


def hidden_holder(stage: Stage) -> None:
    """A process with CUDA initialised and no context, beside a monitor that does not count."""
    monitor = stage.start("monitor.py").wait_for("monitor")
    roles = stage.start("cuinit.py").wait_for("hidden")
    recorder = stage.record(
        "hidden-holder", "one process has done no more than cuInit, another only watches through NVML"
    )
    # The stand-in has no device files that anybody could hold open.
    found = [] if stage.rehearsing else [roles["hidden"]]
    stage.finish(recorder, {**roles, **monitor}, {}, hidden=found)


def pid_namespace(stage: Stage) -> None:
    """A holder in its own PID namespace, seen from the host and from such a namespace."""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    recorder = stage.record(
        "pid-namespace", "a torch holder of 2 GiB in a PID namespace of its own, seen from the host",
        host_pid_namespace=True,
    )  # fmt: skip
    program = stage.hold("holder", 2, "--framework", "torch", before=unshare)
    program.wait_for("holder")
    roles = {"holder": child_of(program.pid)}
    stage.finish(recorder, roles, {"holder": "active"})
    entry = Entry(
        "pid-namespace-inside", "pid-namespace-inside.jsonl.gz",
        "the same holder, recorded from inside another PID namespace: nobody is listed, nobody is dead, and"
        " its bytes are unknown",
        host_pid_namespace=False, gpu=stage.gpu,
    )  # fmt: skip
    env = stage.rehearsal.blind_env() if stage.rehearsing else None
    _capture(stage, stage.home / entry.file, entry.note, *unshare, env=env)
    stage.judge(entry)


def mps_clients(stage: Stage) -> None:
    """A busy and a quiet client of MPS, whose work the driver counts for the server."""
    directory = stage.scratch / "mps"
    directory.mkdir()
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory),
        "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    control = mps_control(stage)
    recorder = stage.record("mps-clients", "two clients of MPS, one busy and one quiet", idle_after=4.0)
    clients: list[Program] = []
    try:
        server = None
        if stage.rehearsing:
            server = stage.hold("server", 66 / 1024 - 518 / 1024).wait_for("server")["server"]
            env["VRAMLEDGER_REHEARSAL_MPS"] = str(server)
        else:
            subprocess.run([control, "-d"], env=stage.env(env), check=True, timeout=20, capture_output=True)
        busy = stage.hold("busy", 2, "--busy", env=env)
        quiet = stage.hold("quiet", 2, env=env)
        clients += [busy, quiet]
        roles = {**busy.wait_for("busy"), **quiet.wait_for("quiet")}
        recorder.listed(*roles.values())
        if server is None:
            server = next(pid for pid in _listed(recorder.snapshot) if pid not in roles.values())
        recorder.more(round(6 / recorder.entry.interval))  # longer than idle_after
        roles["server"] = server
        stage.finish(recorder, roles, dict.fromkeys(roles, "active"))
    finally:
        if not stage.rehearsing:
            for client in clients:  # before their server, which would report their end as a fault
                client.kill()
            subprocess.run(
                [control],
                input="quit -t 2\n",
                text=True,
                env=stage.env(env),
                check=False,
                timeout=20,
                capture_output=True,
            )


def mps_control(stage: Stage) -> str:
    """Return the path of the program that controls MPS, empty in a rehearsal.

    Raises:
        TroubleError: this host has none.
    """
    if stage.rehearsing:
        return ""
    places = ["/usr/bin", "/usr/local/nvidia/bin", *os.environ.get("PATH", "").split(":")]
    found = shutil.which("nvidia-cuda-mps-control", path=":".join(places))
    if found is None:
        message = "nvidia-cuda-mps-control is not on this host"
        raise TroubleError(message)
    return found


def _listed(shot: Snapshot | None) -> list[int]:
    return [held.pid for device in (shot.devices if shot else ()) for held in device.holdings]


def managed_memory(stage: Stage) -> None:
    """Managed memory on the card, which the driver charges to no process."""
    recorder = stage.record(
        "managed-memory", "1 GiB of managed memory lies on the card: NVML books it on nobody",
        unattributed_below=None, unattributed_between=[GIB * 9 // 10, GIB * 12 // 10],
    )  # fmt: skip
    stage.finish(recorder, stage.start("managed.py").wait_for("holder"), {"holder": "active"})


def stray_context(stage: Stage) -> None:
    """A context on a GPU that the program did not intend to use."""
    recorder = stage.record(
        "stray-context", "a tensor on cuda:1 and a synchronize() made a context on GPU 0 as well"
    )
    roles = stage.start("stray.py").wait_for("holder")
    stage.finish(recorder, roles, {"holder": "active"}, devices={roles["holder"]: [0, 1]})


def killed_holder(stage: Stage) -> None:
    """A holder that was killed and not reaped: its memory is freed."""
    recorder = stage.record(
        "killed-holder", "a holder of 20 GiB was SIGKILLed and not reaped: its bytes are free again"
    )
    program = stage.hold("holder", 20)
    roles = program.wait_for("holder")
    recorder.listed(*roles.values())
    recorder.more(1)
    program.signal(signal.SIGKILL)
    recorder.gone(*roles.values())
    recorder.more(4)
    stage.finish(recorder, roles, {}, absent=list(roles.values()))


def exit_and_return(stage: Stage) -> None:
    """A holder that ends in the ordinary way, and its successor."""
    recorder = stage.record(
        "exit-and-return", "a holder has given everything back, and the next one has come"
    )
    first = stage.hold("first", 6)
    before = first.wait_for("first")
    recorder.listed(*before.values())
    first.signal(signal.SIGTERM)
    first.process.wait(timeout=20)
    recorder.gone(*before.values())
    after = stage.hold("second", 6).wait_for("second")
    stage.finish(recorder, {**before, **after}, {"second": "active"}, absent=list(before.values()))


def jobs(stage: Stage) -> None:
    """Jobs that outlive the shell that started them, on purpose: none is an orphan."""
    recorder = stage.record("jobs", "a nohup, a setsid, a disowned job and a daemon, whose shell has gone")
    python, holder, daemon = stage.python, PROGRAMS / "holder.py", PROGRAMS / "daemon.py"
    script = f"""set -m
        nohup {python} {holder} --role nohup --gib 1 &
        setsid {python} {holder} --role setsid --gib 1 &
        {python} {holder} --role disown --gib 1 & disown
        {python} {daemon}
        read -r _"""
    shell = stage.run(["bash", "-c", script], start_new_session=True)
    plain = stage.run(
        ["bash", "-c", f"nohup {python} {holder} --role script --gib 1 & read -r _"], start_new_session=True
    )
    roles = {**shell.wait_for("nohup", "setsid", "disown", "daemon"), **plain.wait_for("script")}
    recorder.listed(*roles.values())
    for program in (shell, plain):
        if program.process.stdin is not None:
            program.process.stdin.close()
        program.process.wait(timeout=10)
    late = stage.record("jobs-late", "the same jobs, seen only after their shell had gone")
    recorder.more(2)
    expected = dict.fromkeys(roles, "active")
    stage.finish(recorder, roles, expected)
    stage.finish(late, roles, expected)


def live_workers(stage: Stage) -> None:
    """A DataLoader's live workers, of which one holds memory itself."""
    program = stage.start("loader.py")
    roles = program.wait_for("main", "gpu-worker", timeout=90)
    recorder = stage.record(
        "live-workers", "a training with live DataLoader workers, one of which holds GPU memory"
    )
    recorder.until("a search for hidden holders", lambda shot: hidden(shot) is not None)
    stage.finish(recorder, roles, {"main": "active", "gpu-worker": "active"})


def lively(stage: Stage) -> None:
    """Two minutes of an ordinary day, for users without a GPU."""
    recorder = stage.record(
        "lively",
        "two minutes of two GPUs: a training, a notebook, an inference server, a leak, and accidents",
        idle_after=20.0, interval=1.0,
    )  # fmt: skip
    begun = time.monotonic()
    scale = 0.1 if stage.rehearsing else 1.0

    def at(second: float) -> None:
        recorder.until(
            f"second {second}",
            lambda _: time.monotonic() - begun >= second * scale,
            timeout=second * scale + 10,
        )

    launcher = stage.start(
        "launcher.py", "--how", "spawn", "--devices", "0,1", "--gib", "3", "--busy", preexec_fn=os.setpgrp
    )
    started = [stage.start(f"{name}.py").wait_for(name) for name in ("train", "notebook", "answer", "leak")]
    evaluation = stage.start("evaluate.py", 88.0 * scale)
    halted = stage.hold("stopped", 6, "--device", 1)
    roles = {
        **{role: pid for pids in started for role, pid in pids.items()},
        **launcher.wait_for("worker-1", "worker-2"),
        **evaluation.wait_for("evaluate"),
        **halted.wait_for("stopped"),
    }
    recorder.listed(*roles.values())
    at(40)
    launcher.kill()
    at(60)
    halted.signal(signal.SIGSTOP)
    at(120)
    passed = [(roles["worker-1"], "active"), (roles["stopped"], "active"), (roles["evaluate"], "active")]
    expected = {
        "train": "active", "notebook": "active" if stage.rehearsing else "idle", "answer": "active",
        "leak": "active", "worker-1": "orphaned", "worker-2": "orphaned", "stopped": "stopped",
    }  # fmt: skip
    stage.finish(recorder, roles, expected, absent=[roles["evaluate"]], passed=passed)


def notebook_kernel(stage: Stage) -> None:
    """A real kernel of a notebook, named as jupyter-server names it, which holds memory and does nothing."""
    recorder = stage.record(
        "notebook-kernel", "a kernel of ipykernel with 12 GiB in torch, left open", idle_after=4.0
    )
    session = {"JPY_SESSION_NAME": "/home/ada/gan.ipynb"}
    roles = stage.start("kernel.py", "kernel", 12, stage.scratch, env=session).wait_for("kernel", timeout=120)
    recorder.listed(*roles.values())

    def named(shot: Snapshot) -> bool:
        process = shot.processes.get(roles["kernel"])
        owner = process.facts.owner if process is not None and process.facts is not None else None
        return owner is not None and bool(owner.notebook)

    recorder.until("the notebook's name", named)
    stage.finish(recorder, roles, {"kernel": "active" if stage.rehearsing else "idle"})


PLAYS: tuple[Scenario, ...] = (
    Scenario("idle-card", idle_card, 6),
    Scenario("busy-and-idle", busy_and_idle, 20),
    Scenario("orphans-subprocess", orphans_subprocess),
    Scenario("zombie-leader", zombie_leader, 8),
    Scenario("stopped", stopped, 8),
    Scenario("ipc-dead-producer", ipc_dead_producer),
    Scenario("jax-preallocation", jax_preallocation, 20),
    Scenario("hidden-holder", hidden_holder, 8),
    Scenario("pid-namespace", pid_namespace, 20),
    Scenario("torchrun-ranks", torchrun_ranks, 30),
    Scenario("mps-clients", mps_clients, 20),
    Scenario("managed-memory", managed_memory, 8),
    Scenario("stray-context", stray_context, 15),
    Scenario("orphans-spawn", orphans_spawn),
    Scenario("orphans-fork", orphans_fork),
    Scenario("killed-holder", killed_holder, 8),
    Scenario("exit-and-return", exit_and_return, 8),
    Scenario("jobs", jobs),
    Scenario("live-workers", live_workers, 25),
    Scenario("jax-no-preallocate", jax_no_preallocate, 15),
    Scenario("policies", policies, 75),
    Scenario("notebook-kernel", notebook_kernel, 25, needs="ipykernel"),
    Scenario("lively", lively, 130),
)
