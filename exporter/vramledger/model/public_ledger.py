"""Declare the documents of ``/api/v1``, which ``show --json`` and ``check --json`` print too.

The served schemas are made from these types. Bytes, ratios and Unix seconds; None means not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, defstruct

from vramledger.model.records import JSON_VERSION
from vramledger.model.snapshot import Grade, State
from vramledger_agent.protocol.frameworks import POOL_FIGURES, REPORTING_FRAMEWORKS
from vramledger_agent.protocol.messages import ALLOCATOR_SETTINGS, CATEGORIES, CONSENTS, OOM_VERDICTS

Natural = Annotated[int, Meta(ge=0)]
Verdict = Literal["clean", "not-clean", "cannot-tell"]
HISTORY_PARTS = (
    # Those that not every device has are last: a remembered step ends before them.
    *("total", "free", "unattributed"),
    *(state.value for state in State),
    *("driver_reserved", "operating_system"),
)

_OWN_FIGURES = {
    name: text
    for framework in REPORTING_FRAMEWORKS.values()
    for name, text in framework.figures.items()
    if name not in POOL_FIGURES
}


def _said(text: str, words: Iterable[str | None] = ()) -> Meta:
    return Meta(description=text, extra_json_schema={"enum": list(words)} if words else None)


def _version(version: int) -> Meta:
    return Meta(extra_json_schema={"const": version})


class Failure(msgspec.Struct):
    """Why there is no data; null while there is data, and before the first sample."""

    reason: Annotated[str, _said("One word.")]
    message: Annotated[str, _said("One sentence.")]


class Node(msgspec.Struct):
    """The NUMA node that the device's memory is, bytes, as the kernel counts it.

    Null where it is none or not readable.
    """

    node: Annotated[Natural, _said("Its number.")]
    total: Annotated[Natural, _said("All that the kernel manages.")]
    free: Annotated[Natural, _said("What nobody uses.")]
    file: Annotated[Natural, _said("Page cache and shared memory.")]
    anonymous: Annotated[Natural, _said("Ordinary memory of programs.")]
    kernel: Annotated[Natural, _said("The kernel's own.")]
    shared: Annotated[
        Natural | None,
        _said(
            "The part of file that is shared memory and tmpfs, which the kernel cannot drop; null "
            "when not known."
        ),
    ]


StateBytes = defstruct("StateBytes", [(state.value, Natural) for state in State])
"""Bytes of the holdings by state."""


class Memory(msgspec.Struct):
    """The ledger, bytes.

    Total = free + driver_reserved + operating_system + the states + unattributed, exactly.
    """

    total: Annotated[Natural, _said("All memory of the device.")]
    free: Annotated[Natural, _said("What a process can still allocate.")]
    driver_reserved: Annotated[
        Natural | None, _said("The driver's own; null where it is not reported separately from used.")
    ]
    operating_system: Annotated[
        Natural | None,
        _said(
            "What the operating system holds itself, on memory that it manages; null on other memory, "
            "and where neither this nor the holders are known."
        ),
    ]
    used: Annotated[Natural, _said("Neither free nor driver_reserved.")]
    used_peak: Annotated[Natural | None, _said("Highest used of the last minute of samples.")]
    wasted: Annotated[
        Natural | None,
        _said(
            "Held without any work: stopped, stuck, zombie, dead; idle or orphaned if that is proven or seen."
        ),
    ]
    perhaps_wasted: Annotated[
        Natural | None,
        _said("Held by idle and orphaned holders of whom it is not known whether they work; not in wasted."),
    ]
    unattributed: Annotated[
        Natural, _said("Used memory that no process holds, neither by NVML's lists nor by other evidence.")
    ]
    uncharged: Annotated[
        Natural,
        _said("Used memory that NVML charges to no process; what is not unattributed is in the states."),
    ]
    overlap: Annotated[Natural, _said("The excess of the sum of the holdings over used.")]
    states: StateBytes  # type: ignore[valid-type]


class Undivided(msgspec.Struct):
    """Memory that NVML charges to nobody and that one or several of some holders have.

    Null when there is none.
    """

    bytes: Annotated[Natural, _said("How many bytes.")]
    pids: Annotated[list[int], _said("The holders that can have them.")]
    state: Annotated[
        State, _said("The state under which the ledger counts them, the mildest of these holders.")
    ]


class LeftBehind(msgspec.Struct):
    """Memory that an ended holder left behind, because another process has a handle of it."""

    pid: Annotated[int, _said("Who had created it.")]
    user: Annotated[str | None, _said("Its user; null when not known.")]
    ended: Annotated[float, _said("Unix time at which its end was seen.")]
    least: Annotated[Natural, _said("Bytes that are certainly still there.")]
    most: Annotated[Natural, _said("Bytes that can still be there.")]
    pids: Annotated[list[int], _said("The holders that can have them.")]


class PublicOwner(msgspec.Struct):
    """Its owner, the most specific one that is known; an empty text means not known."""

    type: Annotated[str, _said("pod, container, slurm, notebook, unit or user")]
    name: Annotated[str, _said("Its name.")]
    namespace: Annotated[str, _said("Kubernetes namespace.")]
    pod: Annotated[str, _said("Pod.")]
    container: Annotated[str, _said("Container.")]
    slurm_job: Annotated[str, _said("Slurm job.")]
    unit: Annotated[str, _said("systemd unit.")]
    notebook: Annotated[str, _said("Notebook.")]


class PublicKvCache(msgspec.Struct):
    """What the holder's own vLLM server says of its KV cache, with --collector.vllm.

    Null when it says nothing.
    """

    usage: Annotated[float | None, _said("Share of its blocks that running requests have.")]
    memory: Annotated[Natural | None, _said("Its bytes, which are part of those of the holding.")]
    tokens: Annotated[Natural | None, _said("How many tokens fit into it.")]


class Uncharged(msgspec.Struct):
    """What it has besides memory, because NVML charges it to nobody.

    Null when it has nothing or when nothing is known.
    """

    least: Annotated[Natural, _said("Bytes that are certainly its own.")]
    most: Annotated[Natural, _said("Bytes that it can have at most.")]
    managed: Annotated[
        Natural,
        _said("Those of least that are managed memory: they give way to an allocation of another program."),
    ]
    grade: Annotated[Grade, _said("How good the evidence is.")]
    why: Annotated[str, _said("The evidence, one sentence.")]


class Growth(msgspec.Struct):
    """How the holding has changed over the last 15 minutes, or since it was first seen.

    Null in its first sample, and without a server.
    """

    bytes: Annotated[int, _said("Negative when it shrank.")]
    seconds: Annotated[float, _said("The seconds over which it changed.")]


class LastOom(msgspec.Struct):
    """The newest failed allocation of the process; null when there was none."""

    time: Annotated[float, _said("Unix time.")]
    framework: Annotated[str, _said("The framework whose allocation failed.")]
    requested: Annotated[int | None, _said("Bytes that it requested; null when not known.")]
    verdict: Annotated[str, _said("The agent's verdict on the cause.", OOM_VERDICTS)]
    on_this_device: Annotated[bool | None, _said("Whether it failed on this device; null when not known.")]


def _known(name: str, text: str) -> tuple[str, Any]:
    return name, Annotated[int | None, _said(f"{text}; null when not known.")]


def _present(name: str, kind: Any, text: str) -> tuple[str, Any, UnsetType]:  # noqa: ANN401 a type
    return name, Annotated[kind | UnsetType, _said(text)], UNSET


Categories = defstruct(
    "Categories",
    [_present(name, int, f"Bytes of live tensors: {name}.") for name in CATEGORIES],
    namespace={"__doc__": "PyTorch's live bytes by their purpose; empty where they were not counted."},
)
Settings = defstruct(
    "Settings",
    [
        _present(name, Annotated[str, Meta(pattern=f"^({form})$")], "As PyTorch names it.")
        for name, form in ALLOCATOR_SETTINGS.items()
    ],
    namespace={"__doc__": "The settings of PyTorch's allocator; one that is not known is absent."},
)
FrameworkPool = defstruct(
    "FrameworkPool",
    [
        ("framework", Annotated[str, _said("Its name.", REPORTING_FRAMEWORKS)]),
        ("title", Annotated[str, _said("The framework's name as its makers write it.")]),
        ("ordinal", Annotated[int | None, _said("Its own number of this device; null when it gave none.")]),
        ("categories", Categories),
        ("settings", Settings),
        _known("pinned", "Host memory that the process has pinned for GPUs"),
        _known("pinned_in_use", "Those of them that the program uses"),
        *(_known(name, text) for name, text in POOL_FIGURES.items()),
        *(_present(name, int, f"{text}.") for name, text in _OWN_FIGURES.items()),
    ],
)
"""What a framework reports of its memory on a device."""


class PublicAgent(msgspec.Struct):
    """What the holder's own agent reports of it on this device; null without an agent."""

    up: Annotated[bool, _said("Whether it reports and nothing in it failed in the last minute.")]
    problem: Annotated[
        str | None, _said("missing, silent, refused, degraded or foreign; null when it is up.")
    ]
    why: Annotated[str | None, _said("The same as a sentence.")]
    received: Annotated[float | None, _said("Unix time of its newest report; null when none ever came.")]
    version: Annotated[str | None, _said("Version of the agent; null when not reported.")]
    consents: Annotated[
        list[Annotated[str, _said("The name of a request.", CONSENTS)]],
        _said("What root and its user may request from it."),
    ]
    overhead: Annotated[
        int | None,
        _said(
            "Bytes of the holding outside the frameworks' pools: context, libraries, other code; null "
            "when not known."
        ),
    ]
    needed_peak: Annotated[
        int | None,
        _said(
            "The most bytes that the process has needed: the sum of its frameworks' peaks in use, "
            "plus the overhead; null when not known."
        ),
    ]
    frameworks: Annotated[
        list[FrameworkPool],  # type: ignore[valid-type]
        _said(
            "What each framework reports of its memory on this device; a figure that it does not "
            "report is absent."
        ),
    ]
    last_oom: LastOom | None


class PublicHolding(msgspec.Struct):
    """The bytes that one process has on the device."""

    pid: Annotated[int, _said("As NVML lists it.")]
    user: Annotated[str | None, _said("Its user.")]
    owner: PublicOwner | None
    pod_labels: Annotated[
        dict[str, str] | None,
        _said(
            "Those labels of its pod that --pods.labels names, by their names in Kubernetes; null "
            "when they are not known."
        ),
    ]
    command: Annotated[str | None, _said("Its program; never its arguments.")]
    framework: Annotated[str | None, _said("The framework that holds the memory; unknown when not known.")]
    policy: Annotated[str | None, _said("How the framework takes memory.")]
    policy_source: Annotated[str | None, _said("environ, pattern, default or none.")]
    policy_why: Annotated[str | None, _said("The evidence for both, one sentence.")]
    started: Annotated[float | None, _said("Unix time of its start.")]
    memory: Annotated[Natural | None, _said("Bytes; null when NVML does not report them.")]
    kv_cache: PublicKvCache | None
    peak: Annotated[Natural | None, _said("Highest memory since the holding was first seen.")]
    held: Annotated[
        Natural | None,
        _said(
            "All bytes that are certainly its own: memory and what is certain of uncharged; null when "
            "NVML does not report memory."
        ),
    ]
    uncharged: Uncharged | None
    state: Annotated[State, _said("Why it exists now.")]
    grade: Annotated[Grade, _said("How good the evidence for the state is.")]
    since: Annotated[float, _said("Unix time at which the state began.")]
    why: Annotated[str, _said("The evidence, one sentence.")]
    sm_utilization: Annotated[float | None, _said("Ratio; null when the driver gave no sample.")]
    last_active: Annotated[
        float | None, _said("Unix time of the last sign of work; null when none was seen.")
    ]
    unreserved: Annotated[
        bool | None, _said("Whether it holds memory without a reservation; null when not known.")
    ]
    limited_by: Annotated[
        list[str] | None,
        _said(
            "The cgroups of the process, with those above them, that have a limit on any device; null "
            "when its cgroup is not known."
        ),
    ]
    quiet_since: Annotated[
        float | None,
        _said(
            "Unix time since which there was no sign of work; null when the newest sample gives no "
            "evidence either way."
        ),
    ]
    working: Annotated[
        bool | None,
        _said(
            "Whether it worked within the idle threshold; false only if that is proven or seen, null "
            "when not known."
        ),
    ]
    busy_without_work_since: Annotated[
        float | None,
        _said(
            "Unix time since which it keeps the device busy, which computes and moves nothing; null "
            "when that is not so or not known."
        ),
    ]
    wasted: Annotated[
        bool | None,
        _said(
            "Whether its bytes are held without any work; null when that is not known of an idle or orphaned "
            "holder."
        ),
    ]
    growth: Growth | None
    what_to_do: Annotated[str | None, _said("What to do about it; null when nothing needs to be done.")]
    agent: PublicAgent | None


class PublicReservation(msgspec.Struct):
    """An owner for whom a scheduler has reserved the device."""

    owner_type: Annotated[str, _said("pod, slurm and so on.")]
    owner: Annotated[str, _said("Its name.")]
    scheduler: Annotated[str, _said("The scheduler that reserved it.")]
    held: Annotated[bool | None, _said("Whether it holds memory; null when not known.")]


class PublicLimit(msgspec.Struct):
    """What an owner may take of the device by its cgroups, and what is taken."""

    type: Annotated[str, _said("Type of the owner.")]
    name: Annotated[str, _said("Name of the owner.")]
    cgroup: Annotated[str | None, _said("The cgroup whose limit it reaches first; null without a limit.")]
    maximum: Annotated[Natural | None, _said("That limit, bytes.")]
    used: Annotated[Natural | None, _said("What that cgroup has, with other owners in it.")]
    minimum: Annotated[
        Natural | None, _said("Bytes that are guaranteed to its own cgroups; null when not known.")
    ]
    charged: Annotated[
        Natural | None, _said("What the kernel charges to its own cgroups; null where others are in them.")
    ]


class PublicCgroupLimit(msgspec.Struct):
    """The limit of a cgroup that holds memory on any device, or of one above it."""

    cgroup: Annotated[str, _said("Its path.")]
    maximum: Annotated[Natural, _said("Bytes beyond which its allocations fail.")]
    used: Annotated[Natural | None, _said("What it has, with all cgroups below it; null when not known.")]


class Hidden(msgspec.Struct):
    """A process with the device open that NVML does not list."""

    pid: Annotated[int, _said("Its pid.")]
    kind: Annotated[str, _said("cuda, monitor, inherited or unknown.")]
    command: Annotated[str, _said("Its program.")]
    user: Annotated[str | None, _said("Its user.")]
    about: Annotated[str, _said("What that means, one sentence.")]


class PublicDevice(msgspec.Struct):
    """A GPU, or a MIG instance."""

    gpu: Annotated[int, _said("Index.")]
    uuid: Annotated[str, _said("Identity.")]
    name: Annotated[str | None, _said("Product.")]
    mig_profile: Annotated[str | None, _said("Profile of a MIG instance.")]
    mig_placement: Annotated[
        str | None,
        _said(
            "Place of a MIG instance: the first memory slice of its GPU instance and how many, as "
            "4:4. Null when not known."
        ),
    ]
    parent_uuid: Annotated[str | None, _said("The GPU of a MIG instance.")]
    memory_counted_under: Annotated[
        str | None,
        _said(
            "Of a device that shares its memory (compute instances of a GPU instance, GPUs on the "
            "host's memory): the device under which it is counted."
        ),
    ]
    up: Annotated[bool, _said("Whether it answered in this sample.")]
    error: Annotated[str | None, _said("Why it did not answer.")]
    memory_kind: Annotated[
        str | None,
        _said(
            "Whose memory it has: its own; its own, managed by the operating system; the host's. Null "
            "when not known.",
            ("dedicated", "coherent", "unified", None),
        ),
    ]
    addressing_mode: Annotated[
        str | None,
        _said("How it reaches the memory of programs; null when not reported.", ("none", "hmm", "ats", None)),
    ]
    virtualization: Annotated[
        str | None,
        _said(
            "How it is shared with virtual machines; null when not known.",
            ("none", "passthrough", "vgpu", "host_vgpu", "host_vsga", None),
        ),
    ]
    node: Node | None
    memory: Memory | None
    utilization: Annotated[float | None, _said("Share of time in which it worked.")]
    activity: Annotated[
        dict[str, float] | None,
        _said(
            "The means of the GPU's own counters since the reading before: busy shares such as sm, "
            "and bytes a second such as pcie_transmit. Empty at first; null where the GPU has none "
            "(before Hopper)."
        ),
    ]
    divided: Annotated[bool, _said("Whether MIG divides it, so that its instances hold the memory.")]
    blind: Annotated[bool, _said("Whether its holders are invisible from our PID namespace.")]
    ghost: Annotated[
        bool | None,
        _said(
            "Whether it has been busy for 3 minutes at idle power without any holder; null when not known."
        ),
    ]
    ghost_since: Annotated[float | None, _said("Unix time since which it is a ghost; null if it is not.")]
    about_unattributed: Annotated[
        str | None, _said("What is known about its unattributed memory; null when there is none.")
    ]
    about_operating_system: Annotated[
        str | None,
        _said("What is known about the memory that the operating system holds; null when it holds none."),
    ]
    undivided: Undivided | None
    left_behind: Annotated[
        list[LeftBehind],
        _said("Memory that ended holders left behind, because another process has a handle of it."),
    ]
    holdings: Annotated[list[PublicHolding], _said("Largest first.")]
    reservations: Annotated[
        list[PublicReservation] | None,
        _said("The owners for whom schedulers have reserved the device; null without a scheduler."),
    ]
    limits: Annotated[
        list[PublicLimit], _said("What owners may take of it by their cgroups, and what is taken.")
    ]
    cgroup_limits: Annotated[
        list[PublicCgroupLimit] | None,
        _said(
            "The limits of the cgroups that hold memory on any device, and of those above them; null "
            "when not known, or when nothing limits memory by cgroup."
        ),
    ]
    cgroup_limits_failed: Annotated[
        bool, _said("Whether these limits could not be read, or not all of them: there may be others.")
    ]
    partition: Annotated[
        Natural | None,
        _said(
            "What the exporter itself may take of it by its own cgroup: then NVML shows it no more "
            "than that; null without such a limit."
        ),
    ]
    schedulers: Annotated[list[str], _said("The schedulers that assign this device.")]
    owners: Annotated[int | None, _said("The number of owners that hold memory; null when not known.")]
    hidden: Annotated[
        list[Hidden] | None,
        _said("Processes with the device open that NVML does not list; null when not known."),
    ]


class PublicLedger(msgspec.Struct):
    """GET /api/v1/ledger: the newest sample. Bytes, ratios, Unix seconds; null means not known.

    New members may come in version 2.
    """

    version: Annotated[int, _version(JSON_VERSION)]
    up: Annotated[bool, _said("Whether the driver answered; devices is empty when it did not.")]
    failure: Failure | None
    released_until: Annotated[
        float | None,
        _said("Unix time until which the GPUs are released ('vramledger release'); null when they are not."),
    ]
    time: Annotated[float | None, _said("Unix time of the sample.")]
    watched_since: Annotated[
        float | None,
        _said("Unix time of the first sample; nothing is known of what was before. Null before it."),
    ]
    source: Annotated[str, _said("replay: a recording, not this host.", ("nvml", "replay"))]
    recording: Annotated[str | None, _said("Its name.")]
    host_pid_namespace: Annotated[bool | None, _said("Whether we see the host's processes.")]
    driver_version: Annotated[str | None, _said("Version of the driver.")]
    devices: Annotated[list[PublicDevice], _said("The GPUs and MIG instances.")]


_Column = list[Natural | None]
HistoryMemory = defstruct("HistoryMemory", [(part, _Column) for part in HISTORY_PARTS])


class DeviceHistory(msgspec.Struct):
    """A device with a ledger in that time."""

    gpu: Annotated[int, _said("Index.")]
    uuid: Annotated[str, _said("Identity.")]
    memory: HistoryMemory  # type: ignore[valid-type]


class History(msgspec.Struct):
    """GET /api/v1/history: the last 15 minutes of every device's ledger.

    Each step is the sample with the most memory in use in its time; null where no sample succeeded.
    """

    version: Annotated[int, _version(JSON_VERSION)]
    step: Annotated[float, _said("Seconds from one step to the next.")]
    times: Annotated[
        list[float], Meta(max_length=181, description="Unix time at which each step begins, oldest first.")
    ]
    devices: list[DeviceHistory]


class LeftoverReason(msgspec.Struct):
    """What was found on a device."""

    kind: Annotated[str, _said("A state of the ledger, or another word for what was found.")]
    counts: Annotated[bool, _said("Because of it the device is not clean.")]
    pid: int | None
    start: Annotated[int | None, _said("Start of the process, ticks since boot.")]
    memory: Annotated[int | None, _said("Bytes.")]
    said: str


class DeviceLeftovers(msgspec.Struct):
    """What is left over on a device."""

    gpu: str
    uuid: str
    verdict: Verdict
    searched_hidden: bool
    reasons: list[LeftoverReason]


class Leftovers(msgspec.Struct):
    """GET /api/v1/leftovers: what ended work has left on the GPUs of a host.

    Live holders, and what a running pod or job may still have, are remarks that do not count.
    """

    version: Annotated[int, _version(1)]
    verdict: Annotated[Verdict, _said("The worst that is certain, of all devices.")]
    exit_status: Annotated[int, _said("As vramledger check exits.")]
    watched_since: Annotated[float | None, _said("Unix time since which the holders were watched.")]
    time: Annotated[float | None, _said("Unix time of the newest sample.")]
    devices: list[DeviceLeftovers]


DOCUMENTS = {"ledger": PublicLedger, "history": History, "leftovers": Leftovers}


def schema(name: str) -> bytes:
    """Return the JSON Schema (2020-12) of a document."""
    found = msgspec.json.schema(DOCUMENTS[name])
    return msgspec.json.encode(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": name, **found}
    )
