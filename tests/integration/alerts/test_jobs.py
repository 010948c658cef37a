"""What the page about a distributed job that hangs says; job situations have when there is one."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.alerts.holder_situations import HALTED, JOB, NEAR, of_two, waiting
from tests.support.alerts.nodes import Node
from tests.support.alerts.promtool import Alert, firing


def alerts(folder: Path, far: Node, name: str) -> list[Alert]:
    """Return the alerts of a name about a job on the nodes n0 and n7."""
    nodes = {"n0": NEAR, "n7": far}
    series = [each for own, node in nodes.items() for each in replace(node, instance=own).series(40)]
    return firing(folder, series, 36, about={name}, step=120)


def test_the_page_says_who_waits_for_whom(tmp_path: Path) -> None:
    """It names the stopped rank, its node, the ranks that wait, their GPUs, since when, and what to do."""
    [alert] = alerts(tmp_path, HALTED, "GpuJobHung")
    text = alert.annotations["description"]

    assert text.startswith(f"n7: rank 3 of job {JOB}, pid 103 (train.py) of job 17, user ann, is stopped.")
    assert "without moving a byte since 1970-01-01 00:10:00" in text
    assert "rank 0 on n0 (GPU 0)" in text
    assert "kill -CONT 103" in text


def test_the_page_names_the_ranks_while_their_rules_are_evaluated(tmp_path: Path) -> None:
    """Groups are evaluated side by side: a page whose waiting ranks just have no sample still names them."""
    of = 'job="vramledger",instance="n0"'
    job = f'cluster="",{of},user="ann",namespace="",job_id="{JOB}"'
    jobs = f'job="vramledger",user="ann",namespace="",job_id="{JOB}"'
    given = {
        f"vramledger_job:waiting_seconds:max{{{jobs}}}": "1800x40",
        f'vramledger_job:rank_lost:state{{{job},pid="101",rank="1",ranks="2",rank_state="stopped"}}': "1x40",
        f'vramledger_process:waiting_seconds:last{{{of},gpu="0",uuid="U",pid="100"}}': "1800x35 stale",
        f'vramledger_process:rank_info:last{{{job},pid="100",rank="0",ranks="2"}}': "1x35 stale",
    }
    series = [{"series": name, "values": values} for name, values in given.items()]
    [alert] = firing(tmp_path, series, 9, about={"GpuJobHung"})

    assert "rank 0 on n0 (GPU 0)" in alert.annotations["description"]


@pytest.mark.parametrize("ranks", [3, 4])
def test_who_is_busy_without_work_learns_how_many_ranks_are_seen(tmp_path: Path, ranks: int) -> None:
    """A rank that ended before its first sample has no name, but the alert says that one is missing."""
    found = alerts(tmp_path, of_two(*map(waiting, range(2, ranks))), "GpuBusyWithoutWork")
    said = {"Of the 4 ranks of its job 3 are seen." in each.annotations["description"] for each in found}

    assert len(found) == ranks
    assert said == {ranks == 3}
