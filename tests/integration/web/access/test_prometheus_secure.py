"""A real Prometheus with tls_config and basic_auth scrapes an exporter with a web configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.web.test_prometheus import is_up, prometheus, query
from tests.support.certificates import Authority
from tests.support.requirements import require_tool
from tests.support.secured import USERS, serve_secured, trusting
from tests.support.serving import run, until


@pytest.mark.parametrize(("password", "up"), [("wonder", True), ("wrong", False)])
def test_prometheus_gets_in(tmp_path: Path, password: str, up: bool) -> None:
    """With its certificate and the password Prometheus has our data; with a wrong password it has none."""
    program = require_tool("prometheus")
    authority = Authority(tmp_path)
    authority.sign("server")
    own = authority.sign("client", "DNS:prometheus.test")
    text = (
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n  client_ca_file: ca.pem\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [prometheus.test]\n" + USERS
    )
    how = (
        f"scheme: https\n    basic_auth: {{username: alice, password: {password}}}\n    tls_config: "
        f"{{ca_file: {authority.pair.certificate}, cert_file: {own.certificate}, key_file: {own.key}}}"
    )

    async def test() -> None:
        async with (
            serve_secured(tmp_path / "web.yml", text, trusting(authority.pair, own)) as exporter,
            prometheus(program, tmp_path, exporter.port, how) as api,
        ):
            if up:
                await until(lambda: is_up(api))
                assert await query(api, "vramledger_up") != {}
                return

            async def tried() -> bool:
                return list((await query(api, "up")).values()) == [0.0]

            await until(tried)
            assert await query(api, "vramledger_up") == {}

    run(test)
