"""Run ``vramledger serve``: the exporter."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from msgspec.structs import fields

from vramledger.commands import arguments
from vramledger.config import DEFAULT_PORT, Config, StorageConfig
from vramledger.serving.exporter import serve_until_signalled
from vramledger_agent.commands.parser import Commands, add_agent_socket, add_log, count, duration


def add_command(commands: Commands) -> None:
    """Declare the command."""
    default = Config()
    serve = commands.add_parser("serve", help="the exporter", description="Serve the ledger to Prometheus.")
    web = serve.add_argument_group("web")
    web.add_argument(
        "--web.listen-address", dest="listen", type=arguments.address, action="append", metavar="ADDRESS",
        help=f"where to listen, repeatable (default :{DEFAULT_PORT})",
    )  # fmt: skip
    web.add_argument(
        "--web.telemetry-path", dest="telemetry_path", type=arguments.path, default="/metrics",
        metavar="PATH", help="where the metrics are (default /metrics)",
    )  # fmt: skip
    web.add_argument(
        "--web.max-requests", dest="max_requests", type=count, default=40, metavar="N",
        help="scrapes served at the same time, 0 for no limit (default 40)",
    )  # fmt: skip
    web.add_argument(
        "--web.config.file", dest="web_config", type=Path, default=None, metavar="FILE",
        help="TLS, passwords and rates, in the format of Prometheus' exporter-toolkit",
    )  # fmt: skip
    web.add_argument(
        "--web.systemd-socket", dest="systemd_socket", action="store_true",
        help="listen on the sockets of a systemd .socket unit",
    )  # fmt: skip
    web.add_argument(
        "--web.page", dest="page", default=True, action=argparse.BooleanOptionalAction,
        help="the live page at / (default on)",
    )  # fmt: skip
    web.add_argument(
        "--web.hide-names", dest="hide_names", action="store_true",
        help="hide names of users and programs, and paths; commands still show them to root and this user",
    )  # fmt: skip
    web.add_argument(
        "--web.user", dest="web_user", default=None, metavar="USER",
        help="user (name or number) of the process that listens, if serve starts as root (default vramledger "
        "if this user exists, otherwise 65532)",
    )  # fmt: skip
    arguments.add_source(serve)
    serve.add_argument(
        "--processes.max", dest="processes_max", type=count, default=default.processes_max, metavar="N",
        help='holdings of a device shown one by one, the rest as pid="other"; 0 for all (default 100)',
    )  # fmt: skip
    serve.add_argument(
        "--owners.max", dest="owners_max", type=count, default=default.owners_max, metavar="N",
        help='owners of a device shown one by one, the rest as "other"; 0 for all (default %(default)s)',
    )  # fmt: skip
    storage = serve.add_argument_group("storage")
    storage.add_argument(
        "--storage.path", dest="storage_path", type=Path, default=None, metavar="DIR",
        help="keep the past in this directory, of this exporter alone (default: keep nothing)",
    )  # fmt: skip
    storage.add_argument(
        "--storage.retention", dest="storage_retention", type=duration, default=7 * 86400.0,
        metavar="DURATION", help="how long it is kept (default 7d)",
    )  # fmt: skip
    storage.add_argument(
        "--storage.size", dest="storage_size", type=arguments.storage_size, default=512 * 2**20,
        metavar="SIZE", help="how many bytes it may have (default 512MiB)",
    )  # fmt: skip
    add_agent_socket(serve)
    arguments.add_control(serve)
    arguments.add_sampling(serve, calm=True, idle=True, collectors=True)
    arguments.add_pods(serve)
    add_log(serve)
    serve.set_defaults(run=run)


def _config(args: argparse.Namespace) -> Config:
    """Return the settings: a flag is kept under the name of its field."""
    given = {field.name: getattr(args, field.name) for field in fields(Config) if hasattr(args, field.name)}
    given["listen"] = tuple(args.listen or Config().listen)
    if args.storage_path is not None:
        given["storage"] = StorageConfig(args.storage_path, args.storage_retention, args.storage_size)
    return Config(**given, sampling=arguments.sampling_config(args))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops it."""
    asyncio.run(serve_until_signalled(_config(args)))
    return 0
