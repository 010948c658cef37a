"""Write recordings of machines that nobody has seen here, by hand, from what their documentation says.

``python -m tests.lab.recordings.machines`` writes them into tests/recordings, with their entries in the
manifest and their golden scrapes. Each says in its note that it is from documentation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from gzip import GzipFile
from pathlib import Path

from msgspec.structs import replace

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "exporter"), str(ROOT / "exporter/agent")]

from tests.support import judging  # noqa: E402 they need the path above
from tests.support.judging import Entry  # noqa: E402
from vramledger.model.reading import (  # noqa: E402
    CgroupLimit,
    DeviceReading,
    MemoryReading,
    NodeMemory,
    Owner,
    ParentFacts,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    Reading,
    encode,
)
from vramledger.sampling.replay import encode_header  # noqa: E402

MIB, GIB = 2**20, 2**30
BEGIN, BOOT = 1_790_000_000.0, 1_789_990_000.0
SEEN = "from documentation, not seen"
IDLE = {"sm": 0.0, "graphics": 0.006, "dram": 0.000004, "pcie_transmit": 4e5, "seconds": 1.0}
BUSY = {**IDLE, "sm": 0.7, "tensor": 0.4, "dram": 0.3}

Make = Callable[[int], tuple[DeviceReading, ...]]
"""Return the devices at a second of the recording."""


@dataclass(frozen=True)
class Machine:
    """A machine: its name, what it is, its devices at each second, and the verdicts on its holders."""

    name: str
    gpu: str
    note: str
    devices: Make
    expected: dict[int, str]
    driver: str = "580.173.02"
    seconds: int = 12
    absent: tuple[int, ...] = ()
    host_pid_namespace: bool = True
    denied: tuple[int, ...] = ()
    cgroups: Mapping[int, str] = field(default_factory=dict)

    @property
    def entry(self) -> Entry:
        """The entry in the manifest."""
        return Entry(
            f"machine-{self.name}",
            f"machine-{self.name}.jsonl.gz",
            note=f"{SEEN}: {self.note}",
            idle_after=6.0,
            interval=1.0,
            expected=self.expected,
            roles={pid: f"holder-{pid % 1000}" for pid in sorted({*self.expected, *self.absent})},
            absent=list(self.absent),
            host_pid_namespace=self.host_pid_namespace,
            gpu=f"{self.gpu}, {SEEN}",
        )

    def readings(self) -> Iterator[Reading]:
        """Yield the readings, a second apart."""
        known: set[int] = set()
        for second in range(self.seconds):
            devices = self.devices(second)
            pids = sorted({entry.pid for each in devices for entry in each.processes or ()})
            seen = [pid for pid in pids if pid not in self.denied]
            rows = tuple(ProcessRow(pid, 5000 + pid, "S", 100, pid, pid, 0, 8) for pid in seen)
            yield Reading(
                time=BEGIN + second,
                monotonic=1000.0 + second,
                duration=0.01,
                boot_id="b",
                boot_time=BOOT,
                host_pid_namespace=self.host_pid_namespace,
                driver_version=self.driver,
                cuda_version="13.0",
                devices=devices,
                rows=rows,
                unseen=dict.fromkeys(self.denied, "denied") if set(self.denied) & set(pids) else {},
                facts=tuple(_facts(pid, self.cgroups.get(pid)) for pid in seen if pid not in known),
                device_files=True,
                hidden=(),
                hidden_unreadable=0,
                collectors={"ledger": (True, 0.01), "process": (not self.denied, 0.001)},
            )
            known |= set(pids)


def _facts(pid: int, cgroup: str | None) -> ProcessFacts:
    """Return the facts of a user's program, or of a Slurm job's, whose cgroup has a limit."""
    parent = ParentFacts(100, 400, "bash", "bash", init=False, signs=(), uid=1000, user="ada", program="bash")
    return ProcessFacts(
        pid,
        5000 + pid,
        uid=1000,
        user="ada",
        comm="python",
        command="train.py",
        nspid=(pid,),
        cgroup=None if cgroup is None else (f"0::{cgroup}",),
        owner=Owner("user", "ada") if cgroup is None else Owner("slurm", cgroup.rpartition("_")[2]),
        libraries=("libcuda",),
        parent=parent,
        leader_alive=True,
        uses_gpu=True,
    )


def _device(
    name: str, memory: MemoryReading | None, *held: tuple[int, int | None], uuid: str = "GPU-1"
) -> DeviceReading:
    """Make a GPU that answers; NVML gives each new reading the means of the second before."""
    return DeviceReading(
        0,
        f"{uuid}0000000-0000-0000-0000-000000000000",
        name=name,
        pci_bus_id="0009:01:00.0",
        minor=0,
        duration=0.005,
        memory=memory,
        processes=tuple(ProcessEntry(pid, size, "C") for pid, size in held),
        utilization={"gpu": 0.0, "memory": 0.0},
        process_utilization=(),
        activity=IDLE,
    )


def _coherent(second: int) -> tuple[DeviceReading, ...]:
    """Have two holders on a GH200, of which one ends after 4 s and leaves its pages."""
    held = ((2001, 40 * GIB), (2002, 8 * GIB)) if second < 4 else ((2002, 8 * GIB),)
    total, reserved, used = 97_871 * MIB, 620 * MIB, 56 * GIB
    node = NodeMemory(1, total - reserved, total - reserved - used, 5 * GIB, 2 * GIB, 300 * MIB, GIB)
    gpu = _device("NVIDIA GH200 480GB", MemoryReading(total, total - reserved - used, used, reserved), *held)
    return (replace(gpu, memory_kind="coherent", node=node, addressing_mode="ats"),)


def _cdmm(_second: int) -> tuple[DeviceReading, ...]:
    total, reserved, used = 189_471 * MIB, 620 * MIB, 8 * GIB + 9 * MIB
    gpu = _device(
        "NVIDIA GB200", MemoryReading(total, total - reserved - used, used, reserved), (2002, 8 * GIB)
    )
    return (replace(gpu, addressing_mode="ats"),)


def _unified(_second: int) -> tuple[DeviceReading, ...]:
    """Have a server on a GB10 whose host uses 9 GiB besides; the figures are of two reports."""
    total, available = 127_600_748 * 1024, 127_600_748 * 1024 - 28 * GIB
    gpu = _device(
        "NVIDIA GB10", MemoryReading(total, available, total - available, None), (2001, 19_135 * MIB)
    )
    return (replace(gpu, memory_kind="unified", addressing_mode="ats", activity=None),)


def _orin(_second: int) -> tuple[DeviceReading, ...]:
    """Have two holders that nvmap names on a Jetson AGX Orin, whose NVML says nothing of work."""
    total, available = 64_349_508 * 1024, 30 * GIB
    memory = MemoryReading(total, available, total - available, None)
    gpu = _device("Orin (nvgpu)", memory, (2001, 12 * GIB), (2002, 600 * MIB))
    gpu = replace(gpu, memory_kind="unified", pci_bus_id=None)
    return (replace(gpu, utilization=None, process_utilization=None, activity=None),)


def _orin_unprivileged(second: int) -> tuple[DeviceReading, ...]:
    return tuple(replace(each, processes=None) for each in _orin(second))


def _instance(
    place: int,
    profile: str,
    total: int,
    activity: dict[str, float] | None,
    *held: tuple[int, int],
    compute: int = 0,
) -> DeviceReading:
    """Make a MIG instance with the driver's usual 16 MiB of reserve; its bytes are the GPU instance's."""
    used = sum(size for _, size in held)
    memory = MemoryReading(total, total - 16 * MIB - used, used, 16 * MIB)
    return DeviceReading(
        0,
        f"MIG-{place:08d}-{compute:04d}-0000-0000-000000000000",
        name=f"NVIDIA H100 80GB HBM3 MIG {profile}",
        pci_bus_id="0009:01:00.0",
        minor=0,
        parent="GPU-10000000-0000-0000-0000-000000000000",
        mig_profile=profile,
        gpu_instance=place + 1,
        compute_instance=compute,
        mig_placement=f"{place}:{4 if profile.endswith('3g.40gb') else 1}",
        memory=memory,
        processes=tuple(ProcessEntry(pid, size, "C") for pid, size in held),
        activity=activity,
    )


def _divided() -> DeviceReading:
    gpu = _device("NVIDIA H100 80GB HBM3", None)
    return replace(
        gpu, divided=True, processes=None, utilization=None, process_utilization=None, activity=None
    )


_NOTHING = {"sm": 0.0, "graphics": 0.0, "dram": 0.0, "seconds": 1.0}
"""An instance whose counters do not move: its GPU's links are not counted for it."""


def _mig(second: int) -> tuple[DeviceReading, ...]:
    """Have an idle holder, a busy one, one that has worked once, and one of which nothing is known."""
    return (
        _divided(),
        _instance(0, "1g.10gb", 9_856 * MIB, IDLE, (3001, 4 * GIB)),
        _instance(1, "1g.10gb", 9_856 * MIB, BUSY, (3002, 4 * GIB)),
        _instance(2, "1g.10gb", 9_856 * MIB, BUSY if second < 2 else _NOTHING, (3003, 2 * GIB)),
        _instance(3, "1g.10gb", 9_856 * MIB, _NOTHING, (3004, 2 * GIB)),
    )


def _mig_without_counters(_second: int) -> tuple[DeviceReading, ...]:
    instance = _instance(0, "3g.40gb", 40_192 * MIB, None, (3001, 4 * GIB))
    return (
        replace(_divided(), name="NVIDIA A100-SXM4-80GB"),
        replace(instance, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb"),
    )


def _compute_instances(_second: int) -> tuple[DeviceReading, ...]:
    """Have two compute instances of one GPU instance; NVML gives both the memory of the GPU instance."""
    first = _instance(0, "1c.3g.40gb", 40_192 * MIB, IDLE, (3001, 4 * GIB))
    second = _instance(0, "2c.3g.40gb", 40_192 * MIB, IDLE, (3002, 10 * GIB), compute=1)
    used = 14 * GIB + 9 * MIB
    memory = MemoryReading(40_192 * MIB, 40_192 * MIB - 16 * MIB - used, used, 16 * MIB)
    return _divided(), *(replace(each, memory=memory) for each in (first, second))


def _wsl(_second: int) -> tuple[DeviceReading, ...]:
    """List no process on a GPU that Windows uses as well."""
    total, used = 8 * GIB, 3 * GIB
    return (_device("NVIDIA GeForce RTX 4070", MemoryReading(total, total - used, used, 0)),)


def _hidepid(_second: int) -> tuple[DeviceReading, ...]:
    total, reserved, used = 81_559 * MIB, 600 * MIB, 12 * GIB
    memory = MemoryReading(total, total - reserved - used, used, reserved)
    return (_device("NVIDIA H100 80GB HBM3", memory, (2001, 8 * GIB), (2002, 4 * GIB)),)


def _vgpu(_second: int) -> tuple[DeviceReading, ...]:
    total, used = 20 * GIB, 4 * GIB + 9 * MIB
    gpu = _device("NVIDIA A40-20C", MemoryReading(total, total - used, used, 0), (2001, 4 * GIB))
    return (replace(gpu, virtualization="vgpu", activity=None, process_utilization=None),)


def _limits(second: int) -> tuple[DeviceReading, ...]:
    """Have two jobs with a limit each, of which one fills its own; the kernel counts what the driver does."""
    total, reserved = 81_559 * MIB, 600 * MIB
    near = 30 * GIB + second * 200 * MIB
    used = near + 8 * GIB + 9 * MIB
    memory = MemoryReading(total, total - reserved - used, used, reserved)
    gpu = _device("NVIDIA H100 80GB HBM3", memory, (2001, near), (2002, 8 * GIB))
    limits = (
        CgroupLimit("/slurm/job_41", 0, 32 * GIB + 512 * MIB, near),
        CgroupLimit("/slurm/job_42", 8 * GIB, 40 * GIB, 8 * GIB),
    )
    return (replace(gpu, activity=BUSY, utilization={"gpu": 0.7, "memory": 0.3}, limits=limits),)


def _confidential(_second: int) -> tuple[DeviceReading, ...]:
    total, reserved, used = 81_559 * MIB, 600 * MIB, 8 * GIB + 9 * MIB
    memory = MemoryReading(total, total - reserved - used, used, reserved)
    gpu = _device("NVIDIA H100 80GB HBM3", memory, (2001, 8 * GIB))
    return (replace(gpu, virtualization="passthrough", confidential="on", activity=None),)


MACHINES = (
    Machine(
        "wsl2",
        "1 x NVIDIA GeForce in WSL2",
        "the memory of Windows is unknown, and not unattributed",
        _wsl,
        {},
        host_pid_namespace=False,
    ),
    Machine(
        "hidepid",
        "1 x NVIDIA H100",
        "/proc hides one of two holders: it exists, and is neither dead nor idle",
        _hidepid,
        {2001: "idle", 2002: "unknown"},
        denied=(2002,),
    ),
    Machine(
        "vgpu",
        "1 x NVIDIA A40-20C (vGPU) in a virtual machine",
        "a part of a GPU without counters: nothing more is known of work than the driver's rates",
        _vgpu,
        {2001: "idle"},
    ),
    Machine(
        "confidential",
        "1 x NVIDIA H100 in a confidential virtual machine",
        "the performance counters are hidden, so idleness is not proven",
        _confidential,
        {2001: "idle"},
    ),
    Machine(
        "limits",
        "1 x NVIDIA H100 whose memory is limited by cgroup (dmem)",
        "each job has its limit and its use, and one is near its limit",
        _limits,
        {2001: "active", 2002: "active"},
        cgroups={2001: "/slurm/job_41", 2002: "/slurm/job_42"},
    ),
    Machine(
        "mig",
        "1 x NVIDIA H100 in MIG mode",
        "four instances with GPM: idle, busy, quiet after work, and counters that have never moved",
        _mig,
        {3001: "idle", 3002: "active", 3003: "idle", 3004: "active"},
    ),
    Machine(
        "mig-without-gpm",
        "1 x NVIDIA A100 in MIG mode",
        "no counters and no utilisation: whether the holder works cannot be known",
        _mig_without_counters,
        {3001: "active"},
    ),
    Machine(
        "mig-compute-instances",
        "1 x NVIDIA H100 in MIG mode",
        "two compute instances share the memory of one GPU instance",
        _compute_instances,
        {3001: "idle", 3002: "idle"},
    ),
    Machine(
        "coherent",
        "1 x NVIDIA GH200 in NUMA mode",
        "a holder ends and its pages stay, page cache and programs lie on the node",
        _coherent,
        {2002: "idle"},
        absent=(2001,),
    ),
    Machine("cdmm", "1 x NVIDIA GB200 in CDMM mode", "the driver manages the memory", _cdmm, {2002: "idle"}),
    Machine(
        "unified", "1 x NVIDIA GB10", "a server on a GPU without memory of its own", _unified, {2001: "idle"}
    ),
    Machine(
        "orin",
        "1 x NVIDIA Jetson AGX Orin",
        "nvmap names the holders, and nothing says whether they work",
        _orin,
        {2001: "active", 2002: "active"},
        driver="540.4.0",
    ),
    Machine(
        "orin-unprivileged",
        "1 x NVIDIA Jetson AGX Orin",
        "nvmap's list is not readable: the holders are not known",
        _orin_unprivileged,
        {},
        driver="540.4.0",
    ),
)


def write(directory: Path = judging.HOME) -> None:
    """Write every recording, and replace their entries in the manifest; old ones of this kind go."""
    kept = [entry for entry in judging.load(directory) if not entry.name.startswith("machine-")]
    for machine in MACHINES:
        with (directory / machine.entry.file).open("wb") as file, GzipFile("", "wb", 9, file, 0) as packed:
            packed.write(encode_header(machine.entry.note, machine.entry.idle_after, simulated=True))
            for reading in machine.readings():
                packed.write(encode(reading))
    judging.save(directory, [*kept, *(machine.entry for machine in MACHINES)])
    for machine in MACHINES:
        last = judging.replay(directory, machine.entry)[-1]
        judging.golden_path(directory, machine.entry).write_bytes(judging.golden(last))


if __name__ == "__main__":
    write()
