"""A process has the figures, the growth, the first step and the failures that the simulation gave it."""

import pytest

from dashboards.src.process import SILENT
from dashboards.src.queries import FRAGMENTED, LACKS, LEAKS, SPINS, TOO_BIG, UNPROVEN, WORKING
from dashboards.src.reasons import NO_HOLDER, NO_SOURCE, NOT_WATCHED, NOTHING
from tests.support.dashboards.answers import SPAN
from tests.support.dashboards.database import ask
from tests.support.dashboards.figures import AT_NOW, pid_of, query_of, total_of, value
from tests.support.dashboards.files import substitute_variables
from tests.support.fleet.engines import Engine

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # 150 s of CPU for all of this folder

GROWTH = "vramledger_process:demand_growth_bytes"


def test_a_process_is_charged_no_more_than_it_holds(engine: Engine) -> None:
    """What NVML charges to a process is drawn where it is less than it holds; else both are the same."""

    def drawn(ref: str, instance: str) -> dict[float, str]:
        query = query_of("process", "Where its memory goes", ref)
        found = ask(engine, substitute_variables(query, instance=instance), instant=False, span=SPAN)
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
    assert value(engine, "process", "Where its memory goes", "B", instance="notebook") == []
    for panel in ("Peak need", "Reclaimable now"):
        (why,) = value(engine, "process", panel, instance="notebook")
        assert why["value"] == NO_SOURCE


def test_a_fast_leak_grows_and_its_gpu_has_a_time_until_full(engine: Engine) -> None:
    """The holder that leaks has its rate, and its GPU the time until it is full."""
    (growing,) = value(engine, "process", "Grows", instance="leak")
    (full,) = value(engine, "device", "Time until full", instance="leak", uuid=".+")

    assert growing["value"] > 0
    assert full["value"] > 0


def test_who_grows_steadily_is_named_whether_an_alert_fires_or_not(engine: Engine) -> None:
    """Fleet names each program that a leak alert may come to name, and no other, with its rate."""
    rows = value(engine, "fleet", "Who grows steadily", instance="leak|hoarder|jax|small-jobs")
    grown = ask(engine, f'{{__name__=~"{GROWTH}:delta6m|{GROWTH}:delta30m", instance="leak"}}', **AT_NOW)

    assert {(row["instance"], row["pid"]) for row in rows} == {
        ("leak", each["metric"]["pid"]) for each in grown
    }
    spans = {f"{GROWTH}:delta6m": 360, f"{GROWTH}:delta30m": 1800}
    rates = [float(each["value"][1]) / spans[each["metric"]["__name__"]] for each in grown]
    assert rows
    assert all(0.5 * min(rates) <= row["value"] <= 1.5 * max(rates) for row in rows)


@pytest.mark.parametrize("node", ["managed", "jax", "fragmented"])
def test_what_a_process_has_adds_up_to_what_it_holds(engine: Engine, node: str) -> None:
    """The parts of its memory are no more than all of it, also if its pool is larger than what it holds."""
    agents = ask(engine, f'vramledger_framework_pool_bytes{{instance="{node}"}}', **AT_NOW)
    for pid in {each["metric"]["pid"] for each in agents}:
        chosen = {"instance": node, "pid": pid}
        panel = "Where its memory goes"
        held = total_of(value(engine, "process", panel, "E", **chosen))
        parts = [value(engine, "process", panel, ref, **chosen) for ref in "ABCD"]
        assert parts[3], chosen
        assert sum(total_of(part) for part in parts) <= 1.02 * held + 64 * 2**20, chosen


@pytest.mark.parametrize("node", ["managed", "jax"])
def test_the_figures_of_a_process_are_of_the_same_moment(engine: Engine, node: str) -> None:
    """What it holds is the same in its table and above it, unless it changed within 4 minutes."""
    holders = ask(engine, f'vramledger_process_memory_bytes{{instance="{node}"}}', **AT_NOW)
    for pid in {each["metric"]["pid"] for each in holders} - {"other"}:
        chosen = {"instance": node, "pid": pid}
        above = value(engine, "process", "Holds", **chosen)
        assert total_of(value(engine, "process", "The process", **chosen)) == total_of(above), chosen


def test_who_made_a_job_fail_is_named(engine: Engine) -> None:
    """Beside a failed allocation stands who else held most then: program, pid, owner and node."""
    hoarder, failed = pid_of(engine, "hoarder", owner="17"), pid_of(engine, "hoarder", owner="18")
    chosen = {"instance": "hoarder", "pid": failed}
    blocker = f"train.py {hoarder} slurm 17"
    panel = "Newest failed allocation"
    (failure,) = value(engine, "process", panel, **chosen)
    (named,) = value(engine, "process", panel, "C", **chosen)
    neighbours = value(engine, "process", "Neighbours", **chosen)
    on_device = value(engine, "device", "Why allocations failed", "E", instance="hoarder", uuid=".+")
    panel = "Programs that ran out of memory"
    (on_node,) = value(engine, "node", panel, instance="hoarder")
    names = value(engine, "node", panel, "B", instance="hoarder")
    (named_there,) = [row for row in names if row["pid"] == failed]
    (beside,) = value(engine, "node", panel, "D", instance="hoarder")
    assert (on_node["pid"], named_there["owner"], on_node["step"]) == (failed, "18", "hoarded")
    assert (beside["pid"], beside["blocker"]) == (failed, blocker)

    assert (failure["verdict"], failure["step"]) == ("hoarded", "hoarded")
    assert named["blocker"] == blocker
    assert [row["pid"] for row in neighbours] == [hoarder]
    assert [row["blocker"] for row in on_device] == [blocker]


def test_a_job_that_fails_alone_has_no_blocker(engine: Engine) -> None:
    """Where nobody else holds memory, the verdict is another one, and nobody is named."""
    panel, chosen = "Newest failed allocation", {"instance": "out-of-memory"}
    (failure,) = value(engine, "process", panel, **chosen)

    assert failure["verdict"] == "too_big"
    assert value(engine, "process", panel, "C", **chosen) == []


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
    unsure = [each["metric"] for each in ask(engine, inferred, **AT_NOW)]
    unproven = {(each["instance"], each["pid"]) for each in unsure}
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
    working = ask(engine, "vramledger_process_orphan_working == 1", **AT_NOW)
    assert working
    for each in working:
        place = {name: each["metric"][name] for name in ("instance", "pid", "uuid")}
        rows = value(engine, "device", "Holders", instance=place["instance"], uuid=place["uuid"])
        assert [row["step"] for row in rows if row["pid"] == place["pid"]] == [WORKING]


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
    ):
        (shown,) = value(engine, "process", panel, **chosen)
        assert shown["value"] == meaning, (panel, chosen)
    (said,) = value(engine, "process", "Grows", instance="down")
    assert said["value"] == NOT_WATCHED


def test_steady_growth_is_shown_wherever_a_leak_is_alerted(engine: Engine) -> None:
    """A process that grows, and has a leak alert, has a line in Steady growth, whatever the alert's span.

    The alert stays while a program that has leaked holds memory, also where it grows no more.
    """
    leaks = ask(
        engine,
        'ALERTS{alertname=~"GpuMemoryLeak.*|GpuMemoryGrowing", alertstate="firing", pid!=""}'
        " and on (instance, pid) vramledger_process:demand_growth:ratio >= 0.01",
        **AT_NOW,
    )
    assert leaks
    for each in leaks:
        chosen = {name: each["metric"][name] for name in ("instance", "pid")}
        drawn = [value(engine, "process", "Steady growth", ref, **chosen) for ref in "ABCDEF"]
        assert any(drawn), chosen
