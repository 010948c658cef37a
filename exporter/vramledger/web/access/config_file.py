"""Read the web configuration file (``--web.config.file``), in the format of Prometheus' exporter-toolkit.

It is read strictly: a key that we do not know is an error, because otherwise a misspelt ``basic_auth_users``
would let everybody in. It is a module of its own, so that a YAML parser is loaded only with such a file.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from vramledger.errors import StartupError
from vramledger.web.access.settings import (
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
_HASH = re.compile(r"\$2[aby]?\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}", re.ASCII)
_HTTP2 = ("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_TEXT, _NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"


class _ConfigFileError(Exception):
    """Say what is wrong with the file; :func:`read_settings` adds the file's name."""


class _Loader(yaml.SafeLoader):
    """Refuse a duplicate key, which YAML forbids and PyYAML accepts, and a list as a key.

    Keys, and the values of headers, are texts whatever they look like, as Go reads them: ``X-XSS-Protection:
    1``.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                message = f"line {key.start_mark.line + 1}: a key must be a text"
                raise _ConfigFileError(message)
            if key.value in seen:
                message = f"line {key.start_mark.line + 1}: {key.value!r} is there twice"
                raise _ConfigFileError(message)
            seen.add(key.value)
            key.tag = _TEXT
            if key.value in HEADERS and isinstance(value, yaml.ScalarNode) and value.tag != _NULL:
                value.tag = _TEXT
        return super().construct_mapping(node, deep)


def read_settings(path: Path) -> AccessSettings:
    """Read a web configuration file; the files that it names are not opened.

    Raises:
        StartupError: it cannot be read or is wrong; the message never holds a secret.
    """
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
        message = "not YAML: it holds what YAML does not allow"
    raise _ConfigFileError(message)


class _Section:
    """A mapping of the file; its keys are taken out one by one, and the remaining ones are unknown."""

    def __init__(self, value: object, name: str) -> None:
        if value is not None and not isinstance(value, dict):
            message = f"{name or 'the file'} must be a mapping of keys to values"
            raise _ConfigFileError(message)
        self.empty = not value
        self._left: dict[object, object] = dict(value or {})
        self._name = name

    def _key_path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def section(self, key: str) -> _Section:
        return _Section(self._left.pop(key, None), self._key_path(key))

    def text(self, key: str, default: str = "") -> str:
        value = self._left.pop(key, None)
        if value is None:
            return default
        if not isinstance(value, str):
            message = f"{self._key_path(key)} must be a text; put it in quotes"
            raise _ConfigFileError(message)
        return value or default

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._left.pop(key, default)
        if not isinstance(value, bool):
            message = f"{self._key_path(key)} must be true or false"
            raise _ConfigFileError(message)
        return value

    def number(self, key: str) -> int:
        value = self._left.pop(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            message = f"{self._key_path(key)} must be a whole number of 0 or more"
            raise _ConfigFileError(message)
        return value

    def duration(self, key: str) -> float:
        """Take out a duration as Go writes it, in seconds; a bare number is nanoseconds, as Go reads it."""
        value = self._left.pop(key, 0)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value * 1e-9
        text = str(value)
        if text == "0" or (text and not _DURATION.sub("", text)):
            return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
        message = f"{self._key_path(key)} is not a duration; write for example 1s or 500ms"
        raise _ConfigFileError(message)

    def texts(self, key: str) -> tuple[str, ...] | None:
        value = self._left.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            message = f"{self._key_path(key)} must be a list of texts"
            raise _ConfigFileError(message)
        return tuple(value)

    def pairs(self) -> dict[str, str]:
        """Take out all remaining values, as texts by their names."""
        return {str(key): self.text(key) for key in tuple(self._left) if isinstance(key, str)}

    def close(self) -> None:
        for key in self._left:
            message = (
                f"{self._key_path(str(key))} is not a key of a web configuration file; correct or remove it"
            )
            raise _ConfigFileError(message)


def _settings(raw: object, directory: Path) -> AccessSettings:
    top = _Section(raw, "")
    http = top.section("http_server_config")
    http2 = http.flag("http2", default=True)
    rate = top.section("rate_limit")
    settings = AccessSettings(
        tls=_tls(top.section("tls_server_config"), directory, http2=http2),
        users=_users(top.section("basic_auth_users")),
        headers=_headers(http.section("headers")),
        http2=http2,
        interval=rate.duration("interval"),
        burst=rate.number("burst"),
    )
    for section in (http, rate, top):
        section.close()
    return settings


def _users(section: _Section) -> dict[str, str]:
    users = section.pairs()
    section.close()
    for name, hashed in users.items():
        if ":" in name:
            message = f"basic_auth_users: {name!r} has a colon, which no browser can send in a name"
            raise _ConfigFileError(message)
        if not _HASH.fullmatch(hashed):
            message = f"basic_auth_users: {name!r} has no bcrypt hash; make one with htpasswd -nBC 10 ''"
            raise _ConfigFileError(message)
    return users


def _headers(section: _Section) -> dict[str, str]:
    headers = section.pairs()
    section.close()
    for name, value in headers.items():
        if name not in HEADERS:
            message = (
                f"http_server_config.headers: {name!r} cannot be set; only these can: {', '.join(HEADERS)}"
            )
            raise _ConfigFileError(message)
        if value and HEADERS[name] and value not in HEADERS[name]:
            message = f"http_server_config.headers: {name} must be {' or '.join(HEADERS[name])}"
            raise _ConfigFileError(message)
        if not value.isprintable():
            message = f"http_server_config.headers: {name} must be one line of text"
            raise _ConfigFileError(message)
    return {name: value for name, value in headers.items() if value}


def _pem(section: _Section, key: str, directory: Path) -> Pem:
    text, name = section.text(key), section.text(f"{key}_file")
    return Pem(path=directory / name) if name else Pem(text)


def _tls(section: _Section, directory: Path, *, http2: bool) -> TlsSettings | None:
    if section.empty:
        return None
    sans = section.texts("client_allowed_sans")
    tls = TlsSettings(
        certificate=_pem(section, "cert", directory),
        key=_pem(section, "key", directory),
        client_ca=_pem(section, "client_ca", directory),
        client_auth=section.text("client_auth_type", NO_CLIENT),
        allowed_sans=None if sans is None else frozenset(sans),
        oldest=section.text("min_version", "TLS12"),
        newest=section.text("max_version", "TLS13"),
        ciphers=section.texts("cipher_suites") or (),
        own_order=section.flag("prefer_server_cipher_suites", default=True),
        curves=section.texts("curve_preferences") or (),
    )
    section.close()
    for wrong in _tls_problems(tls, http2=http2):
        message = f"tls_server_config: {wrong}"
        raise _ConfigFileError(message)
    return tls


def _tls_problems(tls: TlsSettings, *, http2: bool) -> list[str]:
    """Return what is wrong with TLS settings whose types are right."""
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
    """Yield the names of versions, cipher suites and curves that do not exist."""
    for given, known, what, hint in (
        ((tls.oldest, tls.newest), VERSIONS, "TLS version", ", ".join(VERSIONS)),
        (tls.ciphers, CIPHERS, "cipher suite", "Go's names"),
        (tls.curves, CURVES, "curve", ", ".join(CURVES)),
    ):
        yield from (f"not a {what}: {each!r}; use {hint}" for each in given if each not in known)


def _client_problems(tls: TlsSettings) -> Iterator[str]:
    """Yield what is wrong with what clients must show."""
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
