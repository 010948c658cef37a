"""Define the look of each part of a ledger, on the page and in the dashboards: colour, texture, order, name.

A search found the colours: under the usual models of colour blindness any two parts differ by at least 12
(CIEDE2000) for every viewer, and stand out from their background by 3:1; a test computes both. A colour
always has a word beside it, and a texture where the area is large enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BACKGROUND = ("#ffffff", "#161b22")
"""The backgrounds of the parts in the light and in the dark theme; Grafana's panels are close to both."""


class PartStyle(NamedTuple):
    """The look of one part."""

    light: str  # colour in the light theme
    dark: str  # colour in the dark theme
    # ``plain``, ``rising``, ``falling``, ``crossed``, ``level``, ``upright``, ``dotted`` or ``grid``
    texture: str
    meaning: str  # what the part is, in a few words


PARTS: Mapping[str, PartStyle] = {
    # This is the order in which they are stacked: active first, free last.
    "active": PartStyle("#246d59", "#33b88f", "plain", "held by a process that works, or may work"),
    "idle": PartStyle("#ad920a", "#fff4b2", "level", "held, without a sign of GPU work for a long time"),
    "stopped": PartStyle("#152a47", "#1963cf", "upright", "held by a stopped process"),
    "orphaned": PartStyle("#b33d19", "#e8842c", "rising", "held by a worker whose program has ended"),
    "zombie": PartStyle("#b55acb", "#bd85f5", "crossed", "held by a process that has exited"),
    "stuck": PartStyle("#24000c", "#ccf000", "grid", "held by a process that waits in the driver"),
    "dead": PartStyle("#68080a", "#d02535", "falling", "listed for a process that does not exist"),
    "unknown": PartStyle("#89949e", "#8a90a3", "dotted", "held by a process that cannot be seen from here"),
    "unattributed": PartStyle("#e94585", "#f3bfd7", "dotted", "used, and no listed process holds it"),
    "operating_system": PartStyle("#3a393a", "#836c6a", "plain", "the operating system's, on its own memory"),
    "driver_reserved": PartStyle("#514497", "#676580", "plain", "the driver's own"),
    "free": PartStyle("#e8ebf0", "#2b323c", "plain", "what a process can still allocate"),
}

GRAFANA: Mapping[str, str] = {
    "active": "#099674",
    "idle": "#be8d00",
    "stopped": "#6b8fff",
    "orphaned": "#80624a",
    "zombie": "#8f08ff",
    "stuck": "#7581af",
    "dead": "#d10100",
    "unknown": "#97939f",
    "unattributed": "#ff326c",
    "operating_system": "#9843a9",
    "driver_reserved": "#64647f",
    "free": "#808892",
}
"""The same hues, for places where one colour is used in both themes, as in a dashboard; the same search found
them. There ``operating_system`` differs from the others by 9.5."""
