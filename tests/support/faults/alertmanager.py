"""Start Debian's Alertmanager where it was unpacked and not installed, as by ``make test``.

Its default templates have a fixed path: it gets a view of the file system in which they are.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.fleet import engines
from tests.support.ports import free_port
from tests.support.requirements import do_without, require_namespaces, require_version

_TEMPLATES = Path("/usr/share/prometheus/alertmanager")
_MOUNT = (
    'mount -t tmpfs none /usr/share && mkdir /usr/share/prometheus && cp -r "$0" /usr/share/prometheus/'
    ' && exec "$@"'
)


def command(version: str) -> list[str]:
    """Return the beginning of Alertmanager's command line in a version; its flags follow."""
    program = require_version("prometheus-alertmanager", version)
    if _TEMPLATES.exists():
        return [str(program)]
    brought = program.resolve().parent.parent / "share" / "prometheus" / "alertmanager"
    if not brought.exists():
        do_without("Alertmanager has no default templates on this machine")
    require_namespaces()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", _MOUNT, str(brought), str(program)]


@contextmanager
def running(version: str, folder: Path, config: str) -> Iterator[str]:
    """Run a real Alertmanager with a configuration; yield its address when it answers."""
    (folder / "alertmanager.yml").write_text(config, encoding="utf-8")
    port = free_port()
    arguments = [
        f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/data",
        "--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with engines.running([*command(version), *arguments], folder, f"http://127.0.0.1:{port}") as engine:
        yield engine.url


def request(url: str, body: object = None) -> bytes | None:
    """Ask Alertmanager, or send it alerts as Prometheus does; None while nobody answers, or it refuses."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 loopback
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 loopback
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        pass
    return None
