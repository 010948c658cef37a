"""Programs that a shell, a terminal, a debugger or a profiler started, and that outlive it on purpose."""

import os
import shlex

import psutil

from tests.support.players.parts import Terminal, children, job, script, started_by_shell
from tests.support.players.stage import Stage, parent_of, status
from tests.support.players.tree import LEADER_ENDED, Cast, Tree, healthy, seems_left
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


def _outlived(name: str, program: str, what: str) -> Tree:
    """Declare a program that outlives the one, of a name that says why, that had started it."""

    def build(stage: Stage) -> Cast:
        starter = stage.start(name=program)
        return Cast(children(starter), starter)

    build.__name__, build.__doc__ = name, f"Play {what}."
    return seems_left(LEADER_ENDED)(build)


terminal_closed = _outlived(
    "terminal_closed",
    "gnome-terminal-server",
    "a program whose terminal's server, of which the kernel keeps 15 letters, has ended",
)
connection_lost = _outlived(
    "connection_lost",
    "sshd-session",
    "a program that ``ssh HOST program`` started, after its connection is lost",
)
screen_closed = _outlived(
    "screen_closed", "screen", "a program in a window of GNU screen whose server is killed"
)
run_by_sudo = _outlived("run_by_sudo", "sudo", "a program that outlives the sudo that started it")
run_by_timeout = _outlived("run_by_timeout", "timeout", "a program that outlives the ``timeout`` around it")
run_by_cron = _outlived("run_by_cron", "cron", "a job of cron, after cron was upgraded and started again")
sampled = _outlived("sampled", "py-spy", "a program that ``py-spy record`` started, after py-spy is killed")


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


debugged = _outlived("debugged", "gdb", "a program that outlives the debugger that started it")
profiled = _outlived("profiled", "nsys", "a program that outlives the profiler that started it")
