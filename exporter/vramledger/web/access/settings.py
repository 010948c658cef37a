"""Define the content of a web configuration file, with the names of Prometheus' exporter-toolkit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""The headers that the file may set, each with the values that it may have; an empty list allows any."""

VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")

NO_CLIENT, IF_GIVEN, REQUIRED = "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"

CIPHERS: Mapping[str, str] = {
    **{
        f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
        for key in ("ECDSA", "RSA")
        for go, openssl in (
            ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
            ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
            ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
            ("AES_128_CBC_SHA", "AES128-SHA"),
            ("AES_256_CBC_SHA", "AES256-SHA"),
        )
    },
    # Neither Go nor Python lets a program choose among those of TLS 1.3.
    **dict.fromkeys(("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"), ""),
}
"""Go's names of secure cipher suites with OpenSSL's, which are empty for TLS 1.3."""

CURVES: Mapping[str, str] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}


@dataclass(frozen=True, slots=True)
class Pem:
    """A PEM text in the file itself, or in another one; nothing when both are empty."""

    text: str = field(default="", repr=False)
    path: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.path)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """``tls_server_config``; names are Go's, as in the file."""

    certificate: Pem
    key: Pem
    client_ca: Pem = Pem()
    client_auth: str = NO_CLIENT
    allowed_sans: frozenset[str] | None = None
    oldest: str = "TLS12"
    newest: str = "TLS13"
    ciphers: tuple[str, ...] = ()
    own_order: bool = True
    curves: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The other files; a change of one of them counts as a change of this file."""
        return tuple(each.path for each in (self.certificate, self.key, self.client_ca) if each.path)


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """A web configuration file."""

    tls: TlsSettings | None = None  # None for plain HTTP
    # name to bcrypt hash; empty lets everybody in
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    # sent with every answer that does not set them itself
    headers: Mapping[str, str] = field(default_factory=dict)
    http2: bool = True  # read and not used: Python's server speaks HTTP/1.1, which every Prometheus accepts
    interval: float = 0.0  # seconds after which the rate limit allows another request; 0 for no limit
    burst: int = 0  # requests that may come in one burst
