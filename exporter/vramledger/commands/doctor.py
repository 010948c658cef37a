"""Run ``vramledger doctor``: say what this host does not let us see, and how to fix it."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from msgspec import Struct

from vramledger.agent_server.discovery import (
    NO_SOCKET,
    ExporterStatus,
    RunningExporter,
    find_exporter,
    find_exporters,
)
from vramledger.commands.arguments import add_control, add_sampling, control_socket, sampling_config
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.commands.samples import follow_exporter
from vramledger.config import AGENT_SOCKET, CONTROL_SOCKET, CONTROL_VARIABLE
from vramledger.errors import StartupError
from vramledger.model.reading import ASLEEP, DeviceReading, Reading
from vramledger.model.snapshot import Snapshot
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.own_process import OwnRights, read_own_rights
from vramledger.sampling.supervisor import read_once
from vramledger.serving.source import NO_DRIVER
from vramledger.verdicts.remedies import why_unusable, words_of_error
from vramledger_agent.client import is_trusted
from vramledger_agent.commands.parser import Commands, add_agent_socket, add_log, write_output
from vramledger_agent.printable import printable

FINE, LACK = True, False


class Finding(Struct, frozen=True):
    """One thing that was checked; a ``limit`` is not a fault; ``remedy`` is empty where nothing helps."""

    good: bool
    subject: str
    text: str
    remedy: str = ""
    limit: bool = False


class ExporterContact(NamedTuple):
    """Whether commands and agents reach an exporter."""

    path: Path  # where commands look for it
    problem: str | None  # why it gives no answer there, None if it does
    snapshot: Snapshot | None  # its newest one, None if it does not answer
    agents: ExporterStatus | None  # the state of the agents' socket, None if the exporter takes no agents
    running: tuple[RunningExporter, ...]  # the exporters that run, wherever their sockets are
    players: tuple[RunningExporter, ...] = ()  # what plays a recording, which commands do not ask


def diagnose(
    reading: Reading, own_rights: OwnRights, contact: ExporterContact | None = None
) -> Iterator[Finding]:
    """Yield what was found, the most important first."""
    yield from _driver(reading)
    yield _namespace(reading, own_rights)
    yield from _rights(reading, own_rights)
    if contact is not None:
        yield from _exporter(contact)
    if reading.failure is None:
        yield from _limits(reading, contact)


_IDLE = (
    *("GpuMemoryHoarded", "GpuMemoryHoardedInPieces", "GpuMemoryHoardedWhileShort"),
    *("GpuNotebookIdle", "GpuStrayContext"),
)
_HOLDERS = (
    *("GpuMemoryDead", "GpuMemoryOrphaned", "GpuMemoryZombie", "GpuMemoryStuck", "GpuMemoryStopped"),
    *_IDLE,
)
_WAITS = ("GpuBusyWithoutWork", "GpuJobHung")
_AGENT = (
    *("GpuMemoryLeakSuspected", "GpuFrameworkCacheHigh", "GpuMemoryFragmented", "GpuAllocatorRetries"),
    *("GpuOutOfMemory", "VramLedgerAgentSilent"),
)


def _limit(why: str, alerts: tuple[str, ...], remedy: str = "", about: str = "") -> Finding:
    """Return what is never known here: why, and the alerts that never fire, or not for what it is about."""
    return Finding(FINE, "alerts", f"{why}; never fires{about}: {', '.join(alerts)}", remedy, limit=True)


def _limits(reading: Reading, contact: ExporterContact | None) -> Iterator[Finding]:
    """Say what the exporter, as it runs, will never tell; without one, what one with our rights would not."""
    snapshot = contact.snapshot if contact is not None else None
    if snapshot is not None and snapshot.up:
        devices = tuple(each.reading for each in snapshot.devices)
        namespace, collectors = snapshot.host_pid_namespace, snapshot.collectors
        scheduled = any(each.reservation_status is not None for each in snapshot.devices)
    else:
        devices, namespace, collectors = reading.devices, reading.host_pid_namespace, reading.collectors
        scheduled = bool(reading.schedulers)
    yield from _limits_of_devices([each for each in devices if each.error is None and not each.divided])
    yield from _limits_of_holders(collectors, known=namespace is True)
    if contact is not None:
        yield from _limits_of_agents(contact.agents)
    if not scheduled:
        yield _limit("no scheduler assigns GPUs here", ("GpuReservedUnused", "GpuMemoryOutsideReservation"))


def _limits_of_agents(agents: ExporterStatus | None) -> Iterator[Finding]:
    """Yield what is not known of the insides of programs; only root sees everybody's agents."""
    why = "no agent reports from a program"
    if agents is None:
        yield _limit(why, _AGENT, "leave out --no-collector.agent")
    elif os.geteuid() == 0 and not agents.agents:
        yield _limit(why, _AGENT, "start programs with 'vramledger run -- COMMAND'")


def _limits_of_devices(devices: Sequence[DeviceReading]) -> Iterator[Finding]:
    def named(lacking: Sequence[DeviceReading]) -> str:
        every = len(lacking) == len(devices)
        return "" if every else f" on GPU {', '.join(str(each.index) for each in lacking)}"

    if silent := [each for each in devices if each.activity is None]:
        why = f"no counters of GPM{named(silent)} (Hopper and newer have them): whether a busy GPU computes"
        yield _limit(f"{why} or waits is not known", _WAITS)
    if silent := [each for each in devices if (each.utilization or {}).get("gpu") is None]:
        yield _limit(f"no utilisation{named(silent)}", ("GpuHeldHardlyUsed",))


def _limits_of_holders(collectors: Mapping[str, tuple[bool, float]], *, known: bool) -> Iterator[Finding]:
    threads = collectors.get("threads", (False, 0.0))[0]
    if not known:
        yield _limit("holders cannot be seen from here", _HOLDERS, "the remedy above")
    elif not threads:
        why = "threads are not looked at, so idleness is only inferred where there are no counters of GPM"
        yield _limit(why, _IDLE, "leave out --no-collector.threads, or see the log")
    else:
        why = "idleness of a program that a clock wakes (uvicorn, gunicorn, a loop) is only inferred"
        yield _limit(why, _IDLE, about=" for it")
    for name, alerts in (("hidden", ("GpuHiddenHolder",)), ("xid", ("GpuXidError",))):
        if not collectors.get(name, (False, 0.0))[0]:
            remedy = f"leave out --no-collector.{name}, or see the log"
            yield _limit(f"the collector {name} gives nothing", alerts, remedy)


def _exporter(contact: ExporterContact) -> Iterator[Finding]:
    subject = f"exporter {contact.path}"
    others = [each for each in contact.running if each.control_socket not in (None, str(contact.path))]
    if contact.problem is None:
        since = ""
        if contact.snapshot is not None and contact.snapshot.watched_since is not None:
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(contact.snapshot.watched_since))
            since = f", and has watched since {clock}"
        yield Finding(FINE, subject, f"commands ask it{since}")
    elif others:
        where = ", ".join(f"pid {each.pid} at {each.control_socket}" for each in others)
        path = quote(others[0].control_socket or "")
        remedy = f"add --control.socket={path} to commands, or set {CONTROL_VARIABLE}"
        yield Finding(LACK, subject, f"an exporter listens elsewhere: {where}", remedy)
    elif contact.running:
        pids = ", ".join(str(each.pid) for each in contact.running)
        text, _, remedy = contact.problem.rpartition("; ")
        text, remedy = (text, remedy) if text else (remedy, "see its log")
        yield Finding(LACK, subject, f"an exporter runs (pid {pids}), but {text}", remedy)
    else:
        players = ", ".join(f"pid {each.pid} plays a recording" for each in contact.players)
        text = f"no exporter of this host runs ({players})" if players else "no exporter runs"
        text += ": commands know nothing of before, such as who was idle or orphaned"
        yield Finding(LACK, subject, text, "start 'vramledger serve', for example as a service")
    known = contact.problem is None or bool(contact.running)
    if contact.agents is not None and (known or contact.agents.problem != NO_SOCKET):
        yield _agents(contact.agents, contact.running)


def _agents(status: ExporterStatus, running: Collection[RunningExporter]) -> Finding:
    subject = f"agents {status.path}"
    elsewhere = [each.agent_socket for each in running if each.agent_socket not in (None, str(status.path))]
    if status.problem == NO_SOCKET and elsewhere:
        remedy = f"start programs with VRAMLEDGER_AGENT_SOCKET={quote(elsewhere[0] or '')}"
        return Finding(LACK, subject, f"the exporter listens for agents at {elsewhere[0]}", remedy)
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
        if (unusable := why_unusable(device)) is not None:
            yield Finding(LACK, subject, *unusable)
            continue
        if device.error == ASLEEP:
            yield Finding(FINE, subject, words_of_error(device))
            continue
        if device.error is not None:
            remedy = "see 'dmesg | grep -i xid'; a lost GPU needs a reset or a reboot"
            yield Finding(LACK, subject, f"gives {words_of_error(device)}", remedy)
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
                # the driver has none of a MIG instance
                ("process utilisation", device.process_utilization if device.parent is None else ()),
                ("GPM's counters", device.activity),
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
    for each in reading.schedulers:
        text = f"assigns GPUs here; {len(each.grants)} reservation(s) at the moment"
        remedy = "" if each.complete else "the remedy for privileges, above"
        lack = "" if each.complete else ", but we may not read the environment of some of its jobs"
        yield Finding(each.complete, each.name, text + lack, remedy)
    denied = sorted({name for facts in reading.facts for name in facts.denied})
    if denied:
        count = sum(1 for facts in reading.facts if facts.denied)
        what = f"{count} holder(s) whose {', '.join(denied)} we cannot read"
        if lacking:
            yield Finding(LACK, "holders", what, "the remedy for privileges, above")
        else:  # no right brings it back
            yield Finding(FINE, "holders", f"{what}: a title overwrites an environment, and reads may hang")
    unseen = sum(1 for why in reading.unseen.values() if why == "denied")
    if unseen:
        yield Finding(
            LACK,
            "holders",
            f"{unseen} process(es) that NVML lists and /proc hides from us: their state is unknown",
            "the remedy for /proc or privileges, above",
        )


def findings_text(findings: list[Finding]) -> str:
    """Return the findings as text: one line for each, and its remedy below it."""
    lines: list[str] = []
    for finding in findings:
        mark = "LIMIT" if finding.limit else "ok" if finding.good else "LACK"
        lines.append(f"{mark:<6}{finding.subject}: {finding.text}")
        if finding.remedy:
            lines.append(f"      remedy: {finding.remedy}")
    return "\n".join(map(printable, lines)) + "\n"


def add_command(commands: Commands) -> None:
    """Declare the command."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this host can and cannot see",
        description="Say what is not visible and how to fix it.",
    )
    add_agent_socket(doctor, default=None)
    add_control(doctor)
    add_sampling(doctor)
    add_log(doctor)
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Take one sample, and print what it and the exporter do not see; the exit status is 1 for any lack."""
    config = sampling_config(args)
    (reading,) = run_until_interrupted(read_once(config))
    contact = run_until_interrupted(_contact_exporter(args, config.procfs, reading))
    findings = list(diagnose(reading, read_own_rights(config.procfs), contact))
    write_output(findings_text(findings))
    return 0 if all(finding.good for finding in findings) else 1


async def _contact_exporter(args: argparse.Namespace, procfs: Path, reading: Reading) -> ExporterContact:
    path = control_socket(args)
    problem: str | None = None
    snapshot: Snapshot | None = None
    agent_socket: Path | None = AGENT_SOCKET
    try:
        async with aclosing(follow_exporter(path)) as ledgers:  # type: ignore[type-var]
            snapshot, *_, agent_socket = await ledgers.__anext__()
    except StartupError as error:
        problem = str(error)
    found = find_exporters(procfs)
    players = tuple(each for each in found if _plays(each, reading))
    host = Host(procfs)
    running = tuple(each for each in found if each not in players and _is_exporter(each, host))
    agent_socket = args.agent_socket or agent_socket
    agents = find_exporter(agent_socket) if agent_socket is not None else None
    return ExporterContact(path, problem, snapshot, agents, running, players)


def _plays(found: RunningExporter, reading: Reading) -> bool:
    """Tell whether it plays a recording: commands do not ask such a one, and it has no sockets."""
    none = reading.failure is not None and reading.failure[0] in NO_DRIVER
    source = found.source or ""
    return source.startswith("replay:") or (source == "auto" and none)


def _is_exporter(found: RunningExporter, host: Host) -> bool:
    """Tell whether what looks like an exporter may be named: anybody can make a program look so."""
    if found.agent_socket is not None and not is_trusted(Path(found.agent_socket), socket.SOCK_SEQPACKET):
        return False
    if is_trusted(Path(found.control_socket or CONTROL_SOCKET), socket.SOCK_STREAM):
        return True
    # One that could not make the usual socket goes on without.
    ours = host.is_roots(found.pid) or host.uid(found.pid) == os.geteuid() != 0
    return found.control_socket is None and ours
