"""Find the step daemons of Slurm on this host: they show which steps run.

``slurmstepd`` is a process of root that writes its step into its title (``slurmstepd: [4711.batch]``). It
lives exactly as long as its step, with every plugin that tracks processes and with both versions of cgroups.
slurmd is there between the jobs too: where it is seen, a missing step daemon proves that its step has ended.
"""

from __future__ import annotations

import re

from vramledger.readers.hosts.host import Host

STEP_DAEMON = "slurmstepd"
_NODE_DAEMONS = ("slurmd", "slurmd-wlm")
_TITLE = re.compile(rb"slurmstepd: \[(\d{1,10})(?:\+\d+)?\.([\w.]+?)(?:\+\d+)?\]")


def step_of_daemon(host: Host, pid: int) -> tuple[str, str] | None:
    """Return job and step of a step daemon, None for any other process."""
    if host.comm(pid) != STEP_DAEMON or host.uid(pid) != 0:
        return None
    match = _TITLE.match(host.title(pid))
    return (match[1].decode(), match[2].decode()) if match else None


def running_steps(host: Host) -> frozenset[tuple[str, str]] | None:
    """Return job and step of every step daemon on this host; None if not even slurmd is seen here."""
    found: set[tuple[str, str]] = set()
    slurmd = False
    for pid in host.pids():
        name = host.comm(pid)
        # Debian's packages name the program slurmd-wlm.
        if name is not None and name in _NODE_DAEMONS and host.uid(pid) == 0:
            slurmd = True
        elif name == STEP_DAEMON and (step := step_of_daemon(host, pid)) is not None:
            found.add(step)
    return frozenset(found) if found or slurmd else None
