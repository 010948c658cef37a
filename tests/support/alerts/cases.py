"""A case of alerts: a node, a minute, and what fires on it then; and the holders that many cases have."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tests.support.alerts.nodes import Holder, Node


class Case(NamedTuple):
    """The alerts that fire on a node at a minute, except the heartbeat: names with the severity's letter."""

    name: str
    node: Node
    minute: float
    fires: str


TRAINER = Holder(9, 30, owner="bob", user="bob")
ORPHAN = Holder(7, 10, "orphaned", since=0)
DEVICE = '{NODE,gpu="0",uuid="GPU-00000000-0000-4000-8000-000000000000"}'
DEAD = replace(ORPHAN, state="dead")
