"""Run mixed jobs with faults under the real Slurm, and count wrong drains and leftovers that pass.

``python -m tests.lab.slurm_trial [--waves N] [--version older|newer] [--seed N]``, as root. Each wave is
some jobs side by side on two nodes with four GPUs each, which Slurm shares, while the drivers are slow, fail
or hang from time to time, and slurmctld does not answer. Each node has a fifth GPU that Slurm does not
manage, with somebody's memory. After a wave, a node on which memory was left that no process has must be
drained, for that GPU; any other node must be idle, and its GPUs free.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

from tests.support.slurm.cluster import HOLDER, Cluster, Site
from tests.support.standin.library import Code
from tests.support.waiting import wait_until

NODES = ("n1", "n2")
JOBS_PER_WAVE = 12
UNMANAGED = 4
"""A GPU that Slurm does not manage. Somebody has memory there all the time."""

NO_PROCESS = 2**22
"""From this pid on there is no process: ``holder.py`` leaves dead memory with it."""

STEPS = """\
srun --overlap HOLDER {s} HOLDS & srun --overlap HOLDER {s} HOLDS term=ignore & wait"""
"""Two steps on the same GPU."""

JOBS = {
    "clean": (6, "--gres=gpu:1", "{s}"),
    "two GPUs": (3, "--gres=gpu:2", "{s}"),
    "shared": (6, "--gres=shard:1", "{s}"),
    "array": (2, "--gres=gpu:1 --array=0-1", "{s}"),
    "array, shared": (2, "--gres=shard:1 --array=0-2", "{s}"),
    "fails": (2, "--gres=gpu:1", "{s} exit=3"),
    "cancelled": (3, "--gres=gpu:1", "300"),
    "cancelled, ignores SIGTERM": (2, "--gres=shard:2", "300 term=ignore"),
    "suspended": (2, "--gres=gpu:1", "{s}"),
    "suspended, shared": (2, "--gres=shard:1", "{s}"),
    "requeued": (2, "--gres=gpu:1", "300"),
    "requeued, ignores SIGTERM": (1, "--gres=shard:1", "300 term=ignore"),
    "steps that overlap": (2, "--gres=gpu:1", STEPS),
    "escapes": (2, "--gres=gpu:1", "HOLDER 300 HOLDS escape=yes term=ignore; sleep 1"),
    "escapes, shared": (2, "--gres=shard:1", "HOLDER 300 HOLDS escape=yes term=ignore; sleep 1"),
    "no GPU": (2, "", "true"),
    "leaves dead memory": (1, "--gres=gpu:1", "{s} dead=yes"),
    "leaves dead memory, shared": (1, "--gres=shard:1", "{s} dead=yes"),
}
"""Each kind of job: its weight, the flags of sbatch, the words of the holder or a command."""

TIMED = """\
WAIT=25
SETTLE=8
GRACE=1
BEGUN=${{EPOCHREALTIME/./}}
trap 'echo "$context $(( (${{EPOCHREALTIME/./}} - BEGUN) / 1000 ))" >>{log}' EXIT
"""


def disturb(cluster: Cluster, draw: random.Random, stop: threading.Event) -> None:
    """Make a driver slow, failing or hanging, or slurmctld silent, for a moment, from time to time."""
    while not stop.wait(draw.uniform(1, 4)):
        standin = cluster.drivers[draw.choice(NODES)].standin
        fault = draw.choice(["slow", "error", "hang", "controller"])
        if fault == "slow":
            standin.latency("nvmlDeviceGetMemoryInfo_v2", 700_000)
        elif fault == "error":
            standin.driver_error = Code.UNKNOWN
        elif fault == "hang":
            standin.hang("nvmlDeviceGetMemoryInfo_v2")
        else:
            cluster.signal("slurmctld", signal.SIGSTOP)
        stop.wait(draw.uniform(0.2, 2))
        cluster.signal("slurmctld", signal.SIGCONT)
        standin.latency("nvmlDeviceGetMemoryInfo_v2", 0)
        standin.driver_error = 0
        standin.release()


def submit(cluster: Cluster, draw: random.Random, counts: Counter[str], kind: str) -> int | None:
    """Submit a job of this kind; None if slurmctld did not confirm it: it may be there all the same."""
    _, flags, words = JOBS[kind]
    words = words.format(s=f"{draw.uniform(0.2, 3):.1f}")
    node, user = draw.choice(NODES), draw.choice(["alice", "bob"])
    is_hold = words[0].isdigit()
    try:
        job = cluster.submit(
            *flags.split(),
            hold=words if is_hold else "",
            command="" if is_hold else words,
            user=user,
            node=node,
        )
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"  not confirmed: {kind}: {str(error)[-200:]!r}")
        counts["not confirmed"] += 1
        return None
    counts[kind] += 1
    return job


def act(cluster: Cluster, draw: random.Random, jobs: dict[int, str]) -> None:
    """Cancel, suspend, resume and requeue jobs, both while they run and before they start."""
    time.sleep(draw.uniform(1, 3))

    def control(verb: str, kind: str) -> None:
        for job in (job for job, each in jobs.items() if each.startswith(kind)):
            words = ("scancel",) if verb == "scancel" else ("scontrol", verb)
            # A job that has ended, or has not begun, cannot be suspended or requeued.
            with suppress(subprocess.TimeoutExpired):
                cluster.run(*words, str(job), check=False)

    control("scancel", "cancelled")
    control("suspend", "suspended")
    control("requeue", "requeued")
    time.sleep(draw.uniform(0, 2))
    control("resume", "suspended")
    control("scancel", "requeued")


def waiting_jobs(cluster: Cluster) -> dict[str, list[str]] | None:
    """Return the jobs that wait for each drained node; None while a job runs, ends, or may start."""
    listed = cluster.ask("squeue", "-h", "-o", "%A %T %n") or ""
    states = cluster.states()
    waiting: dict[str, list[str]] = {name: [] for name in NODES}
    for line in listed.splitlines():
        job, state, node = line.split()
        if state != "PENDING" or "DRAIN" not in states.get(node, ""):
            return None
        waiting[node].append(job)
    busy = {state for state in states.values() if state not in ("IDLE", "DRAINED")}
    return None if busy else waiting


def wave(cluster: Cluster, draw: random.Random, counts: Counter[str]) -> None:
    """Run one wave, and count what went wrong."""
    kinds = draw.choices(list(JOBS), [weight for weight, _, _ in JOBS.values()], k=JOBS_PER_WAVE)
    jobs = {job: kind for kind in kinds if (job := submit(cluster, draw, counts, kind)) is not None}
    act(cluster, draw, jobs)
    try:
        waited = "the jobs have ended, or wait for a node that is drained"
        waiting = wait_until(lambda: waiting_jobs(cluster), waited, patience=240) or {}
    except TimeoutError:
        counts["WAVE DID NOT END"] += 1
        print(cluster.ask("squeue"), cluster.ask("sinfo", "-N", "-o", "%N %T %E"))
        waiting = {}
    for name in NODES:
        counts["not run, node drained"] += len(waiting.get(name, ()))
        judge_node(cluster, name, counts)
    with suppress(subprocess.TimeoutExpired):
        cluster.cancel_all()
    for name in NODES:
        clean_up(cluster, name)


def judge_node(cluster: Cluster, name: str, counts: Counter[str]) -> None:
    """Count what a wave has left on a node, and what became of the node."""
    held = left_over(cluster, name)
    dead = sum(pid >= NO_PROCESS for pid in held)
    live = len(held) - dead
    state, reason = cluster.states()[name], cluster.reason(name)
    drained = "DRAIN" in state
    if dead:
        counts["right drains" if drained else "LEFTOVER PASSED"] += 1
    elif drained:
        counts["drained as unknown" if reason.startswith("vram?") else "WRONG DRAIN"] += 1
    counts["LIVE SURVIVOR"] += live
    if drained or dead or live:
        print(f"  {name}: {state} {reason[:60]!r}, dead {dead}, live {live}")


def left_over(cluster: Cluster, name: str) -> list[int]:
    """Return who holds memory on the GPUs that Slurm manages."""
    return [pid for pid, gpus in cluster.drivers[name].holdings if UNMANAGED not in gpus]


def clean_up(cluster: Cluster, name: str) -> None:
    """Reset the GPUs of a node, and resume it, as a person does."""
    cluster.drivers[name].forget_dead()
    wait_until(lambda: not left_over(cluster, name), "the GPUs are free", patience=60)
    cluster.wait_idle(name, timeout=240)

    def is_back() -> bool:
        if "DRAIN" in cluster.states()[name]:
            with suppress(AssertionError, subprocess.TimeoutExpired):
                cluster.resume(name)
        return cluster.states()[name] == "IDLE"

    wait_until(is_back, f"{name} is idle again", patience=60)


def main() -> int:
    """Run the trial, print the counts, and fail if one is not 0 that must be."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--waves", type=int, default=20)
    arguments.add_argument("--version", choices=("older", "newer"), default="older")
    arguments.add_argument("--cgroup", choices=("v1", "v2"), default="v1")
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    draw, counts = random.Random(given.seed), Counter[str]()  # noqa: S311 a seed, for the same jobs again
    site = Site(
        version=given.version,
        cgroup=given.cgroup,
        nodes=NODES,
        devices=UNMANAGED + 1,
        gres="gpu:4,shard:16",
        gres_conf="Name=gpu File=/dev/nvidia[0-3]\nName=shard Count=16",
    )
    with Cluster(site) as cluster:
        times = cluster.log / "times"
        times.touch()
        times.chmod(0o666)
        cluster.configure(TIMED.format(log=times))
        for name in NODES:
            place = str(cluster.drivers[name].directory)
            cluster.run(
                "/usr/bin/python3",
                str(HOLDER),
                "100000",
                place,
                f"gpus={UNMANAGED}",
                "escape=yes",
                user="bob",
            )
        stop = threading.Event()
        faults = threading.Thread(target=disturb, args=(cluster, random.Random(given.seed + 1), stop))  # noqa: S311
        faults.start()
        try:
            for number in range(given.waves):
                wave(cluster, draw, counts)
                print(f"wave {number + 1}: {dict(counts)}", flush=True)
        finally:
            stop.set()
            faults.join()
        measured: dict[str, list[int]] = {}
        for line in times.read_text().splitlines():
            context, _, milliseconds = line.partition(" ")
            measured.setdefault(context, []).append(int(milliseconds))
    for context, values in measured.items():
        late = statistics.quantiles(values, n=20)[-1]
        median = statistics.median(values)
        print(f"{context}: {len(values)} runs, median {median:.0f} ms, 95 % {late:.0f} ms")
    bad = sum(count for name, count in counts.items() if name.isupper())
    print(f"{sum(counts[kind] for kind in JOBS)} jobs; {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
