"""Daemons, services and what a supervisor keeps."""

from __future__ import annotations

from tests.support.players.stage import Stage, parent_of
from tests.support.players.tree import Cast, healthy
from tests.support.waiting import wait_until

MAIN_PROCESS = ("sh", "-c", 'export SYSTEMD_EXEC_PID=$$; exec "$@"', "sh")
"""A wrapper that gives a service's main process the variable that systemd gives it."""


@healthy
def double_fork_daemon(stage: Stage) -> Cast:
    """Play a classic daemon: its ancestors ended within the moment that made it."""
    starter = stage.start()
    between = starter.fork()
    between.order("lead_session")
    daemon = between.fork()
    between.end()
    starter.end()
    wait_until(lambda: parent_of(daemon.pid) != between.pid, "nobody adopts the daemon")
    return Cast([daemon])


@healthy
def ready_daemon(stage: Stage) -> Cast:
    """Play a daemon whose starter stays until it is ready, and can be seen as its parent."""
    starter = stage.start()
    daemon = starter.fork()
    daemon.order("lead_session")
    return Cast([daemon], starter)


@healthy
def systemd_service(stage: Stage) -> Cast:
    """Play the main process of a service, whose live parent the kernel calls ``systemd``."""
    manager = stage.start(name="systemd")
    return Cast([manager.start(session=True, wrapper=MAIN_PROCESS)])


@healthy
def supervised(stage: Stage) -> Cast:
    """Play the child of a live supervisor that is a subreaper as well."""
    supervisor = stage.start(("adopt",), ("reap",))
    return Cast([supervisor.start()])
