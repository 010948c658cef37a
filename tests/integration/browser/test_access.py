"""The live page behind a login and TLS, in a real browser."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.support.builders import NOW, Shown, crowd
from tests.support.certificates import Authority
from tests.support.chromium import tab
from tests.support.secured import ALICE, USERS, write_config
from tests.support.serving import LOOPBACK
from vramledger.web.app import serve


def test_the_page_is_live_behind_a_login_and_tls(browser: str, tmp_path: Path) -> None:
    """Files, history and stream use the browser's login, and a new sample appears by itself."""
    pair = Authority(tmp_path).sign("server")
    file = tmp_path / "web.yml"
    write_config(
        file, f"tls_server_config:\n  cert_file: {pair.certificate}\n  key_file: {pair.key}\n{USERS}"
    )
    shown = Shown(crowd(2, 3))

    async def test() -> None:
        config = replace(LOOPBACK, web_config=file)
        async with serve(config, shown) as (address,), tab(browser) as page:
            await page.call("Security.setIgnoreCertificateErrors", ignore=True)
            await page.go(f"https://{':'.join(ALICE)}@127.0.0.1:{address.port}/")
            await page.until("document.querySelectorAll('#rows tr').length === 6")
            await page.until(
                "performance.getEntriesByType('resource').some((e) => e.name.endsWith('history'))"
            )
            shown.snapshot = replace(crowd(2, 4, serial=2), time=NOW + 1)
            await page.until("document.querySelectorAll('#rows tr').length === 8")
            assert page.complaints == []
        # Connections say goodbye in TLS, and the loop has to live until the browser has answered: then only
        # the loop's own pipe is left.
        open_files = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]  # noqa: SLF001
        while len(open_files) > 1:  # noqa: ASYNC110 there is no event for it
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(test(), 60))
