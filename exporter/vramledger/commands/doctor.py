"""Run ``vramledger doctor``: say what this host cannot see, and how to fix it."""

from __future__ import annotations

import argparse
from contextlib import aclosing
from pathlib import Path

from vramledger.agent_server.discovery import find_exporter
from vramledger.commands.arguments import (
    add_agent_socket,
    add_control,
    add_sampling,
    control_socket,
    sampling_config,
)
from vramledger.commands.diagnosis import ExporterContact, diagnose, findings_text
from vramledger.commands.exporter_ledger import follow_exporter
from vramledger.commands.interruption import run_until_interrupted
from vramledger.commands.output import write_output
from vramledger.commands.parser import Commands, add_log
from vramledger.errors import StartupError
from vramledger.readers.hosts.exporters import find_exporters
from vramledger.readers.launches.availability import find_obstacle
from vramledger.readers.own_rights import read_own_rights
from vramledger.sampling.supervisor import read_once


def add_command(commands: Commands) -> None:
    """Declare the command."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this host can and cannot see",
        description="Say what is not visible and how to fix it.",
    )
    add_agent_socket(doctor)
    add_control(doctor)
    add_sampling(doctor)
    add_log(doctor)
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Take one sample and print what it could not see; the exit status is 1 if there is anything."""
    config = sampling_config(args)
    (reading,) = run_until_interrupted(read_once(config))
    contact = run_until_interrupted(_contact_exporter(args, config.procfs))
    obstacle = find_obstacle(str(config.procfs))
    findings = list(diagnose(reading, read_own_rights(config.procfs), contact, obstacle))
    write_output(findings_text(findings))
    return 0 if all(finding.good for finding in findings) else 1


async def _contact_exporter(args: argparse.Namespace, procfs: Path) -> ExporterContact:
    """Find out whether commands and agents reach an exporter."""
    path = control_socket(args)
    problem: str | None = None
    since: float | None = None
    try:
        async with aclosing(follow_exporter(path)) as ledgers:  # type: ignore[type-var]
            since = (await ledgers.__anext__()).snapshot.watched_since
    except StartupError as error:
        problem = str(error)
    return ExporterContact(path, problem, since, find_exporter(args.agent_socket), find_exporters(procfs))
