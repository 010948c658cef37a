"""How to start Alertmanager if Debian's package was unpacked and not installed, as ``make test`` does.

Debian's build opens its default templates at a fixed path, whatever the configuration says. Where they are
not there, the program gets a view of the file system of its own in which they are.
"""

from __future__ import annotations

import os
from pathlib import Path

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
