"""Declare the families of access to the web server; ``web/access/access_control.py`` gives their samples."""

from __future__ import annotations

from vramledger.metrics.families import PREFIX, Family

WEB_REFUSALS = ("password", "certificate", "failures", "busy", "rate", "host")
"""Why a request was rejected: no password or a wrong one, no allowed name in the client's certificate, an
address that has failed too often, too many passwords waiting to be checked, the file's rate limit, a
name that is not this host's where we listen on loopback alone."""

_WITHOUT_FILE = "when there is no `--web.config.file`"

WEB_REFUSED = Family(
    PREFIX + "web_refused_requests_total",
    ("reason",),
    "Requests that the exporter refused since it started, by reason.",
    "exporter",
    source="the exporter's own count",
    absent="never",
)
WEB_CONFIG_LOADED = Family(
    PREFIX + "web_config_last_reload_successful",
    (),
    "1 when the newest version of the web configuration file and of the files that it "
    "names is in use, 0 when it is wrong and an older version is in use; absent without "
    "such a file.",
    "exporter",
    source="the file of `--web.config.file`",
    absent=_WITHOUT_FILE,
)
WEB_CONFIG_LOADED_TIME = Family(
    PREFIX + "web_config_last_reload_success_timestamp_seconds",
    (),
    "Unix time at which the web configuration in use was read.",
    "exporter",
    source="the exporter's clock",
    absent=_WITHOUT_FILE,
)

FAMILIES = (WEB_REFUSED, WEB_CONFIG_LOADED, WEB_CONFIG_LOADED_TIME)
