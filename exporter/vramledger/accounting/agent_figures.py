"""What agents' reports say about the holders of a sample: joined by identity, device by device.

An agent speaks only for the process that the kernel attested, on devices where the driver lists that
process, and only while its user is the one that /proc shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from vramledger.accounting.ordinals import translate
from vramledger.model.agent_report import (
    COUNTS,
    MOST_PROVIDERS,
    Agent,
    AgentReport,
    DeviceReport,
    FrameworkReport,
    GarbageReport,
)
from vramledger.model.policy import Policy
from vramledger.model.reading import ProcessFacts, Reading
from vramledger.model.snapshot import AgentSnapshot, Holding, Pool

MISSING_AFTER = 30.0
"""Seconds of life after which a holder that was started with an agent should have been heard of."""

TROUBLED = 60.0
"""Seconds for which an agent counts as degraded after a failure of one of its parts."""

NAMES = {"torch": "pytorch"}
"""An agent's name of a framework to that of :mod:`vramledger.accounting.policies`."""

_POLICIES = {"async": "cuda_malloc_async"}

ASKED_FOR = "VRAMLEDGER_AGENT"
"""The variable with which a program is started that shall have an agent."""

_ABLE = frozenset({"libtorch_cuda", "libtensorflow", "xla_cuda_plugin", "librmm", "cupy"})
"""Libraries of which an agent can tell; a program with none of them has nothing to report."""

Identity = tuple[int, int]
Counter = tuple[str, ...]


@dataclass(slots=True)
class _Memory:
    """What is remembered of one process' agent.

    ``counts`` hold, for each counter, its newest value as told and what is published: a counter that begins
    anew in the process (an agent started again, statistics reset) goes on from where it was. ``versions`` of
    agent and Python are the first that it told: they are labels, and no program may make a series a report.
    """

    counts: dict[Counter, tuple[int, int]] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    allocations: dict[tuple[str, str], int] = field(default_factory=dict)
    failed: float | None = None
    versions: tuple[str | None, str | None] | None = None

    def steady(self, report: AgentReport) -> AgentReport:
        """Return a report with the versions that were told first."""
        told = report.agent, report.python
        if self.versions is None:
            self.versions = told
        if self.versions == told:
            return report
        return replace(report, agent=self.versions[0], python=self.versions[1])

    def fail(self, told: Mapping[str, int]) -> bool:
        """Take in failures by provider, of so many providers as one report may name; tell of new ones."""
        before = sum(self.errors.values())
        for name, count in told.items():
            if name in self.errors or len(self.errors) < MOST_PROVIDERS:
                self.errors[name] = self.count(("error", name), count)
        return sum(self.errors.values()) > before

    def count(self, name: Counter, told: int) -> int:
        """Take in a counter; return it as one that never falls."""
        before, total = self.counts.get(name, (0, 0))
        total += told - before if told >= before else told
        self.counts[name] = (told, total)
        return total


class AgentJoiner:
    """Join the reports of each sample to its holders."""

    def __init__(self) -> None:
        """Start with nothing remembered."""
        self._memories: dict[Identity, _Memory] = {}
        self._working: frozenset[tuple[str, int]] = frozenset()
        self._held: dict[int, dict[str, int | None]] = {}
        self.agents: dict[int, AgentSnapshot] = {}

    def worked(self, uuid: str, pid: int) -> bool:
        """Tell whether a process has allocated on a device since its previous report."""
        return (uuid, pid) in self._working

    def take(self, reading: Reading, facts: Mapping[int, ProcessFacts], started: Mapping[int, float]) -> None:
        """Take in the agents of a sample.

        Args:
            reading: the sample.
            facts: of the processes that it has rows of, by pid.
            started: their start in Unix time.
        """
        starts = {row.pid: row.start for row in reading.rows}
        self._held = _holdings(reading) if reading.agents else {}
        spoken: dict[int, AgentSnapshot] = {}
        working: set[tuple[str, int]] = set()
        for agent in reading.agents:
            if starts.get(agent.pid) == agent.start:  # else NVML's pid is another process'
                spoken[agent.pid] = self._judge(agent, reading, facts.get(agent.pid), working)
        if reading.agent_socket is not None and reading.agent_socket.listening:
            for pid, each in facts.items():
                late = reading.time - started[pid] > MISSING_AFTER
                able = not _ABLE.isdisjoint(each.libraries or ())
                if pid not in spoken and late and able and dict(each.settings).get(ASKED_FOR) == "1":
                    spoken[pid] = AgentSnapshot(
                        up=False, problem="missing", why=f"{ASKED_FOR}=1 and never heard of"
                    )
        self.agents, self._working = spoken, frozenset(working)
        alive = set(starts.items())
        for identity in [each for each in self._memories if each not in alive]:
            del self._memories[identity]

    def policy(self, pid: int, outside: Policy) -> Policy | None:
        """Return what the agent says about a framework's policy, None when it leaves it to the outside.

        A server that is built on PyTorch and manages the pool itself tells more than PyTorch does.
        """
        agent = self.agents.get(pid)
        if agent is None or agent.report is None:
            return None
        told = [each for each in agent.report.frameworks if each.policy is not None]
        if not told or outside.framework in ("vllm", "sglang", "triton"):
            return None
        largest = max(told, key=lambda each: sum(device.least for device in each.devices))
        policy = str(largest.policy)
        name = NAMES.get(largest.framework, largest.framework)
        with_ = f" with allocator {largest.allocator}" if largest.allocator else ""
        return Policy(name, _POLICIES.get(policy, policy), "agent", f"its agent says so{with_}")

    def _judge(
        self, agent: Agent, reading: Reading, facts: ProcessFacts | None, working: set[tuple[str, int]]
    ) -> AgentSnapshot:
        report = agent.report
        if facts is not None and facts.uid is not None and facts.uid != agent.uid:
            why = f"it connected as uid {agent.uid}, and the process is of uid {facts.uid}"
            return AgentSnapshot(up=False, problem="foreign", why=why)
        if agent.problem or report is None:
            refused = agent.problem == "refused"
            why = "what it said is not in the format" if refused else "it is connected and says nothing"
            problem = agent.problem or "silent"
            return AgentSnapshot(up=False, problem=problem, why=why, received=agent.received)
        memory = self._memories.setdefault((agent.pid, agent.start), _Memory())
        report = memory.steady(report)
        if memory.fail(report.errors):
            memory.failed = reading.monotonic
        troubled = memory.failed is not None and reading.monotonic - memory.failed < TROUBLED
        pools, unmapped = _pools(report, self._held.get(agent.pid, {}), reading, facts)
        for uuid, found in pools.items():
            if self._note(memory, uuid, found):
                working.add((uuid, agent.pid))
        garbage = report.collector or GarbageReport(None, None, None)
        return AgentSnapshot(
            up=not troubled,
            problem="degraded" if troubled else "",
            why=f"parts of it fail: {', '.join(sorted(memory.errors))}" if troubled else "",
            received=agent.received,
            report=report,
            pools={
                uuid: tuple(_counted(pool, memory, uuid) for pool in found) for uuid, found in pools.items()
            },
            unmapped=unmapped,
            errors=dict(memory.errors),
            dropped=_count(memory, "dropped", report.dropped),
            collections=_count(memory, "collections", garbage.collections),
            freed=_count(memory, "freed", garbage.freed_bytes),
        )

    def _note(self, memory: _Memory, uuid: str, pools: list[Pool]) -> bool:
        """Tell whether anything was allocated on a device since the previous report that counts it."""
        worked = False
        for pool in pools:
            told = pool.figures.get("allocations")
            if told is not None:
                before = memory.allocations.get((uuid, pool.framework))
                worked = worked or (before is not None and told > before)
                memory.allocations[uuid, pool.framework] = told
        return worked


def overhead(agent: AgentSnapshot, uuid: str, holding: Holding) -> int | None:
    """Return NVML's bytes less the frameworks', None where one is not known or they contradict each other."""
    pool = agent.pool(uuid)
    if pool is None or holding.memory is None or pool > holding.memory:
        return None
    return holding.memory - pool


def needed(agent: AgentSnapshot, uuid: str, holding: Holding) -> int | None:
    """Return what a process has needed at most on a device, None where a part of it is not known."""
    need, rest = agent.need(uuid), overhead(agent, uuid, holding)
    return None if need is None or rest is None else need + rest


def _count(memory: _Memory, name: str, told: int | None) -> int | None:
    return None if told is None else memory.count((name,), told)


def _counted(pool: Pool, memory: _Memory, uuid: str) -> Pool:
    """Return a pool whose counters never fall."""
    counts = {
        name: memory.count((pool.framework, uuid, name), pool.figures[name])
        for name in COUNTS
        if name in pool.figures
    }
    if counts.items() <= pool.figures.items():  # as told, which is the rule
        return pool
    return pool._replace(figures={**pool.figures, **counts})


def _pools(
    report: AgentReport, held: Mapping[str, int | None], reading: Reading, facts: ProcessFacts | None
) -> tuple[dict[str, list[Pool]], int]:
    """Return the report's figures by device, and how many could not be assigned to one."""
    pools: dict[str, list[Pool]] = {}
    unmapped = 0
    for framework in report.frameworks:
        wanted = {
            each.ordinal: each.least
            for each in framework.devices
            if each.uuid is None and each.ordinal is not None
        }
        places = translate(wanted, held, report.visible, reading.devices, apart=_apart(facts))
        for each in framework.devices:
            uuid = each.uuid if each.ordinal is None or each.uuid is not None else places.get(each.ordinal)
            if uuid is not None and uuid in held:
                pools.setdefault(uuid, []).append(_pool(framework, each))
            elif each.least > 0:
                unmapped += 1
    return pools, unmapped


def _pool(framework: FrameworkReport, device: DeviceReport) -> Pool:
    return Pool(
        framework.framework, device.ordinal, device.figures, device.categories, device.pool, device.need
    )


def _holdings(reading: Reading) -> dict[int, dict[str, int | None]]:
    """Return the bytes that the driver lists by pid and device; a divided GPU lists its instances' again."""
    held: dict[int, dict[str, int | None]] = {}
    for device in reading.devices:
        if not device.divided:
            for entry in device.processes or ():
                held.setdefault(entry.pid, {})[device.uuid] = entry.memory
    return held


def _apart(facts: ProcessFacts | None) -> bool:
    """Tell whether a process may see other devices than we do, as in a container or a Slurm job."""
    if facts is None or len(facts.nspid) > 1:
        return True
    owner = facts.owner
    return owner is not None and bool(owner.pod or owner.container or owner.slurm_job)
