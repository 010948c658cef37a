"""``vramledger report``: tell each user what they hold without work, since when, and how to end it."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from email.message import EmailMessage
from email.policy import EmailPolicy
from pathlib import Path
from typing import NamedTuple

from vramledger.commands.alert_settings import Override, add_thresholds, given_settings
from vramledger.commands.arguments import add_control, control_socket, size
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.commands.samples import follow_exporter
from vramledger.errors import StartupError, UsageError
from vramledger.model.reading import Owner
from vramledger.model.snapshot import DeviceSnapshot, Grade, Holding, Snapshot, State
from vramledger.serving.control_client import NoExporterError
from vramledger.verdicts.remedies import remedy
from vramledger_agent.commands.parser import Commands, add_log, duration, write_output
from vramledger_agent.printable import gib, printable

_SENDMAIL = Path("/usr/sbin/sendmail")
_SECONDS = 10.0
"""How long a mail program or a webhook may take."""

_WHOLE_LINES = EmailPolicy(max_line_length=998)
"""As long as a line of a mail may be: a shorter limit encodes ours, and some readers break a command then."""

_PERSON = re.compile(r"[A-Za-z_][\w.+-]*(@[\w.-]+)?", re.ASCII)
"""A name to which mail can go; a number is a user whom the host does not know."""

_WORDS = {
    State.DEAD: "does not exist any more",
    State.ZOMBIE: "has exited, and its memory is still held",
    State.STUCK: "is stuck in the driver",
    State.ORPHANED: "does nothing, and the program that started it has ended",
    State.STOPPED: "has been stopped",
    State.IDLE: "has done nothing",
}

_INFERRED = (
    "inferred: nobody saw it work, and this GPU does not tell of each program whether it does. "
    "If it works, leave it.\n"
)


_PATIENCE = {
    State.ORPHANED: ("orphaned_after", "orphaned_bytes"),
    State.STOPPED: ("stopped_after", "stopped_bytes"),
    State.IDLE: ("hoarded_idle", ""),
}
"""The thresholds that say after how long, and from which size on, an owner's memory concerns the alerts."""


_PLAIN = (
    (r"[^\w .:+=,/-]|//+|(?i:www\.)", "?"),  # mentions, links, bold and code
    (r"(?<!\w)_+", "?"),  # the beginning of italics
    (r":([^ :]+):", r"?\1?"),  # a picture
    ("([A-Za-z]):([A-Za-z])", r"\1?\2"),  # a scheme
)
"""What chats and mail readers make of a text, and what replaces it: `plain` in alerts/src/snippets.yml."""


class Unused(NamedTuple):
    """Memory that a program holds without work."""

    user: str  # the name of its user; empty when not known
    command: str  # the name of its program; empty when not known
    device: DeviceSnapshot  # where
    holding: Holding  # the bytes and why
    notebook: str  # the path of its notebook, empty where it is none
    advice: str  # what the administrator can do
    spared: bool  # its user gets no message of it


def add_command(commands: Commands) -> None:
    """Declare the command."""
    report = commands.add_parser(
        "report",
        help="tell each user what their programs hold without work",
        description="Say what is held without work, since when, and how to end it. Without --mail and "
        "--webhook print it; with them send each user their own, and the administrator all. It asks the "
        "running exporter. Root and the exporter's user see all, another user what the page shows.",
    )
    report.add_argument("--mail", action="store_true", help="send mails, by sendmail")
    report.add_argument(
        "--mail.domain", dest="domain", default="", metavar="DOMAIN",
        help="a user's address is USER@DOMAIN (default USER alone, whose address the mail program knows)",
    )  # fmt: skip
    report.add_argument(
        "--mail.admin", dest="admin", default="root", metavar="ADDRESS",
        help="who gets the list of all (default root)",
    )  # fmt: skip
    report.add_argument(
        "--mail.program", dest="sendmail", type=Path, default=_SENDMAIL, metavar="FILE",
        help="the mail program, called as sendmail is (default %(default)s)",
    )  # fmt: skip
    report.add_argument(
        "--webhook", default="", metavar="URL", help="send each message as JSON: host, user, text, holdings"
    )
    report.add_argument(
        "--after", type=duration, default=3600.0, metavar="DURATION",
        help="leave out what has lasted for less (default 1h)",
    )  # fmt: skip
    report.add_argument(
        "--least", type=size, default=2**30, metavar="SIZE", help="leave out smaller holdings (default 1GiB)"
    )
    report.add_argument(
        "--except", dest="spared", action="append", default=[], metavar="USER",
        help="send this user nothing; repeatable. The list of all has them",
    )  # fmt: skip
    add_thresholds(report)
    add_control(report)
    add_log(report)
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the messages, or print what the administrator's has."""
    if args.webhook and not args.webhook.startswith(("http://", "https://")):
        raise UsageError(f"--webhook={args.webhook} does not begin with http:// or https://")
    owners = given_settings(args.thresholds).overrides
    snapshot = run_until_interrupted(_newest(control_socket(args)))
    host = os.uname().nodename
    found = sorted(unused(snapshot, args, owners), key=lambda each: -(each.holding.held or 0))
    if not (args.mail or args.webhook):
        write_output(text_for_all(host, found))
        return 0
    if found:
        _deliver(args, host, found)
    return 0


async def _newest(path: Path) -> Snapshot:
    try:
        async with aclosing(follow_exporter(path)) as ledgers:  # type: ignore[type-var]
            snapshot = (await anext(ledgers)).snapshot
    except NoExporterError as error:
        raise StartupError(
            f"{error}; what has lasted for long is known only to an exporter that runs"
        ) from error
    if not snapshot.up:
        reason, words = snapshot.failure or ("starting", "no sample has finished yet")
        raise StartupError(f"the exporter has no data ({reason}): {words}")
    return snapshot


def unused(snapshot: Snapshot, args: argparse.Namespace, owners: Sequence[Override]) -> Iterator[Unused]:
    """Yield what is held without work for ``--after``, from ``--least`` bytes on, or of unknown size."""
    for device in snapshot.devices:
        for holding in device.holdings:
            working = holding.state is State.ORPHANED and holding.working
            small = holding.held is not None and holding.held < args.least
            if holding.state in _WORDS and not working and not small:
                lasted = (snapshot.time or 0.0) - holding.since
                if lasted < args.after:
                    continue
                facts = snapshot.facts_of(holding.pid)
                owner = facts.owner if facts is not None else None
                user = (facts.user or "") if facts is not None else ""
                yield Unused(
                    user=user,
                    command=facts.command if facts is not None else "",
                    device=device,
                    holding=holding,
                    notebook=owner.notebook if owner is not None else "",
                    advice=remedy(holding, snapshot.processes.get(holding.pid), device) or "",
                    spared=not _PERSON.fullmatch(user)
                    or user in ("root", *args.spared)
                    or _exempt(holding, lasted, user, owner, owners),
                )


def _exempt(
    holding: Holding, lasted: float, user: str, owner: Owner | None, owners: Sequence[Override]
) -> bool:
    """Tell whether an owner may hold this for longer, or may hold more, by the thresholds of the alerts."""
    labels = {"user": user}
    if owner is not None:
        labels |= {"owner": owner.name, "owner_type": owner.type, "namespace": owner.namespace}
    after, least = _PATIENCE.get(holding.state, ("", ""))
    for each in owners:
        given = each.thresholds
        if (after in given or least in given) and re.fullmatch(each.pattern, labels.get(each.label, "")):
            return not all(
                limit is None or (limit != "never" and float(limit) <= value)
                for limit, value in ((given.get(after), lasted), (given.get(least), holding.held or 0))
            )
    return False


def plain(text: str) -> str:
    """Return what a program says of itself, for a message, where it mentions, links and formats nothing."""
    for pattern, shown in _PLAIN:
        text = re.sub(pattern, shown, text)
    return text


def _line(each: Unused) -> str:
    holding = each.holding
    command = f" ({plain(each.command)})" if each.command else ""
    amount = gib(holding.held) if holding.held is not None else "an unknown amount"
    since = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(holding.since))
    who = f"user {printable(each.user)}" if each.user else "an unknown user"
    return (
        f"pid {holding.pid}{command} of {who} holds {amount} on GPU {each.device.reading.index}, and "
        f"{_WORDS[holding.state]} since {since}"
    )


def _ending(each: Unused) -> str:
    if each.holding.state in (State.DEAD, State.STUCK):
        return "No signal ends it; the administrator knows of it."
    command = f"vramledger end --pid {each.holding.pid}"
    if each.holding.state is State.ZOMBIE:
        return f"`{command}` says what would end it; if nothing does, the administrator knows of it."
    ends = f"`{command}` says what it would end, and `{command} --yes` ends it."
    if each.notebook:
        return f"Shut down the kernel of {plain(f'{each.notebook:.120}')} if you do not need it. {ends}"
    if each.holding.state is State.STOPPED:
        ends = f"{ends} `kill -CONT {each.holding.pid}` continues it."
    return f"If you do not need it: {ends}"


def _grades(found: Sequence[Unused]) -> str:
    return f"\n{_INFERRED}" if any(each.holding.grade is Grade.INFERRED for each in found) else ""


def text_for_user(host: str, found: Sequence[Unused]) -> str:
    """Return what a user is told of their own programs."""
    head = (
        f"These programs of yours hold GPU memory on {host} that others could use. Run the commands there.\n"
    )
    doubts = {Grade.INFERRED: " (inferred)"}
    lines = (f"\n{_line(each)}{doubts.get(each.holding.grade, '')}.\n{_ending(each)}\n" for each in found)
    return head + "".join(lines) + _grades(found)


def text_for_all(host: str, found: Sequence[Unused]) -> str:
    """Return what the administrator is told."""
    if not found:
        return f"Nothing on {host} has been held without work for as long as --after says.\n"
    head = f"This is held without work on {host}.\n"
    lines = (
        f"\n{_line(each)} ({each.holding.grade.value}).\n{each.advice}\n"
        + ("Its user gets no message.\n" if each.spared else "")
        for each in found
    )
    return head + "".join(lines) + _grades(found)


def _deliver(args: argparse.Namespace, host: str, found: Sequence[Unused]) -> None:
    """Send each user theirs, the administrator all; one failure stops no other. Raises StartupError."""
    own: dict[str, list[Unused]] = {}
    for each in found:
        if not each.spared:
            own.setdefault(each.user, []).append(each)
    problems = []
    messages: list[tuple[str | None, str, Sequence[Unused]]] = [
        (user, text_for_user(host, theirs), theirs) for user, theirs in own.items()
    ]
    for user, text, told in [*messages, (None, text_for_all(host, found), found)]:
        try:
            if args.mail:
                domain = f"@{args.domain}" if args.domain else ""
                to, admin = (
                    each if "@" in each else each + domain for each in (user or args.admin, args.admin)
                )
                _mail(args.sendmail, to, admin, f"GPU memory held without work on {host}", text)
            if args.webhook:
                _post(args.webhook, host, user, text, told)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"to {user or 'the administrator'}: {error}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
        raise StartupError(f"a message could not be sent {problems[0]}{more}")


def _mail(program: Path, address: str, answers: str, subject: str, text: str) -> None:
    mail = EmailMessage(_WHOLE_LINES)
    mail["To"], mail["Reply-To"], mail["Subject"] = address, answers, subject
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(text)
    command = [str(program), "-i", "--", address]
    subprocess.run(command, check=True, input=mail.as_bytes(), timeout=_SECONDS)  # noqa: S603 the file of a flag


def _post(url: str, host: str, user: str | None, text: str, found: Sequence[Unused]) -> None:
    holdings = [
        {
            "pid": each.holding.pid, "user": each.user or None, "command": each.command or None,
            "notebook": each.notebook or None,
            "gpu": each.device.reading.index, "uuid": each.device.reading.uuid, "bytes": each.holding.held,
            "state": each.holding.state.value, "grade": each.holding.grade.value, "since": each.holding.since,
        }
        for each in found
    ]  # fmt: skip
    body = json.dumps({"host": host, "user": user, "text": text, "holdings": holdings}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310 see run()
    with urllib.request.urlopen(request, timeout=_SECONDS):  # noqa: S310
        pass
