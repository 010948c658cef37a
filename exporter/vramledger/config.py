"""Hold the settings of a command: checked once, and never changed afterwards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from vramledger.errors import UsageError
from vramledger.model.holder_facts import HOLDER_FACTS
from vramledger_agent.protocol.messages import DEFAULT_SOCKET

DEFAULT_PORT = 10839

CALM_INTERVALS, CALM_INTERVAL_MAX = 5, 5.0
"""Intervals between samples of calm GPUs, and their maximum in seconds: other changes are seen that late."""

IDLE_AFTER = 600.0
"""Seconds: longer than most evaluations, checkpoints and compilations that leave a GPU unused."""

AGENT_SOCKET = Path(DEFAULT_SOCKET)
CONTROL_SOCKET = Path("/run/vramledger/control.sock")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has the token of its service account."""

CONTROL_VARIABLE = "VRAMLEDGER_CONTROL_SOCKET"
"""Where commands find the exporter, for scripts that call several of them."""

OWNERS_MAX = 25
"""Owners with series of their own: a host of 8 GPUs and 64 holders stays below 1,500 series."""

COLLECTORS: Mapping[str, tuple[bool, str]] = {
    "ledger": (True, "the ledger of every device: bytes by state, holders, peaks"),
    "process": (True, "one holding for each process: bytes, peak, state, utilisation, identity"),
    "owner": (True, "who owns the memory: bytes, byte-seconds, what was freed"),
    "agent": (True, "what agents in the holders' programs report, and the socket that they report to"),
    "hardware": (True, "utilisation, temperature, power, clocks, throttling, ECC, row remapping"),
    "energy": (True, "energy and memory temperature (3 ms a device, read every 10 s)"),
    "xid": (True, "XID errors, from driver events"),
    "hidden": (True, "processes with a device open that NVML does not list (searched at a slow pace)"),
    "reservations": (
        True,
        "the owner for whom a kubelet, Slurm or Nomad has reserved a device (no series without one)",
    ),
    "pods": (False, "chosen labels of pods that hold GPU memory or have a GPU reserved (see --pods.labels)"),
    "pcie": (False, "PCIe throughput (before Hopper 20 ms a device and direction, read every 10 s)"),
    "threads": (
        True,
        "which threads of the holders run: who did not run has launched nothing (at a slow pace)",
    ),
    **{fact.collector: (fact.on, fact.help) for fact in HOLDER_FACTS},
    "exporter": (True, "the exporter's own process and sampler"),
}
"""For each collector that can be turned off: whether it is on by default, and what it gives."""

ALWAYS_COLLECTED: Mapping[str, str] = {
    "facts": "what is read once of a holder: user, program, environment, libraries, parent",
    "managed": "how much managed memory holders map",
    "cpu": "CPU time of holders that share a device",
    "limits": "what the cgroups of holders may take of a device",
    "waits": "threads of holders that sleep in the driver",
}
"""The collectors without a flag: verdicts need what they give. Their health is shown all the same."""


class ListenAddress(Struct, frozen=True):
    """Where the exporter listens: an empty host means every address, IPv4 and IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class PodConfig(Struct, frozen=True):
    """Which labels of pods are read, and from where."""

    labels: tuple[str, ...]  # the allow-list, sorted
    node: str  # the name of this node in the cluster
    # address of the kubelet, which is asked first; None to ask only the API server
    kubelet: ListenAddress | None = None
    credentials: Path = SERVICE_ACCOUNT  # folder with ``token`` and the authority ``ca.crt``


class SamplingConfig(Struct, frozen=True):
    """What the sampler needs to know; durations in seconds."""

    interval: float = 1.0  # from the start of one sample to the start of the next
    # the same at most, while looks at each GPU, one an interval, show that nothing changes
    calm_interval: float = 0.0
    timeout: float = 1.0  # how long a sample waits for a device
    procfs: Path = Path("/proc")  # root of the proc file system
    rootfs: Path = Path("/")  # root of the host's file system
    # the names in :data:`COLLECTORS` that are on
    collectors: frozenset[str] = frozenset(name for name, (on, _) in COLLECTORS.items() if on)
    pods: PodConfig | None = None  # labels of pods; None to read none, and then nobody is asked for them


class StorageConfig(Struct, frozen=True):
    """Where the past is stored, and how much of it."""

    path: Path  # the directory
    retention: float = 7 * 86400.0  # seconds after which it is removed
    size: int = 512 * 2**20  # bytes that it may have


class Config(Struct, frozen=True):
    """All settings of ``vramledger serve``."""

    listen: tuple[ListenAddress, ...] = (ListenAddress("", DEFAULT_PORT),)  # addresses to listen on
    telemetry_path: str = "/metrics"  # where the metrics are
    max_requests: int = 40  # scrapes served at the same time before 503; 0 means no limit
    web_config: Path | None = None  # file with TLS, users and rates; None for plain HTTP without a password
    systemd_socket: bool = False  # listen on the sockets that systemd passes on, instead of ``listen``
    control_socket: Path | None = None  # of ``vramledger release``; None for the usual path, if we may use it
    page: bool = True  # whether the live page is served
    # whether only root and the exporter's user see names of users and programs, and paths
    hide_names: bool = False
    web_user: str | None = None  # the user that root's exporter becomes; None for the usual one
    source: str = "nvml"  # ``nvml``, ``auto``, or ``replay:FILE``
    replay_speed: float = 1.0  # how many recorded seconds pass in a second
    # seconds without a sign of work after which a holding is idle; None for what a recording says, or
    # :data:`IDLE_AFTER`
    idle_after: float | None = None
    processes_max: int = 100  # holdings of a device shown one by one; 0 means all
    owners_max: int = OWNERS_MAX  # owners of a device with series of their own; 0 means all
    # where agents connect; no socket without the collector ``agent``, or in a replay
    agent_socket: Path = AGENT_SOCKET
    storage: StorageConfig | None = None  # where the past is stored; None to store nothing
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # see :class:`SamplingConfig`


_HIGHEST_PORT = 65535
_POD_LABEL = re.compile(
    r"(?:(?=[^/]{1,253}/)[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9](?:[-\w.]{0,61}[A-Za-z0-9])?", re.ASCII
)
_POD_LABELS_MAX = 20
"""Each label lengthens the series of every pod."""


def parse_pod_labels(text: str) -> tuple[str, ...]:
    """Read label names (``team,app.kubernetes.io/name``). Raises UsageError if none, too many or unusable."""
    names = tuple(sorted({name.strip() for name in text.split(",")}))
    for name in names:
        if not _POD_LABEL.fullmatch(name):
            message = (
                f"{name[:80]!r} is not the name of a label; write for example team,app.kubernetes.io/name"
            )
            raise UsageError(message)
    if len(names) > _POD_LABELS_MAX:
        message = f"{len(names)} labels are too many; name at most {_POD_LABELS_MAX}"
        raise UsageError(message)
    return names


_KUBELET_PORT = 10250


def parse_kubelet_address(text: str) -> ListenAddress:
    """Read ``HOST``, ``HOST:PORT``, ``[IPv6]:PORT`` or bare IPv6. Raises UsageError if it is none."""
    alone = text.count(":") > 1 and not text.startswith("[")
    if alone or ":" not in text or text.endswith("]"):
        text = f"{f'[{text}]' if alone else text}:{_KUBELET_PORT}"
    found = parse_listen_address(text)
    if not re.fullmatch(r"[\w.:%-]+", found.host, re.ASCII) or not found.port:
        message = f"{text!r} is not the address of a kubelet; write for example 10.0.0.7 or [fd00::7]:10250"
        raise UsageError(message)
    return found


def parse_listen_address(text: str) -> ListenAddress:
    """Read ``:PORT``, ``HOST:PORT`` or ``[IPv6]:PORT``; 0 lets the system choose. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not port.isascii() or not port.isdigit() or int(port) > _HIGHEST_PORT:
        message = (
            f"{text!r} is not a listen address; write for example :{DEFAULT_PORT}, 127.0.0.1:{DEFAULT_PORT} "
            f"or [::1]:{DEFAULT_PORT}"
        )
        raise UsageError(message)
    return ListenAddress(host, int(port))
