"""What do names cost a settled host with every sample, of 512 pods, the dearest kind?

The CPU time is that of the thread that does it over 100 samples, beside that of the real sampler.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.lab.bench import cost
from tests.lab.bench.sample import sampling
from tests.lab.bench.scene import Scene, sleepers
from tests.lab.bench.table import Row
from tests.support.kubelet import allocatable, devices, kubelet, listed, pod
from vramledger.config import SamplingConfig
from vramledger.kubernetes import kubelet as kubelet_source
from vramledger.model.reading import ProcessFacts, ProcessRow
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.reader import CHECK_INTERVAL, OwnerReader
from vramledger.readers.schedulers.reader import READ_INTERVAL as SCHEDULER_PACE
from vramledger.readers.schedulers.reader import SchedulerReader

_MOST = 0.1  # of the sampler's CPU time
_SETTLED = 3
_SAMPLES = 100


def measure(on: Scene, *, seconds: int) -> Iterator[Row]:
    holders = on.devices * on.holders
    sample = _sampler(on, seconds)
    with sleepers(holders) as pids, TemporaryDirectory(prefix="v") as directory:
        root = Path(directory)
        both = _owners(root, pids) + _schedulers(root, pids)
    yield Row(on.name, "owners and reservations, CPU a sample", both, sample, "s", _MOST, "the sample")


def _sampler(on: Scene, seconds: int) -> float:
    """Return the CPU seconds of a sample of the real sampler, at its own pace of one a second."""
    with sampling(on, SamplingConfig()) as (pid, lines):
        for _ in range(_SETTLED):
            next(lines)
        before = cost.cpu_seconds(pid)
        for _ in range(seconds):
            next(lines)
        return (cost.cpu_seconds(pid) - before) / seconds


class _InPods(Host):
    """A host whose processes are in chosen pods: their own cgroup is read, and another one returned."""

    def __init__(self, root: Path) -> None:
        super().__init__(Path("/proc"), root)
        self.told: dict[int, tuple[str, ...]] = {}

    def cgroup(self, pid: int) -> tuple[str, ...] | None:
        """Read a process's place, which has the real cost, and return the chosen one."""
        return self.told.get(pid) if super().cgroup(pid) is not None else None


def _owners(root: Path, pids: list[int]) -> float:
    """Return the CPU seconds that owners add to a later sample."""
    now = 0.0
    host = _InPods(root)
    reader = OwnerReader(host, root, clock=lambda: now)
    rows = [row for pid in pids if (row := host.row(pid)) is not None]
    facts = [_in_a_pod(root, number, host.facts(row), row) for number, row in enumerate(rows)]
    host.told = {each.pid: each.cgroup or () for each in facts}
    reader.add_owners(facts, 60.0)
    spent = 0.0
    for _ in range(_SAMPLES):
        now += 1.0
        reader._last_check = now  # noqa: SLF001 the looks are made here, in this thread
        spent += _cpu(lambda: reader.check_owners(rows))
        if now % CHECK_INTERVAL == 0:
            spent += _cpu(lambda: reader._check(dict(reader._holders)))  # noqa: SLF001 as the thread does it
    return spent / _SAMPLES


def _in_a_pod(root: Path, number: int, facts: ProcessFacts | None, row: ProcessRow) -> ProcessFacts:
    """Put a holder into its own pod: the kubelet's directories, its runtime's, its cgroup."""
    uid = f"8f2b1c4d-5be5-4c2d-9d1e-{number:012x}"
    container = f"{number:064x}"
    for place in (
        f"var/log/pods/ml_train-{number}_{uid}/main",
        f"var/lib/kubelet/pods/{uid}",
        f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{container}",
    ):
        (root / place).mkdir(parents=True)
    path = f"/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{container}.scope"
    known = facts or ProcessFacts(row.pid, row.start)
    return ProcessFacts(known.pid, known.start, uid=0, user="root", cgroup=(f"0::{path}",))


def _schedulers(root: Path, pids: list[int]) -> float:
    """Return the CPU seconds that the schedulers add to a sample: 8 pods with a GPU, 64 steps of Slurm."""
    for number, pid in enumerate(pids[:64]):
        job = f"sys/fs/cgroup/system.slice/slurmstepd.scope/job_{number}/step_0/user/task_0"
        (root / job).mkdir(parents=True)
        (root / job / "cgroup.procs").write_text(f"{pid}\n")
    pods = [pod(f"train-{number}", devices("nvidia.com/gpu", f"GPU-{number}")) for number in range(8)]
    pods += [pod(f"web-{number}") for number in range(100)]
    offer = allocatable(devices("nvidia.com/gpu", *(f"GPU-{number}" for number in range(8))))
    reader = SchedulerReader(Host(Path("/proc")), root)
    answers = {"List": lambda _: listed(*pods), "GetAllocatableResources": lambda _: offer}
    with kubelet(root / kubelet_source.SOCKET, **answers):
        reader._read_all()  # noqa: SLF001 as the thread does it
        looks = [_cpu(lambda: reader._read_all()) for _ in range(10)]  # noqa: SLF001, PLW0108 as the thread does it
    return statistics.median(looks) / SCHEDULER_PACE


def _cpu(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun
