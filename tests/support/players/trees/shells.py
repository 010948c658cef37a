"""Programs that a shell, a terminal, a debugger or a profiler started, and that outlive it on purpose."""

import os
import shlex

import psutil

from tests.support.players.parts import Terminal, children, job, script, started_by_shell
from tests.support.players.stage import Stage, parent_of, status
from tests.support.players.tree import LEADER_ENDED, Builder, Cast, declared, healthy, launched, seems_left
from tests.support.requirements import require_tool
from tests.support.waiting import wait_until


@healthy
def disowned_job(stage: Stage) -> Cast:
    """Play ``program & disown`` at an interactive bash on a terminal, then ``exit``."""
    terminal = Terminal(stage)
    terminal.type(job(stage, after="</dev/null >/dev/null 2>&1 & disown"))
    return Cast(stage.hear("holder"), terminal.bash, terminal.exit)


@healthy
def pipeline(stage: Stage) -> Cast:
    """Play ``echo yes | program`` at a prompt: the leader of its group has ended, its parent lives."""
    terminal = Terminal(stage)
    terminal.type(job(stage, before="echo yes |", after=">/dev/null 2>&1"))
    holders = stage.hear("holder")
    leader = os.getpgid(holders[0].pid)
    wait_until(lambda: status(leader) in ("gone", psutil.STATUS_ZOMBIE), "echo does not end")
    return Cast(holders)


@healthy
def tmux_child(stage: Stage) -> Cast:
    """Play a program in a tmux window; the server lives, so the program is not an orphan."""
    require_tool("tmux")
    server = ["tmux", "-S", str(stage.directory / "tmux"), "-f", os.devnull]
    stage.run([*server, "new-session", "-d", "exec " + shlex.join(stage.command("holder"))])
    return Cast(stage.hear("holder"))


@healthy
def background_of_system(stage: Stage) -> Cast:
    """Play ``os.system("program &")`` of a live program: the shell between has ended at once."""
    starter = stage.start()
    starter.order("start", ["sh", "-c", '"$@" & exit 0', "sh", *stage.command("holder")], {})
    (holder,) = stage.hear("holder")
    wait_until(lambda: parent_of(holder.pid) != starter.pid, "the shell does not end")
    return Cast([holder])


def _in_the_background(words: str) -> Builder:
    """Return what has a shell start a holder in the background, and then end."""
    return lambda stage: started_by_shell(stage, ["sh", "-c", f'{words} "$@" & read _', "sh"])


def _by_a_script(stage: Stage) -> Cast:
    return started_by_shell(stage, [script(stage, "run-all.sh", '#!/bin/sh\n"$@" &\nread _\n')])


def _at_a_bash(before: str, after: str) -> Builder:
    """Return what types a holder at the prompt of a live bash."""

    def build(stage: Stage) -> Cast:
        Terminal(stage).type(job(stage, before, f"</dev/null >/dev/null 2>&1{after}"))
        return Cast(stage.hear("holder"))

    return build


def _outlived(program: str) -> Builder:
    """Return what plays holders that outlive the one, of a name that says why, that had started them."""
    return launched(lambda stage: stage.start(name=program), children)


SHORT = declared(
    nohup_job=(healthy, "``nohup program &`` of a shell that then ends", _in_the_background("nohup")),
    setsid_job=(healthy, "``setsid program &`` of a shell that then ends", _in_the_background("setsid")),
    rank_by_hand=(healthy, "``LOCAL_RANK=0 nohup program &`` of a shell that then ends",
        _in_the_background("LOCAL_RANK=0 nohup")),
    script_job=(healthy,
        "a job in the background of a shell script; the kernel calls the shell by the script's name",
        _by_a_script),
    second_of_a_list=(healthy, "``true && program`` at a prompt, in the foreground of a live bash",
        _at_a_bash("true &&", "")),
    subshell=(healthy, "``(cd here; program; true)`` at a prompt: the parent is a forked bash",
        _at_a_bash("(cd /;", "; true)")),
    terminal_closed=(seems_left(LEADER_ENDED),
        "a program whose terminal's server, of which the kernel keeps 15 letters, has ended",
        _outlived("gnome-terminal-server")),
    connection_lost=(seems_left(LEADER_ENDED),
        "a program that ``ssh HOST program`` started, after its connection is lost",
        _outlived("sshd-session")),
    screen_closed=(seems_left(LEADER_ENDED), "a program in a window of GNU screen whose server is killed",
        _outlived("screen")),
    run_by_sudo=(seems_left(LEADER_ENDED), "a program that outlives the sudo that started it",
        _outlived("sudo")),
    run_by_timeout=(seems_left(LEADER_ENDED), "a program that outlives the ``timeout`` around it",
        _outlived("timeout")),
    run_by_cron=(seems_left(LEADER_ENDED), "a job of cron, after cron was upgraded and started again",
        _outlived("cron")),
    sampled=(seems_left(LEADER_ENDED), "a program that ``py-spy record`` started, after py-spy is killed",
        _outlived("py-spy")),
    debugged=(seems_left(LEADER_ENDED), "a program that outlives the debugger that started it",
        _outlived("gdb")),
    profiled=(seems_left(LEADER_ENDED), "a program that outlives the profiler that started it",
        _outlived("nsys")),
)  # fmt: skip
