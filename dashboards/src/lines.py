"""Change how a graph of figures draws its lines, where its data needs another look than most."""

from __future__ import annotations

from dashboards.src.panels import Panel
from dashboards.src.queries import selector

MEAN_STEP = "2m"
"""The shortest time of which a graph of work shows the mean: bursts of seconds would be a fence of lines."""
WHOLE_SECONDS = "suffix:s"
"""The unit of seconds whose ticks are round: Grafana's own writes 200 s as 3.33 mins."""

SHADES = ("#5d6b75", "#1a7f9e", "#a8c545", "#4695b1")
"""Colours of areas that lie on each other outside a ledger: none is that of a state."""


def mean(metric: str, *matchers: str) -> str:
    """Return a figure as its mean from point to point."""
    return f"avg_over_time({selector(metric, *matchers)}[$__rate_interval])"


def joined(panel: Panel) -> Panel:
    """Join the points of a graph by straight lines: steps of what changes all the time hide each other."""
    panel.body["fieldConfig"]["defaults"]["custom"]["lineInterpolation"] = "linear"
    return panel


def ending_at(panel: Panel, least: float) -> Panel:
    """End the axis of a graph at this figure at least: what is always 0 would be drawn on one up to 100."""
    panel.body["fieldConfig"]["defaults"]["custom"]["axisSoftMax"] = least
    return panel


def dashed(panel: Panel, *names: str) -> Panel:
    """Draw some lines of a graph dashed, so that those below them are seen."""
    for override in panel.body["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] in names:
            style = {"fill": "dash", "dash": [10, 6]}
            override["properties"].append({"id": "custom.lineStyle", "value": style})
    return panel
