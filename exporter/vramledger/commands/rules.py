"""``vramledger rules``: the alert rules for Prometheus, with thresholds of one's own."""

from __future__ import annotations

import argparse

from vramledger import __version__
from vramledger.commands.alert_rules import alertmanager_example, rendered_files, written
from vramledger.commands.alert_settings import HOME, add_thresholds, given_settings, refused
from vramledger_agent.commands.parser import Commands, add_log, write_output


def add_command(commands: Commands) -> None:
    """Declare the command."""
    rules = commands.add_parser(
        "rules",
        help="write the alert rules for Prometheus, with your thresholds",
        description="Write all recording and alerting rules to standard output, as one file for Prometheus.",
    )
    which = rules.add_mutually_exclusive_group()
    add_thresholds(which)
    which.add_argument(
        "--defaults", action="store_true", help="write the default thresholds instead, each with its reason"
    )
    rules.add_argument(
        "--alertmanager", action="store_true",
        help="write Alertmanager's example instead, with the labels, severities and names of these rules",
    )  # fmt: skip
    add_log(rules)
    rules.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the rules, or the default thresholds."""
    if args.defaults:
        write_output((HOME / "thresholds.yml").read_text(encoding="utf-8"))
        return 0
    settings = given_settings(args.thresholds)
    try:
        if args.alertmanager:
            write_output(alertmanager_example(settings))
            return 0
        files = rendered_files(settings)
    except ValueError as error:
        raise refused(args.thresholds, error) from error
    groups = [group for content in files.values() for group in content["groups"]]
    head = f"# Written by 'vramledger rules', version {__version__}: change the thresholds, not this file.\n"
    write_output(head + written({"groups": groups}))
    return 0
