"""Daemons, services and what a supervisor keeps."""

from tests.support.players.parts import MAIN_PROCESS, double_fork, two_forks
from tests.support.players.stage import Player, Stage, parent_of
from tests.support.players.tree import LEADER_ENDED, Cast, declared, healthy, launched, leftover
from tests.support.waiting import wait_until


@healthy
def double_fork_daemon(stage: Stage) -> Cast:
    """Play a classic daemon: its ancestors ended within the moment that made it."""
    starter = stage.start()
    daemon = double_fork(starter)
    starter.end()
    return Cast([daemon])


@healthy
def ready_daemon(stage: Stage) -> Cast:
    """Play a daemon whose starter stays until it is ready, and can be seen as its parent."""
    starter = stage.start()
    daemon = starter.fork()
    daemon.order("lead_session")
    return Cast([daemon], starter)


@healthy
def upgraded_server(stage: Stage) -> Cast:
    """Play workers of a server that was upgraded in place: the old master has ended, the new one lives."""
    old = stage.start()
    new = old.start(("lead_session",))
    workers = [new.fork() for _ in range(2)]
    old.end()
    wait_until(lambda: parent_of(new.pid) != old.pid, "nobody adopts the new master")
    return Cast(workers)


def _in_a_session(starter: Player) -> list[Player]:
    return [starter.start(session=True)]


SHORT = declared(
    systemd_service=(healthy, "the main process of a service, whose live parent the kernel calls ``systemd``",
        lambda stage: Cast([stage.start(name="systemd").start(session=True, wrapper=MAIN_PROCESS)])),
    supervised=(healthy, "the child of a live supervisor that is a subreaper as well",
        lambda stage: Cast([stage.start(("adopt",), ("reap",)).start()])),
    detached=(healthy, "``Popen(..., start_new_session=True)`` of a program that then ends",
        launched(Stage.start, _in_a_session)),
    worker_of_a_master=(healthy, "pre-forked workers of a live web server (gunicorn, uwsgi)",
        lambda stage: Cast(two_forks(stage.start()))),
    restarted_supervisor=(healthy,
        "a service that supervisord started in a session of its own, after supervisord is killed",
        launched(lambda stage: stage.start(name="supervisord"), _in_a_session)),
    orphaned_workers_of_a_master=(leftover(late=LEADER_ENDED),
        "pre-forked workers of a daemon that is then killed", launched(Stage.start, two_forks)),
)  # fmt: skip
