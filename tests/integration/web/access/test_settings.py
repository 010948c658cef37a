"""The web configuration file: what is accepted, and what is refused with which message."""

from pathlib import Path

import bcrypt
import pytest

from vramledger.errors import StartupError
from vramledger.web.access.config_file import read_settings
from vramledger.web.access.tls import CIPHERS, CURVES, AccessSettings, Pem

# The same in every process of a run, so that all processes collect the same tests.
HASH = bcrypt.hashpw(b"secret", b"$2b$04$abcdefghijklmnopqrstuu").decode()
PAIR = "cert_file: server.crt\n  key_file: server.key"
TLS = f"tls_server_config:\n  {PAIR}"


def read(tmp_path: Path, text: str) -> AccessSettings:
    path = tmp_path / "web.yml"
    path.write_text(text, encoding="utf-8")
    return read_settings(path)


@pytest.mark.parametrize("text", ["", "# none\n", "tls_server_config:", "tls_server_config: {}\nrate_limit:"])
def test_an_empty_file_opens_the_door(tmp_path: Path, text: str) -> None:
    """A file without settings gives plain HTTP for everybody, like no file."""
    assert read(tmp_path, text) == AccessSettings()


def test_everything_can_be_set(tmp_path: Path) -> None:
    """Every key of the toolkit's documentation works, and paths are relative to the file."""
    settings = read(
        tmp_path,
        f"""
tls_server_config:
  {PAIR}
  client_ca_file: /etc/ca.pem
  client_auth_type: RequireAndVerifyClientCert
  client_allowed_sans: [prometheus.example.org]
  min_version: TLS13
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: false
  curve_preferences: [CurveP256]
http_server_config:
  http2: false
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: deny
    X-XSS-Protection: ""
basic_auth_users:
  alice: {HASH}
rate_limit:
  interval: 1s500ms
  burst: 20
""",
    )
    assert settings.tls is not None
    assert settings.tls.files == (tmp_path / "server.crt", tmp_path / "server.key", Path("/etc/ca.pem"))
    assert settings.tls.allowed_sans == frozenset({"prometheus.example.org"})
    assert (settings.tls.oldest, settings.tls.own_order, settings.http2) == ("TLS13", False, False)
    assert settings.headers == {"Strict-Transport-Security": "max-age=31536000", "X-Frame-Options": "deny"}
    assert settings.users == {"alice": HASH}
    assert (settings.interval, settings.burst) == (1.5, 20)


@pytest.mark.parametrize(
    "more",
    [
        f"cipher_suites: [{', '.join(CIPHERS)}]", f"curve_preferences: [{', '.join(CURVES)}]",
        "client_auth_type: VerifyClientCertIfGiven", "client_auth_type: NoClientCert", "min_version: TLS10",
    ],
)  # fmt: skip
def test_tls_settings_are_taken(tmp_path: Path, more: str) -> None:
    """All suites and curves that Go considers secure, and the kinds of client check that prove something."""
    assert read(tmp_path, f"{TLS}\n  {more}\n").tls is not None


def test_a_suite_without_http2_is_taken_without_http2(tmp_path: Path) -> None:
    """Suites that HTTP/2 forbids are allowed alone only where HTTP/2 is off."""
    suites = f"{TLS}\n  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA]\n"
    assert read(tmp_path, f"{suites}http_server_config: {{http2: false}}\n").tls is not None
    with pytest.raises(StartupError, match="lacks what HTTP/2 needs"):
        read(tmp_path, suites)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hllo: world", "hllo is not a key of a web configuration file"),
        ("tls_server_cofig:\n  cert_file: x", "tls_server_cofig is not a key"),
        (f"{TLS}\n  certificate: x", "tls_server_config.certificate is not a key"),
        *(("just a text", "the file must be a mapping"), ("- a\n- list", "the file must be a mapping")),
        *(("a: [", "line 1: not YAML"), ("a: b: c", "line 1: not YAML"), ("a: \x00", "not YAML")),
        *(('"\\ud800"', "not YAML"), ('"\\ud800": 1', "not YAML"), ("[" * 1100, "not YAML")),
        *(("&a [*a]", "the file must be a mapping"), ("!!python/object/apply:os.system [id]", "not YAML")),
        (f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}", "line 3: 'a' is there twice"),
        ("tls_server_config: {cert_file: x, [y]}", "line 1: a key must be a text"),
        ("{a: 1}: 2", "line 1: a key must be a text"),
        ("tls_server_config: {key_file: x}", "cert_file is missing"),
        ("tls_server_config: {cert_file: '', key_file: x}", "cert_file is missing"),
        ("tls_server_config: {cert: '', key_file: x}", "cert_file is missing"),
        ("tls_server_config: {cert_file: x}", "key_file is missing"),
        ("tls_server_config: {cert_file: x, key: ''}", "key_file is missing"),
        ("tls_server_config: {min_version: TLS13}", "cert_file is missing"),
        (f"{TLS}\n  client_ca_file: ca.pem", "client_ca_file does nothing without client_auth_type"),
        (f"{TLS}\n  client_auth_type: Always", "not a client_auth_type: 'Always'"),
        (f"{TLS}\n  client_auth_type: RequireAnyClientCert", "use RequireAndVerifyClientCert"),
        (f"{TLS}\n  client_auth_type: RequestClientCert", "use RequireAndVerifyClientCert"),
        (f"{TLS}\n  client_allowed_sans: [a]", "client_allowed_sans needs"),
        (f"{TLS}\n  client_auth_type: VerifyClientCertIfGiven\n  client_allowed_sans: []", "sans needs"),
        (f"{TLS}\n  cipher_suites: [TLS_INVENTED]", "not a cipher suite: 'TLS_INVENTED'"),
        (f"{TLS}\n  cipher_suites: [TLS_RSA_WITH_AES_128_CBC_SHA]", "not a cipher suite"),
        (f"{TLS}\n  cipher_suites: TLS_AES_128_GCM_SHA256", "must be a list of texts"),
        (f"{TLS}\n  curve_preferences: [CurveP257]", "not a curve: 'CurveP257'"),
        (f"{TLS}\n  min_version: TLS111", "not a TLS version: 'TLS111'"),
        (f"{TLS}\n  min_version: TLS13\n  max_version: TLS12", "TLS13 is newer than max_version TLS12"),
        (f"{TLS}\n  prefer_server_cipher_suites: maybe", "must be true or false"),
        ("basic_auth_users:\n  alice: secret", "'alice' has no bcrypt hash"),
        ("basic_auth_users:\n  alice: 1234", "alice must be a text"),
        (f"basic_auth_users:\n  alice: $2b$15${'a' * 53}", "hash of 'alice' has a cost above 14"),
        (f"basic_auth_users:\n  alice: $2y$31${'a' * 53}", "hash of 'alice' has a cost above 14"),
        ("basic_auth_users:\n  alice:", "'alice' has no bcrypt hash"),
        (f"basic_auth_users:\n  'a:b': {HASH}", "'a:b' has a colon"),
        ("basic_auth_users: [alice]", "basic_auth_users must be a mapping"),
        ("http_server_config: {headers: {Server: x}}", "'Server' cannot be set"),
        ("http_server_config: {headers: {X-Frame-Options: allow}}", "must be deny or sameorigin"),
        ("http_server_config: {headers: {X-Content-Type-Options: sniff}}", "must be nosniff"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb: c"}}', "must be one line"),
        ("rate_limit: {interval: 1, burst: x}", "burst must be a whole number"),
        ("rate_limit: {interval: soon}", "interval is not a duration"),
        ("rate_limit: {interval: -1s}", "interval is not a duration"),
        ("rate_limit: {interval: true}", "interval is not a duration"),
        ("rate_limit: {burst: -1}", "burst must be a whole number"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    """Every fault is refused with one line that names the file and the fault, and no secret."""
    with pytest.raises(StartupError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert message.startswith(f"--web.config.file={tmp_path / 'web.yml'}: ")
    assert said in message
    assert not any(each in message for each in ("\n", "secret", HASH))


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """A missing file is named with the flag that named it."""
    said = r"^cannot read --web\.config\.file=.*: No such file or directory$"
    with pytest.raises(StartupError, match=said):
        read_settings(tmp_path / "missing.yml")


def test_a_bare_interval_is_nanoseconds(tmp_path: Path) -> None:
    """A rate without a unit means what it means to Go, and 0 means no limit."""
    assert read(tmp_path, "rate_limit: {interval: 1000000000, burst: 1}").interval == pytest.approx(1.0)
    assert read(tmp_path, "rate_limit: {interval: 0}").interval == 0


def test_secrets_are_not_shown() -> None:
    """Neither hashes nor keys are in the text of the settings that a log or a traceback would show."""
    assert "secret" not in repr(Pem("secret"))
    assert HASH not in repr(AccessSettings(users={"alice": HASH}))


def test_a_header_is_a_text_whatever_it_looks_like(tmp_path: Path) -> None:
    """Values of headers and names of users are read as Go reads them."""
    settings = read(
        tmp_path,
        "http_server_config:\n  headers:\n    X-Frame-Options: deny\n"
        "    Strict-Transport-Security: max-age=31536000; includeSubDomains\n"
        "    X-Content-Type-Options: nosniff\n    X-XSS-Protection: 1\n"
        "    Content-Security-Policy: \"default-src 'self' *.test.example.net\"\n"
        f"basic_auth_users:\n  123: {HASH}\n  yes: {HASH}\n",
    )
    assert (settings.headers["X-XSS-Protection"], list(settings.users)) == ("1", ["123", "yes"])
    assert read(tmp_path, "http_server_config:\n  headers: {X-XSS-Protection: }\n").headers == {}
