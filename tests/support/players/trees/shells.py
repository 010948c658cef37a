"""Programs that a shell, a terminal, a debugger or a profiler started, and that outlive it on purpose."""

import os
import shlex

import psutil

from tests.support.players.parts import Terminal, children, job, script, started_by_shell
from tests.support.players.stage import Stage, parent_of, status
from tests.support.players.tree import LEADER_ENDED, Cast, healthy, seems_left
from tests.support.requirements import require_tool
from tests.support.waiting import wait_until


@healthy
def nohup_job(stage: Stage) -> Cast:
    """Play ``nohup program &`` of a shell that then ends."""
    return started_by_shell(stage, ["sh", "-c", 'nohup "$@" & read _', "sh"])


@healthy
def setsid_job(stage: Stage) -> Cast:
    """Play ``setsid program &`` of a shell that then ends."""
    require_tool("setsid")
    return started_by_shell(stage, ["sh", "-c", 'setsid "$@" & read _', "sh"])


@healthy
def script_job(stage: Stage) -> Cast:
    """Play a job in the background of a shell script; the kernel calls the shell by the script's name."""
    return started_by_shell(stage, [script(stage, "run-all.sh", '#!/bin/sh\n"$@" &\nread _\n')])


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


@seems_left(LEADER_ENDED)
def terminal_closed(stage: Stage) -> Cast:
    """Play a program whose terminal's server, of which the kernel keeps 15 letters, has ended."""
    return _outlived(stage, "gnome-terminal-server")


@seems_left(LEADER_ENDED)
def connection_lost(stage: Stage) -> Cast:
    """Play a program that ``ssh HOST program`` started, after its connection is lost."""
    return _outlived(stage, "sshd-session")


@seems_left(LEADER_ENDED)
def screen_closed(stage: Stage) -> Cast:
    """Play a program in a window of GNU screen whose server is killed."""
    return _outlived(stage, "screen")


@seems_left(LEADER_ENDED)
def run_by_sudo(stage: Stage) -> Cast:
    """Play a program that outlives the sudo that started it."""
    return _outlived(stage, "sudo")


@seems_left(LEADER_ENDED)
def run_by_timeout(stage: Stage) -> Cast:
    """Play a program that outlives the ``timeout`` around it."""
    return _outlived(stage, "timeout")


@seems_left(LEADER_ENDED)
def run_by_cron(stage: Stage) -> Cast:
    """Play a job of cron, after cron was upgraded and started again."""
    return _outlived(stage, "cron")


@seems_left(LEADER_ENDED)
def sampled(stage: Stage) -> Cast:
    """Play a program that ``py-spy record`` started, after py-spy is killed."""
    return _outlived(stage, "py-spy")


@healthy
def rank_by_hand(stage: Stage) -> Cast:
    """Play ``LOCAL_RANK=0 nohup program &`` of a shell that then ends."""
    return started_by_shell(stage, ["sh", "-c", 'LOCAL_RANK=0 nohup "$@" & read _', "sh"])


@healthy
def second_of_a_list(stage: Stage) -> Cast:
    """Play ``true && program`` at a prompt, in the foreground of a live bash."""
    terminal = Terminal(stage)
    terminal.type(job(stage, before="true &&", after="</dev/null >/dev/null 2>&1"))
    return Cast(stage.hear("holder"))


@healthy
def subshell(stage: Stage) -> Cast:
    """Play ``(cd here; program; true)`` at a prompt: the parent is a forked bash."""
    terminal = Terminal(stage)
    terminal.type(job(stage, before="(cd /;", after="</dev/null >/dev/null 2>&1; true)"))
    return Cast(stage.hear("holder"))


@healthy
def background_of_system(stage: Stage) -> Cast:
    """Play ``os.system("program &")`` of a live program: the shell between has ended at once."""
    starter = stage.start()
    starter.order("start", ["sh", "-c", '"$@" & exit 0', "sh", *stage.command("holder")], {})
    (holder,) = stage.hear("holder")
    wait_until(lambda: parent_of(holder.pid) != starter.pid, "the shell does not end")
    return Cast([holder])


@seems_left(LEADER_ENDED)
def debugged(stage: Stage) -> Cast:
    """Play a program that outlives the debugger that started it."""
    return _outlived(stage, "gdb")


@seems_left(LEADER_ENDED)
def profiled(stage: Stage) -> Cast:
    """Play a program that outlives the profiler that started it."""
    return _outlived(stage, "nsys")


def _outlived(stage: Stage, program: str) -> Cast:
    starter = stage.start(name=program)
    return Cast(children(starter), starter)
