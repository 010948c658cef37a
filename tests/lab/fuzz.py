"""``python -m tests.lab.fuzz [TARGET] [SECONDS]``: inputs for the parsers, guided by code coverage.

Needs atheris, which only ``make fuzz`` installs. What makes a parser raise anything but its own error is left
in a file, to become a test; the status is then 1.
"""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

SECONDS = 90
LONGEST = 4096

Parser = Callable[[bytes], object]


class Target(NamedTuple):
    """A target: ``make`` imports the parser for atheris; ``seeds`` are valid inputs."""

    make: Callable[[Path], Parser]
    seeds: Callable[[], Iterable[bytes]]


def _cgroup(_: Path) -> Parser:
    from vramledger.readers.owners.cgroups import hierarchy_paths, parse_cgroup

    def parse(data: bytes) -> None:
        lines = data.decode("utf-8", "surrogateescape").splitlines()
        parse_cgroup(lines)
        hierarchy_paths(lines)

    return parse


def _process(_: Path) -> Parser:
    from vramledger.readers.hosts.facts import find_libraries, find_settings
    from vramledger.readers.hosts.program_names import program_name, worker_evidence
    from vramledger.readers.hosts.stat import parse_comm, parse_stat

    def parse(data: bytes) -> None:
        """Use the first byte to choose a file of a process."""
        kind, data = data[:1], data[1:]
        if kind == b"s":
            with suppress(ValueError):
                row = parse_stat(7, data)
                parse_comm(data)
                assert row.pid == 7
        elif kind == b"m":
            find_libraries(data)
        elif kind == b"e":
            assert all(name and "\n" not in value for name, value in find_settings(b"\0" + data))
        else:
            words = [word.decode("utf-8", "surrogateescape") for word in data.split(b"\0")]
            assert "\n" not in program_name(words, "comm")
            worker_evidence(words)

    return parse


def _recording(_: Path) -> Parser:
    import atheris

    from tests.integration.fuzz.test_tracker import FILM, WANT, changed, shown
    from vramledger.metrics.exposition import Exposition

    def parse(data: bytes) -> None:
        """Change parts of a reading: in the decoder, which is written in C, nothing is watched."""
        drawn = atheris.FuzzedDataProvider(data)
        number = drawn.ConsumeIntInRange(0, len(FILM) - 1)
        changes = [
            (drawn.ConsumeInt(4), _value(drawn.ConsumeIntInRange(0, 6), drawn))
            for _ in range(drawn.ConsumeIntInRange(1, 4))
        ]
        if (wrong := changed(number, changes)) is not None:
            for each in shown([*FILM[:2], wrong, FILM[-1]]):
                assert Exposition(100, lambda: None).render(each, WANT)

    return parse


def _value(kind: int, drawn: Any) -> object:  # noqa: ANN401 of atheris
    simple = [None, True, drawn.ConsumeInt(9), drawn.ConsumeRegularFloat(), drawn.ConsumeUnicode(9)]
    return simple[kind] if kind < len(simple) else [] if kind == len(simple) else {}


def _figures(_: Path) -> Parser:
    from vramledger.readers.vllm import parse_figures

    return parse_figures


def _question(_: Path) -> Parser:
    from vramledger.serving.control_messages import (
        ControlError,
        ReleaseRequest,
        SnapshotRequest,
        read,
        read_question,
    )

    words = ("at", "since", "readings", "1764108000.25", "-1", "nan", "1e999", "seconds", "after", "")

    def parse(data: bytes) -> None:
        """Draw what is right in most places: what reads it is written in C, so nothing leads the search."""
        rng = Random(data)  # noqa: S311 no secret

        def text() -> str:
            return rng.choice(words) or "".join(map(chr, rng.choices(range(0x110000), k=rng.randrange(9))))

        with suppress(ControlError):
            read_question(
                {name: text() for name in ("ask", "at", "from", "to", text()) if rng.random() < 0.6}
            )
        value: object = rng.choice((text(), 1, -0.5, 1e999, None, True, [1, 2], [[]] * 50, {}))
        line = json.dumps({text(): value}).encode()
        with suppress(ControlError):
            read(line[: rng.randrange(2 * len(line))], rng.choice((ReleaseRequest, SnapshotRequest)))

    return parse


def _snapshot(home: Path) -> Parser:
    from vramledger.errors import SnapshotError
    from vramledger_agent.torch_snapshots.safe_pickle import load_plain
    from vramledger_agent.torch_snapshots.snapshot import parse_snapshot
    from vramledger_agent.torch_snapshots.text import snapshot_text

    file = home / "snapshot.pickle"

    def parse(data: bytes) -> None:
        file.write_bytes(data)
        with suppress(SnapshotError):
            snapshot_text(parse_snapshot(load_plain(file)))

    return parse


def _web_configuration(home: Path) -> Parser:
    from vramledger.errors import StartupError
    from vramledger.web.access.config_file import read_settings

    file = home / "web.yml"

    def parse(data: bytes) -> None:
        file.write_bytes(data)
        said = f"{file}: well"
        try:
            read_settings(file)
        except StartupError as error:
            said = str(error)
        assert "\n" not in said
        assert str(file) in said

    return parse


def _agent(_: Path) -> Parser:
    from vramledger.model.agent_report import RefusedError, plain, read_report
    from vramledger.model.agent_report import parse as read

    def parse(data: bytes) -> None:
        with suppress(RefusedError):
            report = read_report(read(data))
            assert read_report(plain(report)) == report

    return parse


def _kubelet(_: Path) -> Parser:
    from vramledger.kubernetes.kubelet import parse_allocatable, parse_grants

    def parse(data: bytes) -> None:
        with suppress(ValueError):
            list(parse_grants(data))
        with suppress(ValueError):
            parse_allocatable(data)

    return parse


def _pickles() -> Iterable[bytes]:
    from tests.support.torch_snapshots import training

    return [pickle.dumps(training(1), protocol=protocol) for protocol in range(6)]


def _messages() -> Iterable[bytes]:
    from tests.integration.fuzz.test_agents import MESSAGES

    return [json.dumps(each).encode() for each in MESSAGES]


STAT = b"s7 (a b) S 1 7 7 0 -1 4194304 1 0 0 0 1 1 0 0 20 0 1 0 123456 1000 10 18446744073709551615 1"
TARGETS = {
    "cgroup": Target(_cgroup, lambda: [
        b"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + b"0" * 32
        + b".slice/cri-containerd-" + b"a" * 64 + b".scope\n",
        b"1:name=systemd:/slurm/uid_1000/job_7/step_0/task_0\n", b"0::/user.slice/user-1000.slice/a.scope\n",
    ]),
    "process": Target(_process, lambda: [
        STAT, b"m7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.1 (deleted)\n",
        b"eXLA_PYTHON_CLIENT_MEM_FRACTION=.9\0PYTORCH_CUDA_ALLOC_CONF=backend:native\0",
        b"apython3\0-m\0torch.distributed.run\0train.py", b"apython3\0-c\0import x\0--multiprocessing-fork",
    ]),
    "recording": Target(_recording, lambda: [Random(number).randbytes(64) for number in range(50)]),  # noqa: S311 where it begins
    "figures": Target(_figures, lambda: [
        b'vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25\nvllm:num_requests_running{} 3.0\n',
    ]),
    "question": Target(_question, lambda: [b"1", b"2"]),
    "snapshot": Target(_snapshot, _pickles),
    "web-configuration": Target(_web_configuration, lambda: [
        b"basic_auth_users:\n  alice: $2y$10$" + b"a" * 53 + b"\nrate_limit: {interval: 1s, burst: 3}\n",
        b"tls_server_config: {cert_file: a, key_file: b, min_version: TLS12, client_allowed_sans: [x]}\n",
        b"http_server_config: {http2: true, headers: {X-Frame-Options: deny}}\n",
    ]),
    "agent": Target(_agent, _messages),
    "kubelet": Target(_kubelet, lambda: [
        b"\n5\n\x03pod\x12\x02ns\x1a*\n\x01c\x12%\n\x0envidia.com/gpu\x12\x0aGPU-012345\x1a\x00",
    ]),
}  # fmt: skip


def feed(name: str, seconds: int, home: Path) -> None:
    """Feed one target in this process, which ends with it."""
    import atheris

    target = TARGETS[name]
    corpus = home / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    for module in [each for each in sys.modules if each.startswith("vramledger")]:
        del sys.modules[module]  # imported again, so that atheris can watch it
    with atheris.instrument_imports(include=["vramledger", "vramledger_agent"], enable_loader_override=False):
        parser = target.make(home)
    found = Path(os.environ.get("VRAMLEDGER_FOUND", ".cache/fuzz"))
    found.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-max_total_time={seconds}", f"-max_len={LONGEST}", "-timeout=20", "-rss_limit_mb=3000",
        f"-artifact_prefix={found}/{name}-", "-print_final_stats=1", str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *arguments], parser)
    atheris.Fuzz()


def main(*arguments: str) -> int:
    """Feed all targets for a while each, or one for a number of seconds."""
    if importlib.util.find_spec("atheris") is None:
        print("NOT TESTED: no atheris here; hypothesis alone has fed the parsers", file=sys.stderr)
        return 0
    if len(arguments) == 2:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as home:
            feed(arguments[0], int(arguments[1]), Path(home))
    failed = []
    for name in arguments or TARGETS:
        print(f"==> {name}", file=sys.stderr)
        command = [sys.executable, "-m", "tests.lab.fuzz", name, str(SECONDS)]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode or "stat::new_units_added:          0\n" in done.stderr:  # nothing was watched
            failed.append(name)
            print(done.stderr[-4000:], file=sys.stderr)
        for line in done.stderr.splitlines():
            if line.startswith(("stat::number_of_executed_units", "stat::new_units_added")):
                print(line, file=sys.stderr)
    if failed:
        print(f"broken by inputs in .cache/fuzz, or not watched: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
