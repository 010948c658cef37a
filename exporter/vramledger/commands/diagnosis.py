"""Find what this host does not let us see, and how to fix it.

Findings are pure conclusions from one reading and a few facts about our own process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vramledger.agent_server.discovery import NO_SOCKET, ExporterStatus
from vramledger.config import CONTROL_VARIABLE
from vramledger.model.reading import DeviceReading, Reading
from vramledger.printable import printable
from vramledger.readers.hosts.exporters import RunningExporter
from vramledger.readers.own_rights import OwnRights

FINE, LACK = True, False


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked; ``remedy`` is empty if nothing is wrong."""

    good: bool
    subject: str
    text: str
    remedy: str = ""


class ExporterContact(NamedTuple):
    """Whether commands and agents reach an exporter.

    Attributes:
        path: where commands look for it.
        problem: why it gives no answer there, None if it does.
        watched_since: Unix time since which it has watched.
        agents: the state of the agents' socket.
        running: the exporters that run, wherever their sockets are.
    """

    path: Path
    problem: str | None
    watched_since: float | None
    agents: ExporterStatus
    running: tuple[RunningExporter, ...]


def diagnose(
    reading: Reading,
    own_rights: OwnRights,
    contact: ExporterContact | None = None,
    launch_obstacle: str | None = None,
) -> Iterator[Finding]:
    """Yield what was found, the most important first.

    Args:
        reading: one sample.
        own_rights: our own rights.
        contact: how commands and agents reach an exporter.
        launch_obstacle: why launches cannot be counted, empty if they can; None where nobody has tried.
    """
    yield from _driver(reading)
    yield _namespace(reading, own_rights)
    yield from _rights(reading, own_rights)
    if launch_obstacle is not None:
        yield _launches(launch_obstacle)
    if contact is not None:
        yield from _exporter(contact)


def _launches(obstacle: str) -> Finding:
    """Say whether launches could be counted; that they cannot is not a fault, as few hosts need it."""
    if obstacle:
        return Finding(
            FINE, "launches", f"cannot be counted ({obstacle}); only --collector.launches needs this"
        )
    return Finding(FINE, "launches", "can be counted with 'vramledger serve --collector.launches'")


def _exporter(contact: ExporterContact) -> Iterator[Finding]:
    """Say whether commands and agents reach an exporter."""
    subject = f"exporter {contact.path}"
    others = [each for each in contact.running if each.control_socket not in (None, str(contact.path))]
    if contact.problem is None:
        since = ""
        if contact.watched_since is not None:
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(contact.watched_since))
            since = f", and has watched since {clock}"
        yield Finding(FINE, subject, f"commands ask it{since}")
    elif others:
        where = ", ".join(f"pid {each.pid} at {each.control_socket}" for each in others)
        remedy = f"add --control.socket={others[0].control_socket} to commands, or set {CONTROL_VARIABLE}"
        yield Finding(LACK, subject, printable(f"an exporter listens elsewhere: {where}"), printable(remedy))
    elif contact.running:
        pids = ", ".join(str(each.pid) for each in contact.running)
        text, _, remedy = contact.problem.rpartition("; ")
        text, remedy = (text, remedy) if text else (remedy, "see its log")
        yield Finding(LACK, subject, f"an exporter runs (pid {pids}), but {text}", remedy)
    else:
        text = "no exporter runs: commands know nothing of before, such as who was idle or orphaned"
        yield Finding(LACK, subject, text, "start 'vramledger serve', for example as a service")
    if contact.agents.problem != NO_SOCKET or contact.running:
        yield _agents(contact.agents, contact.running)


def _agents(status: ExporterStatus, running: Collection[RunningExporter]) -> Finding:
    """Say whether agents can reach an exporter."""
    subject = f"agents {status.path}"
    elsewhere = [each.agent_socket for each in running if each.agent_socket not in (None, str(status.path))]
    if status.problem == NO_SOCKET and elsewhere:
        remedy = f"start programs with VRAMLEDGER_AGENT_SOCKET={elsewhere[0]}"
        return Finding(
            LACK, subject, printable(f"the exporter listens for agents at {elsewhere[0]}"), printable(remedy)
        )
    if status.problem is not None:
        remedy = "start the exporter again, and see its log for 'No agents'"
        return Finding(LACK, subject, status.problem, remedy)
    if not status.open_to_all:
        remedy = "chmod a+rw the socket, a+x the directories above it (RuntimeDirectoryMode=0755 in systemd)"
        return Finding(LACK, subject, "programs of other users cannot reach the exporter", remedy)
    whose = "" if os.geteuid() == 0 else " of your own"
    return Finding(
        FINE, subject, f"an exporter listens, every user can reach it; {status.agents} agent(s){whose}"
    )


def _driver(reading: Reading) -> Iterator[Finding]:
    if reading.failure is not None:
        text, _, remedy = reading.failure[1].rpartition("; ")  # every such message says once what to do
        yield Finding(LACK, "driver", text or remedy, remedy if text else "see the log at --log.level=debug")
        return
    cuda = f", CUDA up to {reading.cuda_version}" if reading.cuda_version else ""
    yield Finding(FINE, "driver", f"{reading.driver_version or 'unknown version'}{cuda}")
    for device in reading.devices:
        subject = f"GPU {device.index} {device.uuid}"
        if device.error is not None:
            remedy = "see 'dmesg | grep -i xid'; a lost GPU needs a reset or a reboot"
            yield Finding(LACK, subject, f"gives no data: {device.error}", remedy)
            continue
        if device.divided:
            yield Finding(FINE, subject, "is divided into MIG instances")
            continue
        if device.partition is not None:
            text = (
                f"NVML shows us only a part of it: our own cgroup may take {device.partition / 2**30:.2f} GiB"
            )
            yield Finding(LACK, subject, text, "run the exporter outside of any memory partition (dmem.max)")
        lacking = [
            name
            for name, value in (
                ("memory", device.memory),
                ("process list", device.processes),
                *_signs_of_work(device),
            )
            if value is None
        ]
        if device.memory is not None and device.memory.reserved is None and device.memory_kind is None:
            lacking.append("the driver's reserve (old driver: it counts as unattributed)")
        text = f"{device.name or 'a GPU'}; " + (
            f"not reported: {', '.join(lacking)}" if lacking else "tells everything"
        )
        yield Finding(
            not device.failed, subject, text, "" if not device.failed else "see the log at --log.level=debug"
        )


def _signs_of_work(device: DeviceReading) -> tuple[tuple[str, object], ...]:
    """Return what tells who works, with what it means if the driver does not report it.

    The driver has no utilisation of a MIG instance; its GPU's counters say as much.
    """
    if device.parent is not None:
        return (("GPM's counters (so idleness is not known without --collector.launches)", device.activity),)
    return (
        ("process utilisation (so idleness is not known)", device.process_utilization),
        ("GPM's counters (so idleness is only inferred, never proven)", device.activity),
    )


def _namespace(reading: Reading, own_rights: OwnRights) -> Finding:
    if own_rights.wsl:
        text = "this is WSL2: programs of Windows use the same GPU, and the driver lists none of them here"
        return Finding(LACK, "processes", text, "run vramledger on a Linux host to see every holder")
    if reading.host_pid_namespace:
        return Finding(FINE, "PID namespace", "the host's: every process on a GPU can be seen")
    if reading.host_pid_namespace is None:
        return Finding(LACK, "PID namespace", "not known", "fix what is above, and run this again")
    return Finding(
        LACK,
        "PID namespace",
        "not the host's: NVML lists no processes to us, and dead holders cannot be found",
        "run on the host, or with 'docker run --pid=host', or 'hostPID: true' in the pod's spec",
    )


def _rights(reading: Reading, own_rights: OwnRights) -> Iterator[Finding]:
    lacking = sorted({"sys_ptrace", "dac_read_search"} - own_rights.capabilities)
    if lacking:
        names = " and ".join(f"CAP_{name.upper()}" for name in lacking)
        yield Finding(
            LACK,
            "privileges",
            f"without {names}, environments and open files of other users' processes cannot be read:"
            " late-seen orphans and hidden holders may be missed",
            f"run as root, or give {names} (AmbientCapabilities= in systemd, capabilities.add in Kubernetes)",
        )
    else:
        yield Finding(FINE, "privileges", "environments and open files of every process can be read")
    if own_rights.hidepid and "sys_ptrace" in lacking:
        yield Finding(
            LACK,
            "/proc",
            "mounted with hidepid: processes of other users are invisible and show as unknown",
            "run as root or with CAP_SYS_PTRACE, or in the group that the mount option gid= names",
        )
    yield from _schedulers(reading)
    denied = sorted({name for facts in reading.facts for name in facts.denied})
    if denied:
        count = sum(1 for facts in reading.facts if facts.denied)
        yield Finding(
            LACK,
            "holders",
            f"{count} holder(s) whose {', '.join(denied)} we may not read",
            "the remedy for privileges, above",
        )
    unseen = sum(1 for why in reading.unseen.values() if why == "denied")
    if unseen:
        yield Finding(
            LACK,
            "holders",
            f"{unseen} process(es) that NVML lists and /proc hides from us: their state is unknown",
            "the remedy for /proc or privileges, above",
        )


def _schedulers(reading: Reading) -> Iterator[Finding]:
    for each in reading.schedulers:
        text = f"assigns GPUs here; {len(each.grants)} reservation(s) at the moment"
        remedy = "" if each.complete else "the remedy for privileges, above"
        lack = "" if each.complete else ", but we may not read the environment of some of its jobs"
        yield Finding(each.complete, each.name, text + lack, remedy)


def findings_text(findings: list[Finding]) -> str:
    """Return the findings as text: one line for each, and its remedy below it."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{'ok  ' if finding.good else 'LACK'}  {finding.subject}: {finding.text}")
        if finding.remedy:
            lines.append(f"      remedy: {finding.remedy}")
    return "\n".join(lines) + "\n"
