"""An agent's report in the ledger: joined by identity, and never against the driver's figures."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.agent_client import report, torch
from tests.support.host.model import GIB, MIB
from tests.support.host.one_holder import NOW, START, UUID, OneHolder, gpu
from tests.support.sure import sure
from vramledger.accounting.agent_figures import (
    DEGRADED_FOR,
    MISSING_AFTER,
    SLACK,
    needed,
    overhead,
    translate,
)
from vramledger.accounting.holders.processes import MOST_REPORTED_RANKS
from vramledger.model.agent_report import Agent, AgentSocket, read_report
from vramledger.model.reading import DeviceReading, Owner, ProcessFacts, Rank, encode
from vramledger.model.snapshot import AgentSnapshot, State
from vramledger.sampling.masking import Mask
from vramledger.sampling.replay import shift_times
from vramledger.views.evidence import evidence_json, evidence_lines
from vramledger.views.hidden_names import public_view
from vramledger.views.ledger_json import snapshot_json
from vramledger_agent.protocol.messages import MAX_PROVIDERS

UID = 1000
SOCKET = AgentSocket(listening=True, connections=1, rejected={})
Visible = dict[str, str | None]
UNSET: Visible = {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None}


def agent(start: int = START, uid: int = UID, **said: Any) -> Agent:  # noqa: ANN401 a message's values
    """Make the agent of pid 7 with a report of this moment."""
    return Agent(7, start, uid, NOW, problem="", report=read_report(report(**{"visible": UNSET, **said})))


def facts(**changes: Any) -> tuple[ProcessFacts, ...]:  # noqa: ANN401 any field
    """Return what /proc says about pid 7."""
    return (ProcessFacts(7, START, uid=UID, user="ann", libraries=("libtorch_cuda",), **changes),)


def hear(host: OneHolder, *agents: Agent, **changes: Any) -> AgentSnapshot | None:  # noqa: ANN401 any field
    """Take a sample with these agents, and return its agent of pid 7."""
    known = {"facts": facts(), "agents": agents, "agent_socket": SOCKET, **changes}
    return host.sample(**known).agents.get(7)


def told(host: OneHolder, *agents: Agent, **changes: Any) -> AgentSnapshot:  # noqa: ANN401 any field
    """Do the same if there must be an agent."""
    return sure(hear(host, *agents, **changes))


def test_the_holders_figures_stand_beside_the_drivers() -> None:
    """The pool is assigned to the device that the driver lists, and the rest is overhead."""
    host = OneHolder()
    found = told(host, agent(frameworks=[torch(reserved=8 * GIB, allocated_peak=3 * GIB)]))
    holding = host.holding()
    assert found.up
    assert found.pool(UUID) == 8 * GIB
    assert overhead(found, UUID, holding) == 2 * GIB
    assert needed(found, UUID, holding) == 5 * GIB


def test_managed_memory_is_what_a_framework_knows_of_it() -> None:
    """What a framework knows of its managed memory counts, also below what the driver charges."""
    host = OneHolder()
    cupy = {"framework": "cupy", "devices": [{"ordinal": 0, "pool": 3 * GIB, "managed": 2 * GIB}]}
    own = {"framework": "cupy", "devices": [{"ordinal": 0, "pool": 3 * GIB}]}
    assert told(host, agent(frameworks=[torch(reserved=8 * GIB), cupy])).managed(UUID, 10 * GIB) == 2 * GIB
    assert told(host, agent(frameworks=[torch(reserved=8 * GIB), own])).managed(UUID, 10 * GIB) == 11 * GIB
    assert told(host, agent(frameworks=[own])).managed(UUID, 10 * GIB) is None


def test_a_pool_beyond_the_drivers_bytes_has_no_overhead() -> None:
    """If the two contradict each other there is no negative overhead, and an unknown pool is not zero."""
    host = OneHolder()
    found = told(host, agent(frameworks=[torch(reserved=10 * GIB + 1)]))
    assert overhead(found, UUID, host.holding()) is None
    jax = {"framework": "jax", "devices": [{"ordinal": 0, "in_use": GIB}]}
    both = told(host, agent(frameworks=[torch(reserved=GIB), jax]))
    assert both.pool(UUID) is None
    assert overhead(both, UUID, host.holding()) is None


def test_a_process_cannot_make_series_without_end() -> None:
    """Of names, versions and settings that change in every report the first ones stay."""
    host = OneHolder()
    for turn in range(100):
        errors = {f"part_{turn}": 1, "torch": turn}
        found = told(host, agent(agent=f"0.{turn}", python=f"3.{turn}", errors=errors))
    assert (sure(found.report).agent, sure(found.report).python) == ("0.0", "3.0")
    assert len(found.errors) == MAX_PROVIDERS
    assert found.errors["torch"] == 99
    assert min(name for name in found.errors if name.startswith("part_")) == "part_0"
    host = OneHolder()
    for turn in range(3):
        settings = {"expandable_segments": "true\n", "max_split_size_mb": f"{64 + turn}", "made_up": "1"}
        found = told(host, agent(frameworks=[{**torch(), "settings": settings, "pinned": turn}]))
    (framework,) = sure(found.report).frameworks
    assert (framework.settings, framework.pinned) == ({"max_split_size_mb": "64"}, 2)


def test_who_does_not_speak_for_a_holder() -> None:
    """Not a former process of its pid, not another user, and nobody for a device where it is not listed."""
    assert hear(OneHolder(), agent(start=START - 1, frameworks=[torch()])) is None
    found = told(OneHolder(), agent(uid=UID + 1, frameworks=[torch()]))
    assert (found.up, found.problem, found.report, dict(found.pools)) == (False, "foreign", None, {})
    elsewhere = {"framework": "torch", "devices": [{"uuid": "GPU-1", "reserved": 5}]}
    found = told(OneHolder(), agent(frameworks=[elsewhere]))
    assert dict(found.pools) == {}
    assert found.unmapped == 1


@pytest.mark.parametrize(
    "owner", [Owner("pod", "ml/a", pod="a"), Owner("slurm", "5", slurm_job="5"), Owner("user", "ann")]
)
def test_a_container_numbers_its_own_devices(owner: Owner) -> None:
    """In a container number 0 is the device that the process holds; on the host it is the first device."""
    host = OneHolder()
    first, host.gpu.index = gpu(0), 1
    first.uuids = ((0.0, "GPU-first"),)
    host.host.gpus, host.holder.places = [first, host.gpu], {1: host.program}
    # With one held device it is certain either way; on the host number 0 is not that one: the order decides.
    assert list(told(host, agent(frameworks=[torch(reserved=GIB)]), facts=facts(owner=owner)).pools) == [UUID]


def test_silence_is_said_and_its_figures_are_gone() -> None:
    """A silent agent is down without figures; a failure inside it is told for a minute, and figures go on."""
    host = OneHolder()
    told(host, agent(frameworks=[torch()]))
    found = told(host, Agent(7, START, UID, NOW, problem="silent", report=None))
    assert (found.up, found.problem, dict(found.pools)) == (False, "silent", {})
    assert found.received == NOW
    host = OneHolder()
    assert told(host, agent(errors={"torch": 0})).up
    found = told(host, agent(errors={"torch": 2}, frameworks=[torch()]))
    assert (found.up, found.problem, found.errors) == (False, "degraded", {"torch": 2})
    assert found.pools
    host.sample(after=DEGRADED_FOR / 2, agents=(agent(errors={"torch": 2}),))
    assert told(host, agent(errors={"torch": 2}), monotonic=host.now + DEGRADED_FOR + 2).up


def test_counters_never_go_back() -> None:
    """A counter that restarts in the process continues from its value; an absent one stays absent."""
    host = OneHolder()
    totals = []
    for ooms in (5, 7, 1, 1, 4):
        found = told(host, agent(frameworks=[torch(ooms=ooms)], dropped=ooms))
        totals.append((found.pools[UUID][0].figures["ooms"], found.dropped))
    assert totals == [(5, 5), (7, 7), (8, 8), (8, 8), (11, 11)]
    found = told(host, agent(frameworks=[torch()]))
    assert "ooms" not in found.pools[UUID][0].figures
    assert told(host, agent(frameworks=[torch(ooms=5)])).pools[UUID][0].figures["ooms"] == 12


def test_who_was_started_with_an_agent_is_missed() -> None:
    """With VRAMLEDGER_AGENT=1 and a framework, who has no report after a while is missing."""
    with_agent = facts(settings=(("VRAMLEDGER_AGENT", "1"),))
    assert told(OneHolder(), facts=with_agent).problem == "missing"
    assert hear(OneHolder(), facts=with_agent, agent_socket=None) is None, "nobody listens"
    assert hear(OneHolder()) is None, "it was not asked for"
    nothing = (replace(with_agent[0], libraries=("libcuda",)),)
    assert hear(OneHolder(), facts=nothing) is None, "it has nothing to tell"
    host = OneHolder()
    boot = NOW + 1 - START / 100 - MISSING_AFTER
    assert hear(host, facts=with_agent, boot_time=boot) is None
    assert told(host, boot_time=boot, facts=()).problem == "missing"


def test_the_agents_word_on_the_policy_is_the_best() -> None:
    """The framework's report comes before environment and pattern; vLLM's name before torch's below it."""
    host = OneHolder()
    settings = (("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),)
    outside = host.sample(facts=facts(settings=settings)).processes[7].policy
    assert (outside.policy, outside.source) == ("cuda_malloc_async", "environ")
    tensorflow = {"framework": "tensorflow", "policy": "growth", "devices": [{"ordinal": 0, "in_use": GIB}]}
    shot = host.sample(agents=(agent(frameworks=[{**torch(reserved=5), "policy": "caching"}, tensorflow]),))
    assert shot.processes[7].policy[:3] == ("tensorflow", "growth", "agent")
    assert host.sample().processes[7].policy[:3] == outside[:3], "without the agent it is the outside's again"
    vllm = (replace(facts()[0], libraries=("libtorch_cuda", "vllm")),)
    shot = OneHolder().sample(facts=vllm, agents=(agent(frameworks=[torch()]),))
    assert shot.processes[7].policy[:2] == ("vllm", "fraction")


def test_what_an_agent_counts_is_no_sign_of_work() -> None:
    """A program that says that it allocates again and again is as idle as one that says nothing."""
    host = OneHolder()
    for second in range(30):
        shot = host.sample(agents=(agent(frameworks=[torch(allocations=second)]),))
    assert shot.devices[0].holdings[0].state is State.IDLE


def test_a_replay_moves_the_agents_times_too() -> None:
    """When a recording is shown later, a report is as old as it was then."""
    oom = {"time": NOW - 5, "framework": "torch", "verdict": "too_big"}
    (found,) = shift_times(OneHolder().reading(agents=(agent(last_oom=oom),)), 100.0).agents
    assert (found.received, sure(sure(found.report).last_oom).time) == (NOW + 100, NOW + 95)


def test_a_masked_recording_tells_nobody() -> None:
    """UUIDs, users, paths and a program's own texts are replaced; figures and numbers stay."""
    secret = "ada-secret"  # noqa: S105 no password
    told_ = agent(
        agent=secret,
        python=secret,
        errors={"adasecret": 1, "torch": 2},
        visible={"CUDA_VISIBLE_DEVICES": f"1,{secret}", "CUDA_DEVICE_ORDER": secret},
        frameworks=[{**torch(), "version": secret, "allocator": secret}],
        last_oom={"time": 1, "framework": "torch", "report": f"/home/{secret}"},
        rank={"number": 0, "size": 2, "job": f"{secret}:29500"},
    )
    text = encode(Mask().mask_reading(OneHolder().reading(agents=(told_,)))).decode()
    assert secret not in text
    assert "adasecret" not in text
    assert '"reserved":1073741824' in text
    assert '"CUDA_VISIBLE_DEVICES":"1,' in text


def test_a_person_is_told_what_the_agent_says() -> None:
    """``show --why`` has the figures, the problem and the report's file; the JSON document has no path."""
    oom = {"time": NOW - 5, "framework": "torch", "verdict": "leaking", "requested": GIB}
    pool = torch(reserved=8 * GIB, allocated_peak=GIB)
    said = agent(frameworks=[pool], last_oom={**oom, "report": "/home/ann/oom"}, collector={"enabled": False})
    shot = OneHolder().sample(facts=facts(), agents=(said,))
    text = "\n".join(evidence_lines(shot, 7))
    for part in ("reserved 8.00 GiB", "beyond them  2.00 GiB", "holds 7.00 GiB more", "agent          up"):
        assert part in text
    assert "leaking; see /home/ann/oom" in text
    assert "collector    off" in text
    written = str(snapshot_json(shot))
    assert "'verdict': 'leaking'" in written
    assert "'overhead': 2147483648" in written
    assert "/home/ann" not in written


def ranked(number: int, size: int, job: str = "n0:31000") -> Agent:
    """Make an agent that reports a rank."""
    return agent(rank={"number": number, "size": size, "job": job})


def rank_of(host: OneHolder, *agents: Agent, named: Rank | None = None) -> Rank | None:
    """Take a sample with these agents and this rank in the environment; return the rank of pid 7."""
    return host.sample(facts=facts(rank=named), agents=agents).processes[7].rank


@pytest.mark.parametrize(
    ("named", "told_", "rank"),
    [
        (None, (3, 8, "n0:31000"), Rank(3, 8, "n0:31000")),
        (Rank(0, 2, "n0:29500"), (3, 16, "n0:29500"), Rank(3, 16, "n0:29500")),  # a node's, inherited
        (Rank(3, 8, "slurm 17.0"), (3, 8, "n0:31000"), Rank(3, 8, "slurm 17.0")),
        (Rank(3, 8, "n0:29500"), (3, 8, ""), Rank(3, 8, "n0:29500")),
        (Rank(0, 2, "n0:29500"), (3, 16, ""), None),
        (None, (3, 8, ""), None),
    ],
)
def test_the_agents_rank_is_right(named: Rank | None, told_: tuple[int, int, str], rank: Rank | None) -> None:
    """A rank in the environment may be the parent's; where both agree, the job keeps its name there."""
    assert rank_of(OneHolder(), ranked(*told_), named=named) == rank


def test_a_rank_stays_when_its_agent_cannot_report() -> None:
    """A stopped rank, one whose agent has gone, and one that destroyed its group are still that rank."""
    host = OneHolder()
    assert rank_of(host, ranked(3, 8)) == Rank(3, 8, "n0:31000")
    for agents in ((Agent(7, START, UID, NOW, problem="silent", report=None),), (), (agent(),)):
        assert rank_of(host, *agents) == Rank(3, 8, "n0:31000")
    assert rank_of(host, ranked(1, 4)) == Rank(1, 4, "n0:31000")


def test_another_user_or_process_gives_no_rank() -> None:
    """Another user or process gives no rank; beyond some different ones none is shown."""
    host = OneHolder()
    rank = {"number": 1, "size": 2, "job": "n0:1"}
    assert rank_of(host, agent(uid=UID + 1, rank=rank)) is None
    assert rank_of(host, agent(start=START + 1, rank=rank)) is None
    host = OneHolder()
    shown = {rank_of(host, ranked(number, 1000)) for number in range(100)}
    assert shown == {None, *(Rank(number, 1000, "n0:31000") for number in range(MOST_REPORTED_RANKS))}
    assert rank_of(host, ranked(2, 1000)) == Rank(2, 1000, "n0:31000")


def test_a_person_is_told_who_names_the_rank() -> None:
    """``show --why`` has the rank and its source, also as JSON; another user gets neither."""
    shot = OneHolder().sample(facts=facts(), agents=(ranked(3, 8),))
    others = public_view(shot, UID + 1)
    assert "  rank           3 of 8 of job n0:31000, by its agent" in evidence_lines(shot, 7)
    assert (evidence_json(shot, 7) or {})["rank"] == {"number": 3, "size": 8, "job": "n0:31000"}
    assert others.processes[7].rank is None


HOST = [DeviceReading(index, f"GPU-{index}{index}-aa", name="H200") for index in range(4)]
A, B, C, D = (device.uuid for device in HOST)
MIXED = [replace(device, name=f"model {device.index}") for device in HOST]
INSTANCES = [DeviceReading(0, uuid, parent=A) for uuid in ("MIG-1", "MIG-2")]
MIG = [replace(HOST[0], divided=True), *INSTANCES, HOST[1]]


def visible(text: str | None, order: str | None = None) -> Visible:
    """Make the environment that the agent reports."""
    return {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": order}


@pytest.mark.parametrize(
    ("settings", "wanted", "held", "expected"),
    [
        (UNSET, [0, 2], [A, C], {0: A, 2: C}),
        (visible("1,0"), [0, 1], [A, B], {0: B, 1: A}),
        (visible("3, 1"), [0, 1], [B, D], {0: D, 1: B}),
        (visible("2,-1,0"), [0], [C], {0: C}),
        (visible("2,9,0"), [0], [C], {0: C}),
        (visible("GPU-33,GPU-11-aa"), [0, 1], [B, D], {0: D, 1: B}),
        (visible("GPU-,1"), [0], [B], {0: B}),  # ambiguous: nothing is visible, but it holds on one alone
        (visible(""), [0, 1], [A, B], {}),
        (visible("1,1"), [0, 1], [A, B], {}),
        (visible("0"), [0], [], {}),
        (None, [0], [C], {0: C}),
        (None, [0, 1], [B, C], {}),
        (UNSET, [1], [A, C], {}),  # a job's device cgroup: either may be meant
        (UNSET, [0, 1], [B, D], {0: B, 1: D}),  # the same: the order tells
        (visible("1,0"), [0, 1], [C, D], {0: D, 1: C}),
    ],
)
def test_numbers_of_the_hosts_devices(
    settings: Visible | None, wanted: list[int], held: list[str], expected: dict[int, str]
) -> None:
    """A number means the device that CUDA chooses by the variables, if the process holds memory there."""
    told = dict.fromkeys(wanted, GIB)
    assert translate(told, dict.fromkeys(held, 2 * GIB), settings, HOST, apart=False) == expected


@pytest.mark.parametrize(
    ("settings", "wanted", "held", "expected"),
    [
        (UNSET, {0: GIB}, {C: GIB}, {0: C}),
        (UNSET, {0: GIB, 1: GIB}, {B: GIB, D: GIB}, {0: B, 1: D}),
        (visible("1,0"), {0: GIB, 1: GIB}, {B: GIB, D: GIB}, {0: D, 1: B}),
        (UNSET, {1: GIB}, {A: 2 * GIB, B: 2 * GIB}, {}),
        (UNSET, {1: GIB}, {A: MIB, B: 2 * GIB}, {1: B}),  # a stray context is too small to be meant
        (UNSET, {0: GIB, 1: GIB}, {B: 2 * GIB}, {}),  # more than it can hold: nothing of it counts
        (UNSET, {0: GIB}, {A: None, B: None}, {}),
        (visible("GPU-22"), {0: GIB}, {A: GIB, C: GIB}, {0: C}),
    ],
)
def test_numbers_of_a_containers_devices(
    settings: Visible, wanted: dict[int, int], held: dict[str, int | None], expected: dict[int, str]
) -> None:
    """If the process sees fewer devices than we do, only its holdings can show which device it means."""
    assert translate(wanted, held, settings, HOST, apart=True) == expected


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_the_fastest_device_first_is_not_ours_to_know(order: str | None) -> None:
    """Among different GPUs the default order is unknown, so that only the holdings show the device."""
    told = {0: 2 * GIB, 1: GIB}
    assert translate(told, {A: 2 * GIB, B: 3 * GIB}, visible(None, order), MIXED, apart=False) == {}
    assert translate(told, {A: GIB, B: 3 * GIB}, visible(None, order), MIXED, apart=False) == {0: B, 1: A}
    by_address = visible(None, "PCI_BUS_ID")
    assert translate(told, {A: 2 * GIB, B: 3 * GIB}, by_address, MIXED, apart=False) == {0: A, 1: B}


def test_mig_instances_by_their_names() -> None:
    """An instance is visible by its UUID, or certain because it is the only held one."""
    held = {"MIG-1": GIB, "MIG-2": GIB}
    assert translate({0: GIB}, held, visible("MIG-2"), MIG, apart=False) == {0: "MIG-2"}
    assert translate({0: GIB}, {"MIG-1": GIB}, UNSET, MIG, apart=False) == {0: "MIG-1"}
    assert translate({0: GIB}, held, UNSET, MIG, apart=False) == {}


def test_a_report_may_be_a_moment_ahead() -> None:
    """A little more than NVML has read is accepted; an empty pool needs no device."""
    assert translate({0: GIB + SLACK}, {A: GIB}, UNSET, HOST, apart=False) == {0: A}
    assert translate({0: GIB + SLACK + 1}, {A: GIB}, UNSET, HOST, apart=False) == {}
    assert translate({0: 0, 1: GIB}, {B: GIB}, UNSET, HOST, apart=False) == {1: B}
