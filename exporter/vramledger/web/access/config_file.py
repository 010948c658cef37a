"""Read the web configuration file (``--web.config.file``), in the format of Prometheus' exporter-toolkit.

It is read strictly: a key that we do not know is an error, because otherwise a misspelt ``basic_auth_users``
would let everybody in. It is a module of its own, so that a YAML parser is loaded only with such a file.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from msgspec import Meta, Struct, ValidationError, convert

from vramledger.errors import StartupError
from vramledger.web.access.tls import (
    CIPHERS,
    CURVES,
    HEADERS,
    IF_GIVEN,
    NO_CLIENT,
    REQUIRED,
    VERSIONS,
    AccessSettings,
    Pem,
    TlsSettings,
)

_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
MAX_COST = 14
"""The largest cost of a hash: one thread takes 0.8 s for it, twice as long for the next."""

_HASH = re.compile(r"\$2[aby]?\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}", re.ASCII)
_HTTP2 = ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NOT_YAML = "not YAML: it holds what YAML does not allow"
_TEXT, _NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"


class _ConfigFileError(Exception):
    """Say what is wrong with the file; :func:`read_settings` adds the file's name."""


class _Loader(yaml.SafeLoader):
    """Refuse duplicate and list keys; keys and headers' values are texts, as Go reads them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _ConfigFileError(f"line {key.start_mark.line + 1}: a key must be a text")
            if key.value in seen:
                raise _ConfigFileError(f"line {key.start_mark.line + 1}: {key.value!r} is there twice")
            seen.add(key.value)
            key.tag = _TEXT
            if key.value in HEADERS and isinstance(value, yaml.ScalarNode) and value.tag != _NULL:
                value.tag = _TEXT
        return super().construct_mapping(node, deep)


def read_settings(path: Path) -> AccessSettings:
    """Read the file, without those it names. Raises StartupError, never with a secret."""
    try:
        return _settings(_parse(path), path.parent)
    except OSError as error:
        whose = "; it is read as the user of --web.user" if isinstance(error, PermissionError) else ""
        message = f"cannot read --web.config.file={path}: {error.strerror}{whose}"
    except (_ConfigFileError, UnicodeDecodeError) as error:
        message = f"--web.config.file={path}: {' '.join(str(error).split())}"  # a key may have a newline
    raise StartupError(message)


def _parse(path: Path) -> object:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 a safe loader, and stricter
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        message = f"{line}not YAML: {error.problem or 'it cannot be read'}"
    except (yaml.YAMLError, ValueError, RecursionError):
        message = _NOT_YAML
    raise _ConfigFileError(message)


class _Tls(Struct, forbid_unknown_fields=True):
    cert: str | None = None
    cert_file: str | None = None
    key: str | None = None
    key_file: str | None = None
    client_ca: str | None = None
    client_ca_file: str | None = None
    client_auth_type: str | None = None
    client_allowed_sans: list[str] | None = None
    min_version: str | None = None
    max_version: str | None = None
    cipher_suites: list[str] | None = None
    prefer_server_cipher_suites: bool = True
    curve_preferences: list[str] | None = None


class _Http(Struct, forbid_unknown_fields=True):
    http2: bool = True
    headers: dict[str, Any] | None = None


class _RateLimit(Struct, forbid_unknown_fields=True):
    interval: Any = 0
    burst: Annotated[int, Meta(ge=0)] = 0


class _File(Struct, forbid_unknown_fields=True):
    tls_server_config: _Tls | None = None
    http_server_config: _Http | None = None
    basic_auth_users: dict[str, Any] | None = None
    rate_limit: _RateLimit | None = None


_KINDS = {
    "bool": "true or false",
    "int": "a whole number of 0 or more",
    "str": "a text; put it in quotes",
    "array": "a list of texts",
    "object": "a mapping of keys to values",
}
"""What a value must be, by msgspec's name of it."""

_FAULT = re.compile(
    r"(?s)(?:Expected `(\w+).*?|Object contains unknown field `(.*?)`)(?: - at `\$\.([\w.]+)(\[.*)?`)?"
)


def _settings(raw: object, directory: Path) -> AccessSettings:
    raw = {} if raw is None else raw
    try:
        file = convert(raw, _File)
    except ValidationError as error:
        raise _ConfigFileError(_fault(str(error))) from error
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise _ConfigFileError(_NOT_YAML) from error
    http, rate = file.http_server_config or _Http(), file.rate_limit or _RateLimit()
    given = isinstance(raw, dict) and raw.get("tls_server_config")  # any key asks for TLS
    return AccessSettings(
        tls=_tls(file.tls_server_config, directory, http2=http.http2)
        if given and file.tls_server_config
        else None,
        users=_users(_texts(file.basic_auth_users, "basic_auth_users")),
        headers=_headers(_texts(http.headers, "http_server_config.headers")),
        http2=http.http2,
        interval=_duration(rate.interval),
        burst=rate.burst,
    )


def _fault(said: str) -> str:
    """Return what msgspec says of a wrong value in the words of the file; it never names the value."""
    found = _FAULT.fullmatch(said)
    if found is None:
        return said
    kind, unknown, path, item = found.groups()
    if unknown is not None:
        key = f"{path}.{unknown}" if path else unknown
        return f"{key} is not a key of a web configuration file; correct or remove it"
    return f"{path or 'the file'} must be {_KINDS['array' if item else kind]}"


def _texts(values: Mapping[str, Any] | None, section: str) -> dict[str, str]:
    for name, value in (values or {}).items():
        if not isinstance(value, str | None):
            raise _ConfigFileError(f"{section}.{name} must be {_KINDS['str']}")
    return {name: value or "" for name, value in (values or {}).items()}


def _duration(value: object) -> float:
    """Return a duration as Go writes it, in seconds; a bare number is nanoseconds, as Go reads it."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value * 1e-9
    text = str(value)
    if text == "0" or (text and not _DURATION.sub("", text)):
        return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
    raise _ConfigFileError("rate_limit.interval is not a duration; write for example 1s or 500ms")


def _users(users: dict[str, str]) -> dict[str, str]:
    for name, hashed in users.items():
        if ":" in name:
            raise _ConfigFileError(
                f"basic_auth_users: {name!r} has a colon, which no browser can send in a name"
            )
        if not _HASH.fullmatch(hashed):
            raise _ConfigFileError(
                f"basic_auth_users: {name!r} has no bcrypt hash; make one with htpasswd -nBC 10 ''"
            )
        if int(hashed.split("$")[2]) > MAX_COST:
            raise _ConfigFileError(
                f"basic_auth_users: the hash of {name!r} has a cost above {MAX_COST}, and others would wait; "
                "make one with htpasswd -nBC 10 ''"
            )
    return users


def _headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if name not in HEADERS:
            raise _ConfigFileError(
                f"http_server_config.headers: {name!r} cannot be set; only these can: {', '.join(HEADERS)}"
            )
        if value and HEADERS[name] and value not in HEADERS[name]:
            raise _ConfigFileError(f"http_server_config.headers: {name} must be {' or '.join(HEADERS[name])}")
        if not value.isprintable():
            raise _ConfigFileError(f"http_server_config.headers: {name} must be one line of text")
    return {name: value for name, value in headers.items() if value}


def _pem(text: str | None, name: str | None, directory: Path) -> Pem:
    return Pem(path=directory / name) if name else Pem(text or "")


def _tls(given: _Tls, directory: Path, *, http2: bool) -> TlsSettings:
    sans = given.client_allowed_sans
    tls = TlsSettings(
        certificate=_pem(given.cert, given.cert_file, directory),
        key=_pem(given.key, given.key_file, directory),
        client_ca=_pem(given.client_ca, given.client_ca_file, directory),
        client_auth=given.client_auth_type or NO_CLIENT,
        allowed_sans=None if sans is None else frozenset(sans),
        oldest=given.min_version or "TLS12",
        newest=given.max_version or "TLS13",
        ciphers=tuple(given.cipher_suites or ()),
        own_order=given.prefer_server_cipher_suites,
        curves=tuple(given.curve_preferences or ()),
    )
    for wrong in _tls_problems(tls, http2=http2):
        raise _ConfigFileError(f"tls_server_config: {wrong}")
    return tls


def _tls_problems(tls: TlsSettings, *, http2: bool) -> list[str]:
    problems = [*_unknown_names(tls)]
    if not tls.certificate:
        problems.append("cert_file is missing (or cert)")
    if not tls.key:
        problems.append("key_file is missing (or key)")
    if not problems and VERSIONS.index(tls.oldest) > VERSIONS.index(tls.newest):
        problems.append(f"min_version {tls.oldest} is newer than max_version {tls.newest}")
    problems += _client_problems(tls)
    if http2 and tls.ciphers and tls.oldest != "TLS13" and not set(_HTTP2) & set(tls.ciphers):
        problems.append(f"cipher_suites lacks what HTTP/2 needs; add {_HTTP2[0]}, or set http2: false")
    return problems


def _unknown_names(tls: TlsSettings) -> Iterator[str]:
    for given, known, what, hint in (
        ((tls.oldest, tls.newest), VERSIONS, "TLS version", ", ".join(VERSIONS)),
        (tls.ciphers, CIPHERS, "cipher suite", "Go's names"),
        (tls.curves, CURVES, "curve", ", ".join(CURVES)),
    ):
        yield from (f"not a {what}: {each!r}; use {hint}" for each in given if each not in known)


def _client_problems(tls: TlsSettings) -> Iterator[str]:
    if tls.client_auth in _UNVERIFIED:
        yield (
            f"client_auth_type {tls.client_auth} accepts a certificate that is not "
            f"verified: Python's ssl cannot do that, and it proves nothing; use {REQUIRED}"
        )
    elif tls.client_auth not in (NO_CLIENT, IF_GIVEN, REQUIRED):
        yield f"not a client_auth_type: {tls.client_auth!r}; use {NO_CLIENT}, {IF_GIVEN} or {REQUIRED}"
    elif tls.client_ca and tls.client_auth == NO_CLIENT:
        yield f"client_ca_file does nothing without client_auth_type; use {REQUIRED}"
    if tls.allowed_sans is not None and tls.client_auth != REQUIRED:
        yield f"client_allowed_sans needs client_auth_type {REQUIRED}"
