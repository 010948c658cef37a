"""A made-up node with GPUs and holders, as the series that its exporter would give Prometheus.

Minutes count from the start of the test, which promtool puts at Unix time 0; what began before is negative.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from vramledger.agent_protocol.frameworks import FRAMEWORKS_BY_NAME
from vramledger.metrics.contract import FAMILIES

GIB = 2**30
STEP = 15
"""Seconds between two scrapes."""

Values = float | Callable[[float], float | None] | None
"""A value, or one for each minute; None where the series has no sample."""


def value_at(values: Values, minute: float) -> float | None:
    """Return the value at a minute."""
    return values(minute) if callable(values) else values


def changing_at(minute: float, before: float | None, after: float | None) -> Callable[[float], float | None]:
    """Return values that change at a minute."""
    return lambda now: before if now < minute else after


@dataclass(frozen=True)
class Holder:
    """What one process holds on one device, in GiB, and everything that the exporter says about it.

    Attributes:
        state: name of the state, or one for each minute.
        since: minute since when; for a state that changes, one for each minute.
        sm: SM utilisation, None for no sample.
        last_active: minute of the last sign of work, None for none.
        start: minute at which the process started.
        agent: values of each family of its agent, by name without the prefix; what follows is added.
    """

    pid: int
    gib: Values
    state: str | Callable[[float], str] = "active"
    since: Values = -600
    gpu: int = 0
    sm: Values = 0.5
    last_active: Values = None
    start: Values = -600
    user: str = "ann"
    command: str = "train.py"
    framework: str = "torch"
    policy: str = "caching"
    owner_type: str = "user"
    owner: str = "ann"
    notebook: str = ""
    agent: Mapping[str, Values] = field(default_factory=dict)
    agent_up: Values = None

    def __post_init__(self) -> None:
        """Take an agent for granted where one reports."""
        if self.agent and self.agent_up is None:
            object.__setattr__(self, "agent_up", 1)


@dataclass(frozen=True)
class Node:
    """A host with GPUs.

    Attributes:
        total: GiB of each device.
        missing: minutes at which the exporter does not answer.
        extra: further series, or other values for those that are here, by what stands in a rule file's test.
        driver_up: values of vramledger_up.
    """

    holders: Collection[Holder] = ()
    gpus: int = 1
    total: float = 100
    unattributed: Values = 0
    unknown: Values = 0
    missing: Callable[[float], bool] = lambda _: False
    extra: Mapping[str, Values] = field(default_factory=dict)
    driver_up: Values = 1
    instance: str = "gpu-1:10839"

    def series(self, minutes: float) -> list[dict[str, str]]:
        """Return the node's series over so many minutes as promtool takes them."""
        values_by_series: dict[str, Values] = {}
        instance = f'job="vramledger",instance="{self.instance}"'
        values_by_series |= {
            f"vramledger_up{{{instance}}}": self.driver_up,
            f"vramledger_sample_timestamp_seconds{{{instance}}}": lambda minute: minute * 60,
            f"vramledger_host_pid_namespace{{{instance}}}": 1,
            f'vramledger_collector_success{{{instance},collector="ledger"}}': 1,
        }
        for gpu in range(self.gpus):
            values_by_series |= self._device(gpu, f'{instance},gpu="{gpu}",uuid="{uuid(gpu)}"')
        for holder in self.holders:
            values_by_series |= self._holder(holder, instance)
        values_by_series |= {name.replace("NODE", instance): values for name, values in self.extra.items()}
        up: dict[str, Values] = {f"up{{{instance}}}": lambda minute: 0 if self.missing(minute) else 1}
        return [
            {"series": name, "values": self._values(values, minutes, always=name in up)}
            for name, values in (up | values_by_series).items()
        ]

    def _device(self, gpu: int, labels: str) -> dict[str, Values]:
        held = [holder for holder in self.holders if holder.gpu == gpu]

        def of_state(state: str) -> Values:
            def gib(minute: float) -> float:
                return GIB * sum(
                    value_at(holder.gib, minute) or 0 for holder in held if _state(holder, minute) == state
                )

            return gib

        def free(minute: float) -> float:
            taken = sum(value_at(holder.gib, minute) or 0 for holder in held)
            return GIB * (
                self.total
                - taken
                - (value_at(self.unattributed, minute) or 0)
                - (value_at(self.unknown, minute) or 0)
            )

        states = ("active", "idle", "stopped", "orphaned", "zombie", "dead")
        ledger: dict[str, Values] = {state: of_state(state) for state in states}
        ledger |= {
            "free": free,
            "unattributed": lambda minute: GIB * (value_at(self.unattributed, minute) or 0),
            "unknown": lambda minute: GIB * (value_at(self.unknown, minute) or 0),
        }
        return {
            f"vramledger_device_up{{{labels}}}": 1,
            f"vramledger_device_memory_total_bytes{{{labels}}}": GIB * self.total,
            f"vramledger_device_hidden_holders{{{labels}}}": 0,
            **{
                f'vramledger_device_memory_bytes{{{labels},state="{s}"}}': values
                for s, values in ledger.items()
            },
        }

    def _holder(self, holder: Holder, instance: str) -> dict[str, Values]:
        device = f'{instance},gpu="{holder.gpu}",uuid="{uuid(holder.gpu)}"'
        labels = f'{device},pid="{holder.pid}"'
        about = ",".join(
            f'{name}="{getattr(holder, name)}"'
            for name in ("user", "command", "framework", "policy", "owner_type", "owner", "notebook")
        )

        def there(values: Values, scale: float = 1) -> Values:
            def value(minute: float) -> float | None:
                found = value_at(values, minute)
                return None if found is None or value_at(holder.gib, minute) is None else found * scale

            return value

        process = f'{instance},pid="{holder.pid}"'
        empty = 'namespace="",pod="",container="",slurm_job="",unit=""'
        values_by_series: dict[str, Values] = {
            f"vramledger_process_memory_bytes{{{labels}}}": there(holder.gib, GIB),
            f"vramledger_process_sm_utilization_ratio{{{labels}}}": there(holder.sm),
            f"vramledger_process_last_active_timestamp_seconds{{{labels}}}": there(holder.last_active, 60),
            f"vramledger_process_start_time_seconds{{{process}}}": there(holder.start, 60),
            f"vramledger_process_info{{{process},{about},{empty}}}": there(1),
            f"vramledger_agent_up{{{process}}}": there(holder.agent_up),
        }
        for state in ("active", "idle", "stopped", "orphaned", "zombie", "dead"):

            def since(minute: float, state: str = state) -> float | None:
                return value_at(holder.since, minute) if _state(holder, minute) == state else None

            values_by_series[
                f'vramledger_process_state_since_timestamp_seconds{{{labels},state="{state}"}}'
            ] = there(since, 60)
        owned = f'{device},owner_type="{holder.owner_type}",owner="{holder.owner}",state="active"'
        values_by_series[f"vramledger_owner_memory_bytes{{{owned}}}"] = there(holder.gib, GIB)
        for name, values in _with_general(holder.agent).items():
            family = FAMILIES[f"vramledger_{name}"]
            more = f',framework="{holder.framework}"' if "framework" in family.labels else ""
            values_by_series[f"{family.name}{{{labels}{more}}}"] = there(
                values, GIB if name.endswith("_bytes") else 1
            )
        return values_by_series

    def _values(self, values: Values, minutes: float, *, always: bool) -> str:
        written = []
        before = False
        for step in range(int(minutes * 60 / STEP) + 1):
            minute = step * STEP / 60
            value = None if self.missing(minute) and not always else value_at(values, minute)
            written.append(f"{value:.17g}" if value is not None else "stale" if before else "_")
            before = value is not None
        return " ".join(written)


def uuid(gpu: int) -> str:
    """Return the UUID of a device of the made-up node."""
    return f"GPU-0000000{gpu}-0000-4000-8000-000000000000"


def _with_general(agent: Mapping[str, Values]) -> dict[str, Values]:
    """Return the values of an agent's families with the general ones that torch's own are served as, too."""
    general = FRAMEWORKS_BY_NAME["torch"].general.items()
    torch = {f"framework_{name}_bytes": agent.get(f"torch_{figure}_bytes") for name, figure in general}
    return {**{name: values for name, values in torch.items() if values is not None}, **agent}


def _state(holder: Holder, minute: float) -> str:
    return holder.state(minute) if callable(holder.state) else holder.state
