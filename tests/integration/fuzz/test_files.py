"""Files that a program, a container or an administrator writes: any bytes give a result or one error."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.fuzz.conftest import FUZZ
from tests.support.sure import sure
from vramledger.errors import RecordingError, StartupError
from vramledger.model.reading import Reading, decode, encode
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.reader import resolve_from_facts
from vramledger.sampling.replay import encode_header, read_recording
from vramledger.web.access.config_file import read_settings

STAT = b"%d (%b) %b " + b" ".join(b"%d" % number for number in range(1, 50))

IDS = st.sampled_from(["", "0" * 64, "abcdef0123456789" * 4, "8d3a1e5c-1f2b-4c3d-9e4f-5a6b7c8d9e0f"])
FOLDERS = "kubepods kubepods.slice docker user.slice system.slice slurm lxc .. . machine.slice".split()
SCOPES = ("docker-{}.scope", "cri-containerd-{}.scope", "kubepods-burstable-pod{}.slice")
PART = st.one_of(
    st.text(max_size=20),
    st.sampled_from(FOLDERS),
    *(IDS.map(scope.format) for scope in SCOPES),
    *(st.integers().map(step.format) for step in ("job_{}", "step_{}", "uid_{}")),
    st.text(max_size=9).map("{}.service".format),
)
CONTROLLER = st.sampled_from(["0::", "1:name=systemd:", "4:memory:", ":::", "", "x:y:z:"])
FOLDER = st.lists(PART, max_size=8).map("/".join)
LINE = st.tuples(CONTROLLER, FOLDER).map("/".join)
CGROUP = st.lists(LINE, max_size=6).map("\n".join)

ARGUMENTS = rb"python3 -m -c -u -- torchrun train.py java -jar - =".split()
VARIABLES = (
    rb"LOCAL_RANK=0 SYSTEMD_EXEC_PID=7 JPY_SESSION_NAME=/home/a/b.ipynb CUDA_VISIBLE JUPYTERHUB_USER=a"
    rb" XLA_PYTHON_CLIENT_MEM_FRACTION=.9 PYTORCH_CUDA_ALLOC_CONF=backend:x"
).split()
WORD = st.binary(max_size=40) | st.sampled_from([*ARGUMENTS, *VARIABLES, b"\xff"])
WORDS = st.lists(WORD, max_size=12).map(b"\0".join)
MAPPED = (
    b"7f0000000000-7f0000001000 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.1 (deleted)",
    b"7f00-7f01 r--p 0 0:0 0 /x/torch/lib/libtorch_cuda.so",
    b"0-0 r--p 0 0:0 0",
)
MAPS = st.lists(st.binary(max_size=60) | st.sampled_from(MAPPED), max_size=8).map(b"\n".join)
STATUSES = (
    b"Uid:\t0\t0\t0\t0\nNSpid:\t7\t1\nSigIgn:\t0000000000000001\n",
    b"Uid:\nNSpid:\nSigIgn:\n",
    b"Uid:\tx\nSigIgn:\tzz\n",
)
STATUS = st.binary(max_size=80) | st.sampled_from(STATUSES)


def proc(directory: Path, stat: bytes) -> Path:
    """Make a proc file system with one process, 7, and what its file ``stat`` says."""
    for name in ("7/task/7", "sys/kernel/random", "self"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "stat").write_text("btime 1700000000\n")
    (directory / "7/task/7/stat").write_bytes(stat)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@FUZZ
@given(
    comm=st.binary(max_size=20),
    status=STATUS,
    cmdline=WORDS,
    environ=WORDS,
    maps=MAPS,
    cgroup=CGROUP.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=80),
)
def test_whatever_a_process_writes_gives_facts(base: Path, comm: bytes, **files: bytes) -> None:
    """No name, argument, variable, mapping or cgroup prevents that its process, or another, is read."""
    place = proc(base / "proc", STAT % (7, comm, b"S"))
    for name, content in files.items():
        (place / "7" / name).write_bytes(content)
    host = Host(place)
    row = sure(host.row(7))
    facts = sure(host.facts(row))
    assert (facts.pid, facts.start) == (7, row.start)
    resolve_from_facts(facts)
    reading = Reading(1.0, 2.0, rows=(row,), facts=(facts,))
    assert decode(encode(reading)) == reading


@FUZZ
@given(data=st.binary(max_size=120))
def test_a_stat_of_any_bytes_is_a_row_or_none(base: Path, data: bytes) -> None:
    """An invalid ``stat`` counts as a process that does not exist."""
    place = proc(base / "proc-stat", data)
    rows, unseen = Host(place).rows([7])
    assert len(rows) + len(unseen) == 1


@FUZZ
@given(data=st.binary(max_size=200), tail=st.binary(max_size=200))
def test_a_recording_of_any_bytes_is_readings_or_one_error(base: Path, data: bytes, tail: bytes) -> None:
    """A file that is not a recording, or is cut off, gives its readings and one error that names it."""
    path = base / "film"
    good = encode_header() + encode(Reading(1.0, 2.0))
    for content in (data, b"\x1f\x8b" + data, good + tail, good[: len(data)] + data):
        path.write_bytes(content)
        with suppress(RecordingError):
            for reading in read_recording(path):
                encode(reading)


KEYS = st.sampled_from(
    "tls_server_config basic_auth_users http_server_config rate_limit cert_file key_file cert key headers"
    " http2 client_ca_file client_auth_type client_allowed_sans min_version max_version cipher_suites"
    " interval burst curve_preferences prefer_server_cipher_suites"
    " Strict-Transport-Security X-Frame-Options alice".split()
) | st.text(max_size=8)
VALUES = f"RequireAndVerifyClientCert TLS12 TLS13 CurveP256 1s $2y$10${'a' * 53} -1ns 9e99h".split()
TEXT = st.text(max_size=20) | st.sampled_from(VALUES)
YAML = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)


@FUZZ
@given(
    content=YAML.map(json.dumps).map(str.encode)
    | st.binary(max_size=120)
    | st.text(max_size=120).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_a_web_configuration_of_any_bytes_is_taken_or_one_error(base: Path, content: bytes) -> None:
    """An error in the file is reported in one line that names the file, whatever the file contains."""
    path = base / "web.yml"
    path.write_bytes(content)
    try:
        read_settings(path)
    except StartupError as error:
        assert str(path) in str(error)  # noqa: PT017 there need be none
        assert "\n" not in str(error)  # noqa: PT017
