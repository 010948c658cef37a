"""Define a dashboard: rows of panels, variables, links; and the links between dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from dashboards.src.panels import COLUMNS_OF_THE_PAGE, SOURCE, Json, Panel
from dashboards.src.queries import CHOSEN_TEAM, NODE_LABELS, TARGET_MATCHERS, selector
from vramledger_agent.commands.parser import parse_duration

THRESHOLDS = Path(__file__).parents[2] / "alerts" / "thresholds.yml"
"""What the rules and the dashboards have in common."""

SCHEMA = 42
"""Grafana 10 to 13 load it as it is, or migrate it; they refuse files of the next schema."""
TAG = "vramledger"

PREFIX = "vramledger-"
FLEET, NODE, DEVICE, OWNER, PROCESS, FRAMEWORK, EXPORTER = (
    f"{PREFIX}{name}" for name in ("fleet", "node", "device", "owner", "process", "framework", "exporter")
)
_KEPT_PARAMETERS = "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}&${job:queryparam}"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels, laid out from left to right; if collapsed, it queries only when opened.

    The first row of a dashboard has no title: nothing stands above what one screen answers.
    """

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard.

    Attributes:
        uid: the name in links.
        title: after ``GPU memory / ``.
        description: the question that it answers.
        rows: its panels.
        variables: in addition to those of every dashboard.
        annotations: marks on all its time series, see :func:`annotation`.
        time_range: how far back it looks when opened.
        one_node: it shows one node, and not several or all.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Json] = ()
    annotations: Sequence[Json] = ()
    time_range: str = "now-6h"
    one_node: bool = False

    def json(self) -> Json:
        """Return it in Grafana's file format."""
        return {
            "uid": self.uid,
            "title": f"GPU memory / {self.title}",
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "1m",
            "time": {"from": self.time_range, "to": "now"},
            "timezone": "browser",
            "links": [_dashboard_menu(), *(_links_to_page("${__to}") if self.one_node else [])],
            "annotations": {"list": [*self.annotations]},
            "templating": {"list": [*_target_variables(one_node=self.one_node), *self.variables]},
            "panels": [*_positioned_panels(self.rows, one_node=self.one_node)],
        }


def variable(
    name: str, label: str, query: str, *, multi: bool = True, every: str = ".+", **more: object
) -> Json:
    """Make a variable whose values come from Prometheus; ``every`` is the pattern of its choice All."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {
            "query": query,
            "refId": f"variable-{name}",
            "qryType": 3 if "query_result" in query else 1,
        },
        "definition": query,
        "refresh": 2,  # with the time range: holders of that time may have ended
        "sort": 1,
        "multi": multi,
        "includeAll": multi,
        **({"allValue": every} if multi and every else {}),
        **({"current": {"text": ["All"], "value": ["$__all"]}} if multi else {}),
        **more,
    }


def device_variable() -> Json:
    """Make the variable of one device: shown as node, index and product, identified by the UUID.

    A MIG instance is shown with its id besides: a GPU has several of one product.
    """
    place = selector("vramledger_device:place:info", 'name!=""')
    named = f'label_join({place}, "shown", " / ", "instance", "device", "name")'
    regex = r'/shown="(?<text>[^"]+)".*uuid="(?<value>[^"]+)"/'
    return variable("uuid", "GPU", f"query_result({named})", multi=False, regex=regex)


def gpu_variable() -> Json:
    """Make the variable of the GPUs of a node: a panel is drawn for each."""
    return variable("gpu", "GPU", f"label_values({selector('vramledger_device_up')}, gpu)", sort=3)


def team_variable() -> Json:
    """Make the variable of teams; All includes owners without one."""
    names = f"label_values({selector('vramledger_owner:team:last')}, team)"
    return variable("team", "Team", names, every=".*")


def owner_variable() -> Json:
    """Make the variable of the owners of the chosen teams; All includes those without a name."""
    names = f"label_values({selector('vramledger_owner:team:last', CHOSEN_TEAM)}, owner)"
    return variable("owner", "Owner", names, every=".*")


def process_variable() -> Json:
    """Make the variable of one process of the chosen node."""
    listed = selector("vramledger_process_memory_bytes", 'pid!="other"')
    pids = f"label_values({listed}, pid)"
    return variable("pid", "Process", pids, multi=False, sort=3)


def choice_variable(name: str, label: str, values: Sequence[str], chosen: str) -> Json:
    """Make a variable with fixed values: a figure that a panel calculates with."""
    return {
        "type": "custom",
        "name": name,
        "label": label,
        "query": ",".join(values),
        "multi": False,
        "includeAll": False,
        "current": {"text": chosen, "value": chosen},
        "options": [{"text": value, "value": value, "selected": value == chosen} for value in values],
    }


def price_variables() -> list[Json]:
    """Make the variables of what a wasted GPU-hour costs."""
    return [
        choice_variable("price", "Price of a GPU-hour", ("1", "2", "3", "4", "6", "10"), "2"),
        choice_variable("currency", "Currency", ("USD", "EUR", "GBP", "CNY", "JPY", "KRW"), "USD"),
    ]


def annotation(name: str, colour: str, expr: str, title: str, text: str, *, shown: bool = True) -> Json:
    """Make marks on the time axis where an expression has a value; ``shown`` always, or only if chosen."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": shown,
        "hide": shown,
        "iconColor": colour,
        "expr": expr,
        "step": "30s",
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": "",
        "useValueForTime": False,
    }


def link_to_node() -> Json:
    """Link from a row to the node's dashboard."""
    return _link("Its devices", NODE, instance="instance")


def link_to_device() -> Json:
    """Link from a row to the device's dashboard."""
    return _link("This GPU", DEVICE, instance="instance", uuid="uuid")


def of_series(link: Json) -> Json:
    """Return a link from a row as one from a series with the same labels."""
    return {**link, "url": link["url"].replace("${__data.fields.", "${__field.labels.")}


def link_to_owner() -> Json:
    """Link from a row to its owner's dashboard."""
    return _link("Everything of this owner", OWNER, owner="owner")


def link_to_team() -> Json:
    """Link from a row to all owners of its team."""
    return _link("All owners of this team", OWNER, team="team")


def link_to_process() -> Json:
    """Link from a row to the dashboard of its process."""
    return _link("This process", PROCESS, instance="instance", pid="pid")


def link_to_model() -> Json:
    """Link from a row to the nodes with GPUs of its product."""
    return _link("Nodes with this product", FLEET, model="name")


def threshold(name: str) -> float:
    """Return a share, or the seconds of an alert's time, from the file that has all of them."""
    found = (_thresholds()["defaults"] | _thresholds()["dashboards"])[name]
    return parse_duration(found) if isinstance(found, str) else float(found)


@cache
def _thresholds() -> Json:
    content: Json = yaml.safe_load(THRESHOLDS.read_text("utf-8"))
    return content


def link_to_runbook() -> Json:
    """Link from an alert to its runbook, at the address that the rules give it."""
    place = _thresholds()["runbooks"]
    fields = {"instance": "instance", "alert": "alertname"}
    url = place
    for name, field in fields.items():
        url = url.replace(f"{{{name}}}", f"${{__data.fields.{field}}}")
    return {"title": "Runbook", "url": url, "targetBlank": True}


def link_to_exporter_health() -> Json:
    """Link from the indicator of the exporters to their status."""
    return {
        "title": "Exporter health",
        "url": f"/d/{EXPORTER}?{_KEPT_PARAMETERS}&${{instance:queryparam}}",
        "targetBlank": False,
    }


def _links_to_page(time: str) -> list[Json]:
    """Link to the page of the chosen node's exporter as it was at a time (ms), if it has an address."""
    place = str(_thresholds().get("pages") or "").replace("{instance}", "${instance:raw}")
    if not place:
        return []
    url = f"{place}#at={time}"
    return [{"type": "link", "title": "Exporter's page at this time", "url": url, "targetBlank": True}]


def _of_one_node(panel: Json) -> Json:
    """Return a panel that names one exporter, and whose points link to its page as it was then."""
    config = panel["fieldConfig"]
    if "noValue" in config["defaults"]:
        said = config["defaults"]["noValue"].replace("see Exporters", "see Exporter")
        panel = {**panel, "fieldConfig": {**config, "defaults": {**config["defaults"], "noValue": said}}}
    if panel["type"] != "timeseries":
        return panel
    config = panel["fieldConfig"]
    links = [
        {name: each for name, each in link.items() if name != "type"}
        for link in _links_to_page("${__value.time}")
    ]
    if not links:
        return panel
    return {**panel, "fieldConfig": {**config, "defaults": {**config["defaults"], "links": links}}}


def _link(title: str, uid: str, **fields: str) -> Json:
    """Link to a dashboard, with time range and filters kept, and variables set from the fields of the row."""
    chosen = "".join(
        f"&var-{name}=${{__data.fields.{field}:percentencode}}" for name, field in fields.items()
    )
    return {"title": title, "url": f"/d/{uid}?{_KEPT_PARAMETERS}{chosen}", "targetBlank": False}


def _dashboard_menu() -> Json:
    return {
        "type": "dashboards",
        "title": "GPU memory",
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _target_variables(*, one_node: bool) -> Iterator[Json]:
    """Yield the variables of every dashboard; each one limits the choices of the next."""
    yield {
        "type": "datasource",
        "name": "datasource",
        "label": "Data Source",
        "query": "prometheus",
        "refresh": 1,
        "multi": False,
        "includeAll": False,
    }
    yield variable("cluster", "Cluster", "label_values(vramledger_build_info, cluster)", every=".*")
    # All has no pattern: `up` of every other job would match it, and each other target would count as a dead
    # exporter.
    jobs = 'label_values(vramledger_build_info{cluster=~"$cluster"}, job)'
    yield variable("job", "Scrape job", jobs, every="")
    where = TARGET_MATCHERS.rpartition(", ")[0]
    yield variable("model", "GPU model", f"label_values(vramledger_device_info{{{where}}}, name)")
    # All has no pattern either, so that the chosen models filter it. A node without the model is left out;
    # a node of which nothing is known is not.
    known = f"last_over_time(vramledger_device_info{{{where}}}[$__range])"
    of_model = f'last_over_time(vramledger_device_info{{{where}, name=~"$model"}}[$__range])'
    others = f"({known} unless on ({NODE_LABELS}) {of_model})"
    nodes = f"last_over_time(up{{{where}}}[$__range]) unless on ({NODE_LABELS}) {others}"
    yield variable(
        "instance", "Node", f"query_result({nodes})",
        multi=not one_node, every="", regex=r'/instance="(?<value>[^"]+)"/',
    )  # fmt: skip


def _positioned_panels(rows: Sequence[Row], *, one_node: bool) -> Iterator[Json]:
    """Yield rows and panels with their places and ids; each point of one node's graphs links to its page."""
    number = 0
    y = 0
    for row in rows:
        number += 1
        header: Json = {
            "type": "row", "id": number, "title": row.title, "collapsed": row.collapsed,
            "gridPos": {"h": 1, "w": COLUMNS_OF_THE_PAGE, "x": 0, "y": y}, "panels": [],
        }  # fmt: skip
        y += 1 if row.title else 0
        x = height = 0
        placed = []
        for panel in row.panels:
            if x + panel.width > COLUMNS_OF_THE_PAGE:
                x, y, height = 0, y + height, 0
            number += 1
            place = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            body = _of_one_node(panel.body) if one_node else panel.body
            placed.append({**body, "id": number, "gridPos": place})
            x, height = x + panel.width, max(height, panel.height)
        y += height
        if row.collapsed:
            header["panels"] = placed
        if row.title:
            yield header
        if not row.collapsed:
            yield from placed
