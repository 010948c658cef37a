"""Parse systemd's names of units, and find those that belong to a person. Pure: no file is opened."""

from __future__ import annotations

import re

UNIT = re.compile(r"[A-Za-z0-9:_.@\\-]{1,240}\.(?:service|scope)")
USER_MANAGER = re.compile(r"user@(?P<uid>[0-9]{1,10})\.service")

_PERSONAL = re.compile(
    r"session-.*\.scope|init\.scope|user@.*\.service|user-runtime-dir@.*\.service"
    r"|(?:vte|tmux|kitty|ghostty)-spawn-.*\.scope|app-.*\.scope|gnome-terminal-server\.service"
    r"|gnome-session.*|plasma-.*|dbus(?:-broker)?\.service|.*getty@.*\.service"
    r"|(?:ssh|sshd|cron|crond|atd|gdm|sddm|lightdm|display-manager)(?:@.*)?\.service"
)


def is_personal(unit: str) -> bool:
    """Tell whether a unit belongs to a person's session, rather than being a service."""
    return _PERSONAL.fullmatch(unit) is not None
