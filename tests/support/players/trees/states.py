"""Processes that have ended, are stopped, or have half ended."""

import psutil

from tests.support.players.stage import Stage, status
from tests.support.players.tree import Cast, other
from tests.support.waiting import wait_until


@other("alive", "")
def zombie_leader(stage: Stage) -> Cast:
    """Play a process whose main thread has ended while another thread lives on."""
    holder = stage.start()
    holder.order("end_main_thread")
    wait_until(lambda: status(holder.pid) == psutil.STATUS_ZOMBIE, "the leader does not end")
    return Cast([holder])


@other("zombie", "it has exited, its parent has not reaped it")
def zombie(stage: Stage) -> Cast:
    """Play a process that has ended and that its live parent does not reap."""
    holder = stage.start().start()
    holder.end()
    return Cast([holder])


@other("stopped", "stopped by SIGSTOP")
def stopped(stage: Stage) -> Cast:
    """Play a process that somebody has stopped."""
    holder = stage.start()
    holder.stop()
    return Cast([holder])


@other("dead", "this host has no such process")
def dead(stage: Stage) -> Cast:
    """Play a process that has ended and was reaped."""
    holder = stage.start()
    holder.end()
    return Cast([holder])
