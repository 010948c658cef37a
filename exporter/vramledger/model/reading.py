"""Declare what one sample read, exactly as the driver and /proc reported it: no judgement, base units.

The sampler sends readings to the exporter, and a recording is a file of readings, one JSON object in each
line. Everything that follows (holdings, states, ledger) is computed from these values alone, so a recording
replays exactly. ``None`` means that the source did not report the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from vramledger.errors import RecordingError
from vramledger.model.agent_report import Agent, AgentSocket, RefusedError
from vramledger.model.holder_facts import ReadHolderFacts
from vramledger.model.records import READ_ERRORS, write_record

FAILURE_REASONS = (
    "no-library",  # libnvidia-ml.so.1 is not on this host
    "no-driver",  # the library is there, the kernel module is not
    "version-mismatch",  # the library and the kernel module are of different versions
    "no-permission",
    "no-devices",  # a driver, but not a single GPU
    "driver-lost",  # the driver worked before and does not any more: unloaded or reloaded while we used it
    "timeout",  # the sampler did not answer in time and was killed
    "sampler-exit",  # the sampler ended by itself or was killed by somebody else
    "recording",  # the recording could not be read to its end
    "internal",  # a bug of ours
)
"""Every value of the ``reason`` label of ``vramledger_sample_failures_total``."""

RELEASED = "released"
"""The reason of a reading without data that is not a failure: the GPUs were released on purpose."""


class MemoryReading(NamedTuple):
    """A device's memory, bytes; without ``reserved`` (version 1), ``used`` includes the driver's reserve."""

    total: int
    free: int
    used: int
    reserved: int | None


COHERENT, UNIFIED = "coherent", "unified"
"""The kinds of memory that the operating system manages: a device's own as a NUMA node (GH200, GB200, GB300),
and the host's, which a device without memory of its own uses (GB10, Jetson)."""


class NodeMemory(NamedTuple):
    """The memory of a NUMA node, bytes, as the kernel counts it."""

    node: int
    total: int  # all of it that the kernel manages
    free: int  # what nobody uses
    file: int  # the page cache, shared memory and tmpfs
    anonymous: int  # ordinary memory of programs
    kernel: int  # the kernel's own, as far as it counts it: slabs, stacks and page tables
    # the part of ``file`` that is shared memory and tmpfs, which the kernel cannot drop; None when not known
    shared: int | None = None


class CgroupLimit(NamedTuple):
    """What a cgroup, with all below it, may take of a device, and what it has."""

    cgroup: str  # its path in version 2 of cgroups
    minimum: int | None  # bytes that are guaranteed to it; beyond them it may be evicted. None when not known
    maximum: int | None  # bytes beyond which its allocations fail; None without such a limit
    current: int | None  # bytes that it has; None when not known


class ProcessEntry(NamedTuple):
    """One pid that NVML lists on a device, the maximum over its lists.

    ``memory`` is bytes, None where NVML says "not available". ``kinds`` holds ``C`` (compute), ``G``
    (graphics) and ``M`` (MPS compute) in that order, for the lists that contain the pid.
    """

    pid: int
    memory: int | None
    kinds: str


class ProcessUtilization(NamedTuple):
    """One validated row of ``nvmlDeviceGetProcessUtilization``; ratios 0 to 1, Unix seconds.

    About twice a second the driver notes which process ran last, and what it used since the last note. So a
    process that does nothing has a row of 0 after the other, as long as no other process runs (measured on
    H200 and H100).
    """

    pid: int
    time: float
    sm: float
    memory: float
    encoder: float
    decoder: float


class ProcessRow(NamedTuple):
    """What ``/proc/PID/stat`` says in every sample.

    ``start`` is in clock ticks since boot and, with the pid, is the identity of a process. ``state`` is the
    kernel's letter for the thread-group leader. ``program`` is another number once the process has executed
    another program; 0 where that is not readable.
    """

    pid: int
    start: int
    state: str
    ppid: int
    pgrp: int
    session: int
    tty: int
    threads: int
    program: int = 0


class DriverWait(NamedTuple):
    """A thread of a holder that sleeps in the NVIDIA driver and cannot be interrupted (state ``D``)."""

    pid: int
    start: int  # its start time in clock ticks since boot
    thread: int  # the thread's id
    channel: str  # the driver's function in which it sleeps, from ``/proc/PID/task/TID/wchan``
    # for how long it has certainly slept there: the time from the first look to the newest one at which it
    # had not been scheduled in between
    seconds: float


class ThreadTimes(NamedTuple):
    """Which threads of a holder ran between two looks at all of them; CPU times in seconds."""

    pid: int
    start: int  # its start time in clock ticks since boot
    since: float  # monotonic time of the first look, seconds; it is the second one of the span before
    until: float  # the same of the second look: nothing is known of what ran after it
    complete: bool  # whether every thread could be read at both looks; otherwise nothing is known
    main_runs: int = 0  # how often the main thread ran
    main_cpu: float | None = None  # its CPU time, None when not known
    # how often the others ran, without the driver's own, which goes on in an idle program
    other_runs: int = 0
    other_cpu: float | None = None  # their CPU time, None when not known
    longest: float | None = None  # the longest mean CPU time of one run among them
    # the most CPU time a second that one of them took beyond what a helper that does nothing takes: 0.1 ms
    # for each of its runs, or 0.2 ms a second if that is less
    beyond: float | None = None
    changed: int = 0  # how many threads began or ended
    # whether the file that the process runs is a Python interpreter; None when not known
    python: bool | None = None

    @property
    def still(self) -> bool:
        """Whether it is certain that no thread but the driver's ran."""
        return self.complete and not (self.main_runs or self.other_runs or self.changed)


class ManagedMappings(NamedTuple):
    """What a holder maps of ``/dev/nvidia-uvm`` beyond the little that every CUDA program maps."""

    pid: int
    start: int  # its start time in clock ticks since boot
    # the bytes of managed memory that it can have at most, on all devices and on the host together; None when
    # its mappings could not be read
    bound: int | None


class ParentFacts(NamedTuple):
    """The parent of a process at the moment when the process was read.

    ``init`` is True for pid 1 of the parent's own PID namespace (the host's or a container's). ``outside`` is
    True when that namespace is not the child's: the parent put the child into it, as ``docker exec`` does.
    ``signs`` are those of its own environment, which it may have passed to the child; None when not readable.
    ``uid`` and ``user`` are its real user, None when not readable. ``program`` is the name of its program's
    file, which the kernel attests and the program cannot choose; empty when not readable.
    """

    pid: int
    start: int
    comm: str
    command: str
    init: bool
    outside: bool = False
    signs: tuple[str, ...] | None = None
    uid: int | None = None
    user: str | None = None
    program: str = ""


class Owner(NamedTuple):
    """The owner of a process; the most specific one that is known gives ``type`` and ``name``.

    ``type`` is ``slurm``, ``pod``, ``container``, ``unit`` or ``user``: what the kernel attests.
    """

    type: str
    name: str
    namespace: str = ""
    pod: str = ""
    container: str = ""
    slurm_job: str = ""
    unit: str = ""
    notebook: str = ""


class Rank(NamedTuple):
    """Which of ``size`` ranks of a distributed job a process is; ``job`` is the same for all of them."""

    number: int
    size: int
    job: str


class ProcessFacts(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is read once for a process, and again when its parent changes."""

    pid: int  # process id in the namespace of the procfs that was read
    start: int  # start time in clock ticks since boot
    uid: int | None = None  # real user id, None when unreadable
    user: str | None = None  # name of that user; the number as text when it has no name
    comm: str = ""  # the kernel's name of the main thread, at most 15 bytes
    command: str = ""  # the program's own name (script or module for an interpreter), never its arguments
    nspid: tuple[int, ...] = ()  # the pid in each nested PID namespace, outermost first
    # the signals among HUP, INT and QUIT that it ignores, which shows a background job
    ignores: tuple[str, ...] = ()
    # the worker evidence: what in its environment or command says that it is a worker
    signs: tuple[str, ...] = ()
    service_main: bool = False  # it is the main process of a systemd service (``SYSTEMD_EXEC_PID``)
    may_be_service_main: bool = False  # it may be, where systemd does not say so (before version 248)
    cgroup: tuple[str, ...] | None = None  # the lines of ``/proc/PID/cgroup``, None when unreadable
    owner: Owner | None = None  # its owner, None when not even the user is known
    # the GPU frameworks' libraries that it has mapped, None when unreadable
    libraries: tuple[str, ...] | None = None
    # (name, value) of the allow-listed environment variables that control GPU memory
    settings: tuple[tuple[str, str], ...] = ()
    parent: ParentFacts | None = None  # its parent at that moment, None when it had no visible parent
    leader_alive: bool | None = None  # whether the leader of its process group lives, None when not known
    # whether it has a GPU's device file open or maps the driver's libraries; None if not known
    uses_gpu: bool | None = None
    # the files that we could not read (``environ``, ``cmdline``, …): we were not allowed to, the read hung,
    # or the program has overwritten its environment with its title
    denied: tuple[str, ...] = ()
    # which rank of a distributed job it is, by its environment; None if that does not say it
    rank: Rank | None = None

    def __post_init__(self) -> None:
        """Share what is equal: the processes of a container have equal lines and libraries, 0.8 KiB each."""
        for name in ("cgroup", "libraries"):
            if (lines := getattr(self, name)) is not None:
                force_setattr(self, name, _one_for_all(lines))

    @property
    def owner_or_user(self) -> Owner | None:
        """Its resolved owner, otherwise its user as the owner, None when neither is known."""
        return self.owner or (Owner("user", self.user) if self.user else None)


@lru_cache(maxsize=256)
def _one_for_all(lines: tuple[str, ...]) -> tuple[str, ...]:
    return lines


class HiddenHolder(NamedTuple):
    """A process that has a device file open and that NVML does not list.

    ``kind`` is ``cuda`` (it maps the device), ``monitor`` (it only reads NVML), ``inherited`` (a forked child
    whose parent NVML lists) or ``unknown``. ``minors`` are the numbers N of the ``/dev/nvidiaN`` that it
    holds open.
    """

    pid: int
    start: int
    kind: str
    command: str
    user: str | None
    minors: tuple[int, ...]


class Grant(NamedTuple):
    """Devices that a scheduler has reserved for one owner."""

    type: str  # ``pod``, ``slurm`` or ``nomad``
    name: str  # ``NAMESPACE/POD``, the job's number, or ``JOB/TASK/ALLOCATION``
    # the scheduler's own ids: a UUID, or ``nvidiaN`` or ``gpu-N`` for the number of the device file, with the
    # suffix of a replica or a slice
    devices: tuple[str, ...]
    place: str = ""  # the path of the cgroup that its processes share, if they are not known by name
    user: str = ""  # the name of its user, as the scheduler has it; empty when not known
    account: str = ""  # the account that the scheduler charges; empty when not known
    claimed: bool = False  # whether only the owner's own programs say it


class Scheduler(NamedTuple):
    """What one scheduler assigns on this host."""

    name: str  # ``kubelet``, ``slurm`` or ``nomad``
    managed: tuple[str, ...]  # the devices that it manages, assigned or not; ``*`` for all of the host
    grants: tuple[Grant, ...]  # what it has assigned
    complete: bool = True  # False when there may be grants that we were not allowed to see


class PodLabels(NamedTuple):
    """What a pod has of the labels on the allow-list."""

    namespace: str
    pod: str
    # every label of the allow-list with its value; None if the pod does not have this label
    labels: tuple[tuple[str, str | None], ...]


class XidEvent(NamedTuple):
    """One XID error event of a device (``nvmlEventSetWait``), with the Unix time at which we saw it."""

    uuid: str
    xid: int
    time: float


HardwareValue = float | dict[str, float]

ASLEEP = "asleep"
"""The ``error`` of a device that was not asked: it sleeps, or is to fall asleep."""


class DeviceReading(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One device in one sample: a GPU, a MIG instance, or the GPU that MIG instances divide."""

    index: int  # NVML index of the GPU (of the parent, for a MIG instance)
    uuid: str  # its identity
    name: str | None = None  # product name
    pci_bus_id: str | None = None  # of the GPU, lower case, as in sysfs (``0000:0b:00.0``)
    minor: int | None = None  # N of ``/dev/nvidiaN``
    parent: str | None = None  # UUID of the GPU that this MIG instance is a part of
    mig_profile: str | None = None  # e.g. ``1g.18gb``, for an instance
    gpu_instance: int | None = None  # GPU instance id, for an instance
    compute_instance: int | None = None  # compute instance id, for an instance
    # the place of its GPU instance among the GPU's memory slices: the first one and how many, as ``nvidia-smi
    # mig -lgi`` writes it (``4:4``). None where the driver does not tell us
    mig_placement: str | None = None
    # True for a GPU in MIG mode: its instances hold the memory, it has no ledger itself
    divided: bool = False
    # None when the device answered; otherwise why not (``lost``, ``timeout``, ``failed``, ``asleep``)
    error: str | None = None
    duration: float = 0.0  # seconds spent in NVML for this device
    # None when NVML does not report it (a divided GPU). Of unified memory it is the host's: free is what a
    # program could take (``MemAvailable``)
    memory: MemoryReading | None = None
    memory_kind: str | None = None  # ``coherent`` or ``unified`` (:data:`COHERENT`), None for ordinary memory
    # the memory of the NUMA node that a coherent device is, None when it could not be read
    node: NodeMemory | None = None
    # ``none``, ``hmm`` or ``ats``: how the device reaches the memory of programs; None if the driver does not
    # report it
    addressing_mode: str | None = None
    # ``none``, ``passthrough``, ``vgpu``, ``host_vgpu``, ``host_vsga``; None if not known
    virtualization: str | None = None
    # ``off``, ``on`` or ``devtools``: confidential computing; None if not known. If it is ``on``, the
    # counters of ``activity`` are hidden
    confidential: str | None = None
    # what the cgroups of holders may take, as last read; None when nothing limits memory by cgroup
    limits: tuple[CgroupLimit, ...] | None = None
    # what we ourselves may take of it by our cgroup; then NVML shows us no more than that
    partition: int | None = None
    # the holders of memory; None when the query failed, empty when there are none
    processes: tuple[ProcessEntry, ...] | None = None
    mps_listed: bool = True  # whether the driver tells which of them are clients of MPS
    # ``gpu`` and ``memory`` as ratios over the driver's last sampling period; before Hopper also
    # ``gpu_peak``, the highest ``gpu`` of all periods since the previous reading
    utilization: Mapping[str, int | float] | None = None  # a whole number stays one
    # the rows that are new since the previous reading, at most one a process; None when the query failed or
    # is not supported, empty when no process ran since
    process_utilization: tuple[ProcessUtilization, ...] | None = None
    # the means of GPM's counters since the previous reading that had them: ``seconds`` (the time that they
    # cover), the busy shares ``sm``, ``occupancy``, ``integer``, ``tensor``, ``fp64``, ``fp32``, ``fp16``,
    # ``dram``, ``video`` (the busiest engine) and, of an instance, ``graphics`` as ratios, and the bytes a
    # second ``pcie_transmit``, ``pcie_receive``, ``nvlink_transmit`` and ``nvlink_receive``; empty in the
    # first reading, None when the query failed, and before Hopper. ``sm`` is exactly 0 if and only if no
    # kernel ran
    activity: Mapping[str, float] | None = None
    # further readings by the key that :data:`vramledger.metrics.hardware.HARDWARE` declares; a value, or
    # values by label
    hardware: Mapping[str, HardwareValue] = {}
    failed: tuple[str, ...] = ()  # the queries that failed for another reason than "not supported"
    # the driver's words for the first of them, or for the refusal until a reset; None without any
    words: str | None = None
    # whether the driver has refused a query until the GPU is reset; None where not asked
    reset_required: bool | None = None

    def without_data(self, error: str) -> DeviceReading:
        """Return a reading with this device's identity alone: what the device reported before is old."""
        return DeviceReading(
            index=self.index, uuid=self.uuid, name=self.name, pci_bus_id=self.pci_bus_id, minor=self.minor,
            parent=self.parent, mig_profile=self.mig_profile, gpu_instance=self.gpu_instance,
            compute_instance=self.compute_instance, mig_placement=self.mig_placement, divided=self.divided,
            memory_kind=self.memory_kind, addressing_mode=self.addressing_mode,
            virtualization=self.virtualization, error=error, words=self.words if error == "failed" else None,
            reset_required=self.reset_required if error == "failed" else None,
        )  # fmt: skip


class Reading(ReadHolderFacts, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that one sample read; also the facts of :mod:`vramledger.model.holder_facts`."""

    time: float  # Unix time at the start of the sample, seconds
    monotonic: float  # the monotonic clock at the same moment, seconds; spans are measured with it
    duration: float = 0.0  # seconds that the sample took
    # the monotonic time, seconds, of the newest look since the sample before that found the used bytes and
    # the work of all GPUs unchanged; None without one
    unchanged: float | None = None
    boot_id: str = ""  # ``/proc/sys/kernel/random/boot_id``
    boot_time: float = 0.0  # Unix time of boot, seconds (``btime`` of ``/proc/stat``)
    ticks: Annotated[int, msgspec.Meta(gt=0)] = 100  # clock ticks a second, the unit of start times
    # True when we are in the initial PID namespace of the host; None when not known. In WSL2 the host is
    # Windows, so it is False there
    host_pid_namespace: bool | None = None
    # (reason, message) when NVML as a whole could not be used; no devices then
    failure: tuple[str, str] | None = None
    # Unix time at which the exporter reopens released GPUs, None if they are not released
    released_until: float | None = None
    driver_version: str | None = None  # e.g. ``580.159.04``
    cuda_version: str | None = None  # highest CUDA version that the driver supports, e.g. ``13.0``
    # one per device, GPUs in NVML's order, the instances of a GPU after it
    devices: tuple[DeviceReading, ...] = ()
    rows: tuple[ProcessRow, ...] = ()  # one row for each process that NVML lists and /proc shows
    # pids that NVML lists without a /proc entry: ``gone`` (no such process), ``denied`` (it exists, we may
    # not see it) or ``unread`` (reading /proc failed)
    unseen: Mapping[int, str] = {}
    # pids whose owner (container, pod, job) has ended, with the evidence as a sentence
    ended: Mapping[int, str] = {}
    facts: tuple[ProcessFacts, ...] = ()  # for processes seen for the first time or with a new parent
    # whether a user of the driver can be recognised by open device files: we have some
    device_files: bool = False
    # the holders' threads that sleep in the driver, as the newest search found them
    waits: tuple[DriverWait, ...] = ()
    # the mappings of holders on devices with bytes that NVML charges to nobody, as last read
    managed: tuple[ManagedMappings, ...] = ()
    # pid and CPU seconds since the sample before, in 0.1 ms, of each holder that is not alone on its devices;
    # without those that were not there then
    cpu_taken: tuple[tuple[int, float], ...] = ()
    # which threads of holders ran, of the looks that ended since the sample before
    threads: tuple[ThreadTimes, ...] = ()
    # result of the last complete search for hidden holders, None before the first
    hidden: tuple[HiddenHolder, ...] | None = None
    # processes that this search may not look into, None before the first
    hidden_unreadable: int | None = None
    # the schedulers of this host and what they assigned when last read; empty without any
    schedulers: tuple[Scheduler, ...] = ()
    # the monotonic time at which that read began, seconds; None when not known
    schedulers_read: float | None = None
    # the labels of pods that hold memory or have a device reserved, as far as they are known
    pods: tuple[PodLabels, ...] = ()
    events: tuple[XidEvent, ...] = ()  # XID errors since the previous sample
    collectors: Mapping[str, tuple[bool, float]] = {}  # per collector (succeeded, seconds)
    # the connected agents of processes that NVML lists; the exporter adds them to what the sampler read
    agents: tuple[Agent, ...] = ()
    # the state of the agents' socket, None when there is no such socket
    agent_socket: AgentSocket | None = None


_DECODER = msgspec.json.Decoder(Reading)


def encode(reading: Reading) -> bytes:
    """Write a reading as one line of JSON, without the fields that have their default."""
    return write_record(reading) + b"\n"


def decode(line: bytes | str) -> Reading:
    """Read a line of :func:`encode`, checked as a reading. Raises RecordingError if it is not one."""
    try:
        return _DECODER.decode(line)
    except (RefusedError, UnicodeEncodeError, *READ_ERRORS) as error:
        raise RecordingError(f"not a reading ({error}); record it again with 'vramledger capture'") from error


def agent_plain(agent: Agent) -> list[Any]:
    return list(msgspec.to_builtins(agent))
