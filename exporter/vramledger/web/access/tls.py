"""Turn settings into an ``ssl.SSLContext``, as far as Python's ssl can."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vramledger.errors import StartupError
from vramledger.logs import fields, log

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

    @property
    def requires_client(self) -> bool:
        """Whether a client must show a certificate."""
        return self.tls is not None and self.tls.client_auth == REQUIRED

    @property
    def clients(self) -> tuple[object, ...]:
        """What decides which certificates may connect."""
        tls = self.tls
        return () if tls is None else (tls.client_auth, tls.client_ca, tls.allowed_sans)

    @property
    def restrictions(self) -> list[str]:
        """What a request must have, or must not exceed."""
        given = {
            "TLS": self.tls,
            "passwords": self.users,
            "a rate limit": self.interval,
            "names of clients": self.tls and self.tls.allowed_sans is not None,
            "client certificates": self.requires_client,
        }
        return [what for what, value in given.items() if value]


_VERSIONS: Mapping[str, ssl.TLSVersion] = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}

_IP = "IP Address"


def make_context(tls: TlsSettings) -> ssl.SSLContext:
    """Make the context for new connections. Raises StartupError if a file is unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.oldest]
    context.maximum_version = _VERSIONS[tls.newest]
    context.set_alpn_protocols(["http/1.1"])
    if not tls.own_order:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if names := [CIPHERS[each] for each in tls.ciphers if CIPHERS[each]]:
        context.set_ciphers(":".join(names))
    _choose_curve(context, tls.curves)
    _load_pair(context, tls)
    if tls.client_auth in (IF_GIVEN, REQUIRED):
        context.verify_mode = ssl.CERT_REQUIRED if tls.client_auth == REQUIRED else ssl.CERT_OPTIONAL
        _load_authorities(context, tls.client_ca)
    return context


def _choose_curve(context: ssl.SSLContext, curves: tuple[str, ...]) -> None:
    """Restrict the key exchange to one curve: Python cannot set several. OpenSSL's default is all."""
    if not curves or set(curves) == set(CURVES):
        return
    if len(curves) > 1:
        log.warning("Python can use only the first of curve_preferences", extra=fields(curve=curves[0]))
    try:
        context.set_ecdh_curve(CURVES[curves[0]])
    except (ValueError, ssl.SSLError) as error:
        raise StartupError(
            f"tls_server_config: this OpenSSL cannot use {curves[0]} alone; remove curve_preferences"
        ) from error


def _load_pair(context: ssl.SSLContext, tls: TlsSettings) -> None:
    for each, what in ((tls.certificate, "cert_file"), (tls.key, "key_file")):
        _read_pem(each, what)
    with _pem_file(tls.certificate) as certificate, _pem_file(tls.key) as key:
        try:
            # Without a password argument OpenSSL would ask on the terminal for the password of an encrypted
            # key.
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            pair = f"{_pem_name(tls.certificate, 'cert')} and {_pem_name(tls.key, 'key')}"
            why = getattr(error, "reason", None) or "the key is encrypted"
            raise StartupError(
                f"tls_server_config: {pair} are not a certificate with its key, in PEM, unencrypted ({why})"
            ) from error


def _load_authorities(context: ssl.SSLContext, authority: Pem) -> None:
    if not authority:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # the system's certificates, as Go does
        return
    try:
        context.load_verify_locations(cadata=_read_pem(authority, "client_ca_file"))
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(
            f"tls_server_config: {_pem_name(authority, 'client_ca')} holds no certificate in PEM"
        ) from error


def _pem_name(pem: Pem, key: str) -> str:
    return str(pem.path) if pem.path else f"what {key} holds"


def _read_pem(pem: Pem, key: str) -> str:
    if pem.path is None:
        return pem.text
    try:
        return pem.path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise StartupError(f"tls_server_config: cannot read {key} {pem.path}: {error.strerror}") from error


@contextmanager
def _pem_file(pem: Pem) -> Iterator[Path]:
    """Yield the name of a file in memory: ssl reads only files, and no key goes to a disk."""
    if pem.path is not None:
        yield pem.path
        return
    memory = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(memory, pem.text.encode())
        yield Path(f"/dev/fd/{memory}")
    finally:
        os.close(memory)


def alternative_names(certificate: Mapping[str, object]) -> frozenset[str]:
    """Return the alternative names that ``getpeercert`` gives: DNS, addresses, e-mail and URI."""
    found = certificate.get("subjectAltName")
    if not isinstance(found, tuple):
        return frozenset()
    return frozenset(
        _canonical_name(kind, name) for kind, name in found if kind in ("DNS", _IP, "email", "URI")
    )


def _canonical_name(kind: str, name: str) -> str:
    """Write an address as Go does: OpenSSL gives IPv6 in full, in capitals, and sometimes with a line end."""
    if kind != _IP:
        return name
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name
