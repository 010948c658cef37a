#!/opt/vramledger/bin/python -I
"""Say by the exit status whether the exporter answers: 0 if it does, even if it requires a password.

A host without a driver is healthy too: the exporter then serves ``vramledger_up 0``, and a restart of the
container would not fix it. ``VRAMLEDGER_URL`` is its address, if it is not the default.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from http import HTTPStatus

url = os.environ.get("VRAMLEDGER_URL", "http://127.0.0.1:10839").rstrip("/") + "/-/healthy"
unverified = ssl.create_default_context()
# The name in its certificate is not the loopback address.
unverified.check_hostname = False
unverified.verify_mode = ssl.CERT_NONE
try:
    urllib.request.urlopen(url, timeout=4, context=unverified).close()  # noqa: S310 the operator's own URL
except urllib.error.HTTPError as error:
    sys.exit(0 if error.code == HTTPStatus.UNAUTHORIZED else f"{url}: {error}")
except OSError as error:
    sys.exit(f"{url}: {error}")
