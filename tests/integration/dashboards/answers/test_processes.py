"""A process has the figures, the growth, the first step and the failures that the simulation gave it."""

import pytest

from dashboards.src.process import SILENT
from dashboards.src.queries import FRAGMENTED, LACKS, LEAKS, SPINS, TOO_BIG, UNPROVEN, WORKING
from dashboards.src.reasons import NO_HOLDER, NO_SOURCE, NOT_WATCHED, NOTHING
from tests.support.dashboards.answers import SPAN
from tests.support.dashboards.database import ask
from tests.support.dashboards.figures import figure, pid_of, query_of, rows_of, total_of, value
from tests.support.dashboards.files import substitute_variables
from tests.support.fleet.engines import Engine

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder

GROWTH = "vramledger_process:demand_growth_bytes"
MEMORY, FAILED = "Where its memory goes", "Newest failed allocation"


def test_a_process_is_charged_no_more_than_it_holds(engine: Engine) -> None:
    """What NVML charges to a process is drawn where it is less than it holds; else both are the same."""

    def drawn(ref: str, instance: str) -> dict[float, str]:
        expr = substitute_variables(query_of("process", MEMORY, ref), instance=instance)
        found = ask(engine, expr, instant=False, span=SPAN)
        return dict(found[0]["values"]) if found else {}

    held, charged = (drawn(ref, "managed") for ref in "EF")
    assert charged.keys() <= held.keys()
    assert charged
    assert all(float(charged[at]) < float(held[at]) for at in charged)
    assert len(drawn("E", "leak")) > len(drawn("F", "leak")) == 0, "a growing one, at each point"


def test_a_program_without_an_agent_has_no_framework_figures(engine: Engine) -> None:
    """Figures that only an agent has are absent without one, never 0."""
    assert value(engine, "node", "Holders", "F", instance="notebook") == []
    assert len(value(engine, "owner", "Processes", "A", instance="notebook")) == 1
    assert value(engine, "process", MEMORY, "B", instance="notebook") == []
    for panel in ("Peak need", "Reclaimable now"):
        assert figure(engine, "process", panel, instance="notebook") == NO_SOURCE


def test_a_fast_leak_grows_and_its_gpu_has_a_time_until_full(engine: Engine) -> None:
    """The holder that leaks has its rate, and its GPU the time until it is full."""
    assert figure(engine, "process", "Grows", instance="leak") > 0
    assert figure(engine, "device", "Time until full", instance="leak", uuid=".+") > 0


def test_who_grows_steadily_is_named_whether_an_alert_fires_or_not(engine: Engine) -> None:
    """Fleet names each program that a leak alert may come to name, and no other, with its rate."""
    rows = value(engine, "fleet", "Who grows steadily", instance="leak|hoarder|jax|small-jobs")
    grown = rows_of(engine, f'{{__name__=~"{GROWTH}:delta6m|{GROWTH}:delta30m", instance="leak"}}')

    assert {(row["instance"], row["pid"]) for row in rows} == {("leak", each["pid"]) for each in grown}
    spans = {f"{GROWTH}:delta6m": 360, f"{GROWTH}:delta30m": 1800}
    rates = [each["value"] / spans[each["__name__"]] for each in grown]
    assert rows
    assert all(0.5 * min(rates) <= row["value"] <= 1.5 * max(rates) for row in rows)


@pytest.mark.parametrize("node", ["managed", "jax", "fragmented"])
def test_what_a_process_has_adds_up_to_what_it_holds(engine: Engine, node: str) -> None:
    """The parts of its memory are no more than all of it, also if its pool is larger than what it holds."""
    agents = rows_of(engine, f'vramledger_framework_pool_bytes{{instance="{node}"}}')
    for pid in {row["pid"] for row in agents}:
        chosen = {"instance": node, "pid": pid}
        held = total_of(value(engine, "process", MEMORY, "E", **chosen))
        parts = [value(engine, "process", MEMORY, ref, **chosen) for ref in "ABCD"]
        assert parts[3], chosen
        assert sum(total_of(part) for part in parts) <= 1.02 * held + 64 * 2**20, chosen


@pytest.mark.parametrize("node", ["managed", "jax"])
def test_the_figures_of_a_process_are_of_the_same_moment(engine: Engine, node: str) -> None:
    """What it holds is the same in its table and above it, unless it changed within 4 minutes."""
    for holder in rows_of(engine, f'vramledger_process_memory_bytes{{instance="{node}", pid!="other"}}'):
        chosen = {"instance": node, "pid": holder["pid"]}
        above = value(engine, "process", "Holds", **chosen)
        assert total_of(value(engine, "process", "The process", **chosen)) == total_of(above), chosen


def test_who_made_a_job_fail_is_named(engine: Engine) -> None:
    """Beside a failed allocation stands who else held most then: program, pid, owner and node."""
    hoarder, failed = pid_of(engine, "hoarder", owner="17"), pid_of(engine, "hoarder", owner="18")
    chosen = {"instance": "hoarder", "pid": failed}
    blocker = f"train.py {hoarder} slurm 17"
    (failure,) = value(engine, "process", FAILED, **chosen)
    (named,) = value(engine, "process", FAILED, "C", **chosen)
    neighbours = value(engine, "process", "Neighbours", **chosen)
    on_device = value(engine, "device", "Why allocations failed", "E", instance="hoarder", uuid=".+")
    told = (
        value(engine, "node", "Programs that ran out of memory", ref, **chosen) for ref in ("A", "B", "D")
    )
    (on_node,), names, (beside,) = told

    assert (on_node["pid"], on_node["step"]) == (failed, "hoarded")
    assert [row["owner"] for row in names if row["pid"] == failed] == ["18"]
    assert (beside["pid"], beside["blocker"]) == (failed, blocker)
    assert (failure["verdict"], failure["step"]) == ("hoarded", "hoarded")
    assert named["blocker"] == blocker
    assert [row["pid"] for row in neighbours] == [hoarder]
    assert [row["blocker"] for row in on_device] == [blocker]


def test_a_job_that_fails_alone_has_no_blocker(engine: Engine) -> None:
    """Where nobody else holds memory, the verdict is another one, and nobody is named."""
    (failure,) = value(engine, "process", FAILED, instance="out-of-memory")

    assert failure["verdict"] == "too_big"
    assert value(engine, "process", FAILED, "C", instance="out-of-memory") == []


def test_the_first_step_is_that_of_the_worst_that_is_known(engine: Engine) -> None:
    """What is known of a holder beyond its state decides: no program in trouble has the step none."""
    steps = {
        node: {str(row["step"]) for row in value(engine, "node", "Holders", instance=node)}
        for node in ("leak", "hoarder", "stopped", "apart", "waits", "fragmented", "out-of-memory")
    }

    assert steps["leak"] == {LEAKS}
    assert steps["hoarder"] == {"idle", LACKS}
    assert steps["out-of-memory"] == {TOO_BIG}  # nobody else is there
    assert steps["waits"] == {SPINS}
    assert FRAGMENTED in steps["fragmented"]
    inferred = 'vramledger_process_state_since_timestamp_seconds{state="idle", grade="inferred"}'
    unproven = {(row["instance"], row["pid"]) for row in rows_of(engine, inferred)}
    said = {
        (node, str(row["pid"])): row["step"]
        for node in {node for node, _ in unproven}
        for row in value(engine, "node", "Holders", instance=node)
    }
    assert UNPROVEN in said.values()
    assert {holder for holder, step in said.items() if step == UNPROVEN} <= unproven
    assert not unproven & {holder for holder, step in said.items() if step == "idle"}
    assert steps["stopped"] == {"stopped"}
    assert steps["apart"] == {"active"}
    working = rows_of(engine, "vramledger_process_orphan_working == 1")
    assert working
    for each in working:
        rows = value(engine, "device", "Holders", instance=each["instance"], uuid=each["uuid"])
        assert [row["step"] for row in rows if row["pid"] == each["pid"]] == [WORKING]


def test_a_figure_that_is_not_there_says_why(engine: Engine) -> None:
    """An agent that reports no need is not no agent; growth that is not known is not no growth."""
    hoarder = {"instance": "hoarder", "pid": pid_of(engine, "hoarder", owner="17")}
    for panel, chosen, meaning in (
        ("Peak need", hoarder, NOTHING),
        ("Peak need", {"instance": "notebook"}, NO_SOURCE),
        ("Peak need", {"instance": "agent-silent"}, SILENT),
        ("Peak need", {"instance": "leak", "pid": "1"}, NO_HOLDER),
        ("Holds", {"instance": "leak", "pid": "1"}, NOTHING),
        ("Grows", {"instance": "notebook"}, NOTHING),
        ("Grows", {"instance": "leak", "pid": "1"}, NOTHING),
        ("Grows", {"instance": "down"}, NOT_WATCHED),
    ):
        assert figure(engine, "process", panel, **chosen) == meaning, (panel, chosen)


def test_steady_growth_is_shown_wherever_a_leak_is_alerted(engine: Engine) -> None:
    """A process that grows, and has a leak alert, has a line in Steady growth, whatever the alert's span.

    The alert stays while a program that has leaked holds memory, also where it grows no more.
    """
    leaks = rows_of(
        engine,
        'ALERTS{alertname=~"GpuMemoryLeak.*|GpuMemoryGrowing", alertstate="firing", pid!=""}'
        " and on (instance, pid) vramledger_process:demand_growth:ratio >= 0.01",
    )
    assert leaks
    for each in leaks:
        chosen = {name: each[name] for name in ("instance", "pid")}
        drawn = [value(engine, "process", "Steady growth", ref, **chosen) for ref in "ABCDEF"]
        assert any(drawn), chosen
