"""Certificates of the test's own authority, made by the openssl program."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.requirements import require_tool


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; the files of each are in one folder."""

    def __init__(self, home: Path, name: str = "ca") -> None:
        self._openssl = require_tool("openssl")
        self._home = home
        # Since Python 3.13 an authority must say what its key is for.
        use = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")
        self.pair = self._make(name, use, ())

    def sign(self, name: str, sans: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        signed = ("-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key))
        return self._make(name, ("basicConstraints=CA:FALSE", f"subjectAltName={sans}"), signed)

    def _make(self, name: str, extensions: tuple[str, ...], signed: tuple[str, ...]) -> Pair:
        pair = Pair(self._home / f"{name}.pem", self._home / f"{name}.key")
        added = [word for each in extensions for word in ("-addext", each)]
        command = [
            *(str(self._openssl), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}", *added, *signed),
            *("-keyout", str(pair.key), "-out", str(pair.certificate)),
        ]
        subprocess.run(command, check=True, capture_output=True)
        return pair
