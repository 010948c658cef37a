"""Run mixed jobs with faults under the real Slurm, and count wrong drains and leftovers that pass.

``python -m tests.tools.slurm_trial [--waves N] [--version older|newer] [--seed N]``, as root. Each wave is
some jobs side by side on two nodes with four GPUs each, which Slurm shares, while the drivers are slow, fail
or hang from time to time. After a wave, a node on which memory was left that no process has must be drained,
for that GPU; any other node must be idle, and its GPUs free.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter

from tests.support.slurm.cluster import Cluster, Site
from tests.support.standin.library import Code
from tests.support.waiting import wait_until

NODES = ("n1", "n2")
JOBS_PER_WAVE = 12
NO_PROCESS = 2**22
"""From this pid on there is no process: ``holder.py`` leaves dead memory with it."""

JOBS = {
    "clean": (8, "--gres=gpu:1", "{s}"),
    "two GPUs": (3, "--gres=gpu:2", "{s}"),
    "shared": (8, "--gres=shard:1", "{s}"),
    "fails": (3, "--gres=gpu:1", "{s} exit=3"),
    "cancelled": (3, "--gres=gpu:1", "300"),
    "cancelled, ignores SIGTERM": (2, "--gres=shard:2", "300 term=ignore"),
    "escapes": (2, "--gres=gpu:1", "300 escape=yes term=ignore"),
    "no GPU": (2, "", ""),
    "leaves dead memory": (1, "--gres=gpu:1", "{s} dead=yes"),
    "leaves dead memory, shared": (1, "--gres=shard:1", "{s} dead=yes"),
}
"""Each kind of job: its weight, the flags of sbatch, the words of the holder."""

TIMED = """\
WAIT=25
SETTLE=8
GRACE=1
BEGUN=${{EPOCHREALTIME/./}}
trap 'echo "$context $(( (${{EPOCHREALTIME/./}} - BEGUN) / 1000 ))" >>{log}' EXIT
"""


def disturb(cluster: Cluster, draw: random.Random, stop: threading.Event) -> None:
    """Make the drivers slow, failing or hanging for a moment, from time to time."""
    while not stop.wait(draw.uniform(1, 4)):
        standin = cluster.drivers[draw.choice(NODES)].standin
        fault = draw.choice(["slow", "error", "hang"])
        if fault == "slow":
            standin.latency("nvmlDeviceGetMemoryInfo_v2", 700_000)
        elif fault == "error":
            standin.driver_error = Code.UNKNOWN
        else:
            standin.hang("nvmlDeviceGetMemoryInfo_v2")
        stop.wait(draw.uniform(0.2, 2))
        standin.latency("nvmlDeviceGetMemoryInfo_v2", 0)
        standin.driver_error = 0
        standin.release()


def wave(cluster: Cluster, draw: random.Random, counts: Counter[str]) -> None:
    """Run one wave, and count what went wrong."""
    kinds = draw.choices(list(JOBS), [weight for weight, _, _ in JOBS.values()], k=JOBS_PER_WAVE)
    jobs: dict[int, tuple[str, str]] = {}
    for kind in kinds:
        _, flags, hold = JOBS[kind]
        node, seconds = draw.choice(NODES), f"{draw.uniform(0.2, 3):.1f}"
        user = draw.choice(["alice", "bob"])
        words = flags.split()
        if not hold:
            job = cluster.submit(*words, command="true", user=user, node=node)
        elif kind == "escapes":
            text = f"HOLDER {hold.split()[0]} HOLDS {' '.join(hold.split()[1:])}; sleep 1"
            job = cluster.submit(*words, command=text, user=user, node=node)
        else:
            job = cluster.submit(*words, hold=hold.format(s=seconds), user=user, node=node)
        jobs[job] = (kind, node)
        counts[kind] += 1
    cancelled = [job for job, (kind, _) in jobs.items() if kind.startswith("cancelled")]
    for job in cancelled:
        cluster.wait_for(job, "RUNNING", "COMPLETED", "CANCELLED", "PENDING")
        draw.random()
    time.sleep(draw.uniform(1, 3))
    cluster.run("scancel", *(str(job) for job in cancelled), check=False) if cancelled else None
    over = {"COMPLETED", "CANCELLED", "FAILED", "GONE"}

    def quiet() -> bool:
        running = cluster.run("squeue", "-h", "-t", "R,CG,CF", "-o", "%i", check=False)
        states = cluster.states()
        return not running.split() and all(
            (state := cluster.state_of(job)) in over
            or (state == "PENDING" and "DRAIN" in states.get(node, ""))
            for job, (_, node) in jobs.items()
        )

    wait_until(quiet, "the jobs have ended, or wait for a node that is drained", patience=200)
    for name in NODES:
        waiting = [
            job for job, (_, node) in jobs.items() if node == name and cluster.state_of(job) == "PENDING"
        ]
        counts["not run, node drained"] += len(waiting)
        judge_node(cluster, name, counts)
        if waiting:
            cluster.run("scancel", *map(str, waiting), check=False)
        clean_up(cluster, name)


def judge_node(cluster: Cluster, name: str, counts: Counter[str]) -> None:
    """Count what a wave has left on a node, and what became of the node."""
    driver = cluster.drivers[name]
    driver.standin.release()
    dead = sum(pid >= NO_PROCESS for pid in driver.holders)
    live = len(driver.holders) - dead
    state, reason = cluster.states()[name], cluster.reason(name)
    drained = "DRAIN" in state
    if dead:
        counts["right drains" if drained else "LEFTOVER PASSED"] += 1
    elif drained:
        counts["drained as unknown" if reason.startswith("vram?") else "WRONG DRAIN"] += 1
    counts["LIVE SURVIVOR"] += live
    if drained or dead or live:
        print(f"  {name}: {state} {reason[:60]!r}, dead {dead}, live {live}")


def clean_up(cluster: Cluster, name: str) -> None:
    """Reset the GPUs of a node, and resume it, as a person does."""
    driver = cluster.drivers[name]
    driver.forget_dead()
    wait_until(lambda: not driver.holders, "the GPUs are free", patience=60)
    cluster.wait_idle(name)
    if "DRAIN" in cluster.states()[name]:
        cluster.resume(name)


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
        devices=4,
        gres="gpu:4,shard:16",
        gres_conf="Name=gpu File=/dev/nvidia[0-3]\nName=shard Count=16",
    )
    with Cluster(site) as cluster:
        times = cluster.log / "times"
        times.touch()
        times.chmod(0o666)
        cluster.configure(TIMED.format(log=times))
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
    bad = counts["LEFTOVER PASSED"] + counts["WRONG DRAIN"] + counts["LIVE SURVIVOR"]
    print(f"{sum(counts[kind] for kind in JOBS)} jobs; {bad} wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
