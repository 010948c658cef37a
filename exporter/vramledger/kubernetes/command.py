"""Run ``vramledger taint``: mark this Kubernetes node while its GPUs hold memory of work that has ended."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import re
import signal
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from vramledger.commands.interrupts import run_until_interrupted
from vramledger.config import SamplingConfig
from vramledger.kubernetes.api_client import ClusterError
from vramledger.kubernetes.node_api import KubernetesNode, Taint, in_cluster
from vramledger.kubernetes.node_marks import NodeJudge, NodeMarks, Observation, cannot_tell, read_answer
from vramledger.logs import fields, log
from vramledger.readers.hosts.host import Host
from vramledger.web.access.local_users import find_listening_user
from vramledger_agent.commands.parser import Commands, add_log, duration

ASK_INTERVAL = 5.0
"""Seconds from one question to the exporter to the next."""

HEARTBEAT = 300.0
"""Seconds after which the node's condition is written again; writes cost the API server of a fleet."""

MAX_ANSWER_BYTES = 4 * 2**20
GAPS = 4
"""How many questions may fail to be asked in time before nothing is known of the time between them."""

EFFECTS = ("NoSchedule", "PreferNoSchedule")
_KEY = re.compile(
    r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII
)
_NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ExporterAddress:
    """Where the exporter is, and how to be let in."""

    url: str  # its address
    server_name: str | None = None  # the name in its certificate, if it is not that of the address
    # a folder that may have ca.crt, username, password, tls.crt and tls.key; None without one
    credentials: Path | None = None


def add_command(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add_parser(
        "taint",
        help="mark this Kubernetes node while its GPUs hold memory of work that has ended",
        description="Ask the exporter of this node what is left over, and mark the node with the condition "
        "GpuMemoryLeftOver and with a taint. Where the exporter cannot tell, the condition is Unknown and "
        "the taint stays as it is. The chart runs this with nodeTaint.enabled=true.",
    )
    command.add_argument("--node", type=_node, required=True, metavar="NAME", help="the name of this node")
    command.add_argument(
        "--exporter.url", dest="url", default="http://127.0.0.1:10839", metavar="URL",
        help="where the exporter is (default %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--exporter.server-name", dest="server_name", metavar="NAME",
        help="the name in the exporter's certificate, if it is not that of the address",
    )  # fmt: skip
    command.add_argument(
        "--exporter.credentials", dest="credentials", type=Path, metavar="DIR",
        help="a folder with what the exporter asks for: ca.crt, username, password, tls.crt, tls.key",
    )  # fmt: skip
    command.add_argument(
        "--taint.key", dest="key", type=_key, default="vramledger/leftover", metavar="KEY",
        help="the key of the taint, and of the annotation beside it (default %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--taint.effect", dest="effect", choices=EFFECTS, default=EFFECTS[0],
        help="what the taint does (default %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--taint.after", dest="after", type=duration, default=60.0, metavar="DURATION",
        help="for how long the same must be seen before the taint is set or removed (default 1m)",
    )  # fmt: skip
    add_log(command)
    command.set_defaults(run=run)


def _key(text: str) -> str:
    if not _KEY.fullmatch(text):
        message = f"{text!r} is not a key with a prefix; write for example vramledger/leftover"
        raise argparse.ArgumentTypeError(message)
    return text


def _node(text: str) -> str:
    if not _NODE.fullmatch(text):
        message = f"{text!r} is not the name of a node; give spec.nodeName of this pod"
        raise argparse.ArgumentTypeError(message)
    return text


def run(args: argparse.Namespace) -> int:
    """Keep the node's marks up to date until SIGTERM; they then stay as they are."""
    node = in_cluster(args.node, Taint(args.key, args.effect))
    address = ExporterAddress(args.url.rstrip("/"), args.server_name, args.credentials)
    return run_until_interrupted(_run_until_terminated(node, address, args.after))


async def _run_until_terminated(node: KubernetesNode, address: ExporterAddress, after: float) -> int:
    """Follow the exporter until SIGTERM: a DaemonSet that is updated ends us so."""
    boot = Host(SamplingConfig().procfs).boot_id  # that of the node, in every container
    following = asyncio.create_task(follow(node, address, NodeJudge(after, GAPS * ASK_INTERVAL, boot)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, following.cancel)
    with suppress(asyncio.CancelledError):
        await following
    return 0


async def follow(
    node: KubernetesNode, address: ExporterAddress, judge: NodeJudge, interval: float = ASK_INTERVAL
) -> None:
    """Keep the marks of the node by the exporter's answers; a refusal is logged, and tried again."""
    present: NodeMarks | None = None
    written = 0.0
    while True:
        observation = await ask_exporter(address)
        now = time.monotonic()
        judge.observe(observation, now)
        try:
            if present is None or now - written >= HEARTBEAT:
                present = await node.read()
                due = True
            else:
                due = False
            wanted = judge.marks(present, now)
            changed = (wanted.tainted, wanted.annotation, wanted.status) != (
                present.tainted,
                present.annotation,
                present.status,
            )
            if wanted.status and (changed or due):
                await node.write(wanted, present)
                if wanted.tainted != present.tainted:
                    done = "Tainted the node" if wanted.tainted else "Removed the taint of the node"
                    log.warning(done, extra=fields(why=wanted.message))
                present, written = wanted, now
            elif due:
                written = now
        except ClusterError as error:
            log.error("Cannot mark the node", extra=fields(err=str(error)))
            present = None  # what is there now is not known
        await asyncio.sleep(interval)


async def ask_exporter(address: ExporterAddress) -> Observation:
    """Return what the exporter says is left over; that it cannot be asked is an answer, too."""
    try:
        headers, trust = _credentials(address)
        await asyncio.to_thread(_check_listener, address.url, secret="Authorization" in headers)
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=ASK_INTERVAL),
                headers={**headers, "Accept-Encoding": "identity"},
                auto_decompress=False,  # a few bytes may unpack to gigabytes
            ) as session,
            session.get(
                f"{address.url}/api/v1/leftovers",
                ssl=trust,
                server_hostname=address.server_name,
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status != 200:  # noqa: PLR2004 OK
                return cannot_tell(f"the exporter answers {answer.status} {answer.reason}")
            content = bytearray()
            async for piece in answer.content.iter_any():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    return cannot_tell("the exporter's answer is too long")
            return read_answer(json.loads(content), time.time())
    except (OSError, aiohttp.ClientError, asyncio.TimeoutError, ValueError, RecursionError) as error:
        return cannot_tell(f"the exporter does not answer: {str(error) or type(error).__name__}")


def _check_listener(url: str, *, secret: bool) -> None:
    """Check who listens without TLS: it gets a password and its answer marks. Raises ValueError if unsafe."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    users = [find_listening_user(str(each[4][0]), int(each[4][1])) for each in found]
    if others := sorted({user for user in users if user is not None} - {0, os.geteuid()}):
        message = f"a program of user {others[0]} listens at {url}, and not the exporter"
        raise ValueError(message)
    if secret and set(users) <= {None}:
        message = f"no password is sent to {url}: it is not known who listens there; use https"
        raise ValueError(message)


def _credentials(address: ExporterAddress) -> tuple[dict[str, str], ssl.SSLContext | bool]:
    """Read what lets us in; each time, because a Secret may be renewed."""
    folder = address.credentials
    if folder is None:
        return {}, True
    trust = ssl.create_default_context(cafile=folder / "ca.crt" if (folder / "ca.crt").is_file() else None)
    if (folder / "tls.crt").is_file():
        trust.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    headers = {}
    if (folder / "username").is_file():
        parts = ((folder / each).read_bytes().rstrip(b"\r\n") for each in ("username", "password"))
        headers["Authorization"] = f"Basic {base64.b64encode(b':'.join(parts)).decode()}"
    return headers, trust
