"""A program's name, and that nothing of its arguments is shown with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramledger.readers.hosts.program_names import program_name, worker_evidence

SECRET = "hunter2"  # noqa: S105 what must never come out

NAMES: list[tuple[str, str, str]] = [
    ("python train.py --token hunter2", "python", "train.py"),
    ("/usr/bin/python3.11 -u -X dev -W error /srv/jobs/train.py hunter2", "python3", "train.py"),
    ("python -Wignore -OO train.py", "python", "train.py"),
    ("python -m torch.distributed.run --nproc 2 train.py", "python", "torch.distributed.run"),
    ("python -um pkg.main hunter2", "python", "pkg.main"),
    ("python3 -c hunter2", "python3", "python3 -c"),
    ("python -Ic hunter2 hunter2", "python", "python -c"),
    ("python -chunter2", "python", "python -c"),
    ("python", "python", "python"),
    ("python -", "python", "python"),
    ("python -- train.py", "python", "train.py"),
    ("python --unknown hunter2", "python", "python"),
    ("python --check-hash-based-pycs always train.py", "python", "train.py"),
    ("python app/ hunter2", "python", "app"),
    ("pypy3 bench.py", "pypy3", "bench.py"),
    ("/venv/bin/python3 /venv/bin/torchrun --nproc-per-node 2 train.py", "torchrun", "torchrun"),
    ("bash -c hunter2", "bash", "bash"),
    ("/bin/sh ./run-all.sh hunter2", "run-all.sh", "sh"),
    ("-bash", "bash", "bash"),
    ("perl -I lib -w script.pl hunter2", "perl", "script.pl"),
    ("perl -ne hunter2 file", "perl", "perl -e"),
    ("ruby -r json tool.rb hunter2", "ruby", "tool.rb"),
    ("node --max-old-space-size=4096 --require hunter2 server.js", "node", "server.js"),
    ("node --no-such-option hunter2", "node", "node"),
    ("node -e hunter2", "node", "node -e"),
    ("java -Xmx4g -Dkey=hunter2 -jar /opt/app/serve.jar hunter2", "java", "serve.jar"),
    ("java -cp hunter2 org.example.Main hunter2", "java", "org.example.Main"),
    ("java --add-opens java.base/java.lang=ALL-UNNAMED -m mod/org.example.Main", "java", "org.example.Main"),
    ("java --no-such hunter2", "java", "java"),
    ("julia -t 8 -O3 --project=/srv fit.jl hunter2", "julia", "fit.jl"),
    ("/usr/lib/R/bin/exec/R --no-echo --no-restore --file=fit.R --args hunter2", "R", "fit.R"),
    ("R hunter2", "R", "R"),
    ("Rscript --vanilla fit.R hunter2", "Rscript", "fit.R"),
    ("/opt/bin/vectoradd hunter2", "vectoradd", "vectoradd"),
]


@pytest.mark.parametrize(("line", "comm", "name"), NAMES)
def test_a_program_has_its_own_name_and_no_argument(line: str, comm: str, name: str) -> None:
    """A program has the name of its script, module or file, and nothing of its arguments."""
    assert program_name(line.split(" "), comm) == name
    assert SECRET not in program_name(line.split(" "), comm)


@pytest.mark.parametrize(
    ("argv", "comm", "name"),
    [
        (["VLLM::EngineCore"], "VLLM::EngineCor", "VLLM::EngineCore"),
        (["VLLM::EngineCore --key hunter2"], "VLLM::EngineCor", "VLLM::EngineCore"),
        (["ray::train()"], "ray::train()", "ray::train()"),
        (["nginx: worker process"], "nginx", "nginx"),
        (["sshd: user [priv]", "", ""], "sshd", "sshd"),
        (["/opt/My Program/bin/My Render"], "My Render", "My Render"),
        (["/usr/bin/python3 train.py hunter2"], "python3", "python3"),
        (["   "], "odd", "odd"),
        ([], "kworker/0:1", "kworker/0:1"),
        (["", "hunter2"], "odd", "odd"),
        (["evil\x1b[2J\n\udc80name"], "evil", "evil\ufffd[2J\ufffd\ufffdname"),
        (["x" * 100], "x" * 15, "x" * 64),
    ],
)
def test_titles_and_oddities_have_a_name(argv: list[str], comm: str, name: str) -> None:
    """Of a title that replaces the arguments the first word counts; unprintable text is replaced."""
    assert program_name(argv, comm) == name


@pytest.mark.parametrize(
    ("argv", "name", "signs"),
    [
        (
            [
                "python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)",
                "--multiprocessing-fork",
            ],
            "multiprocessing.spawn", ("multiprocessing",),
        ),
        (
            ["python3", "-s", "-c", "from multiprocessing.forkserver import main; main(5, 6, ['__main__'])"],
            "multiprocessing.forkserver", ("multiprocessing",),
        ),
        (
            ["python3.14", "-c", "import sys; from multiprocessing.forkserver import main; main(5, 6)", "x"],
            "multiprocessing.forkserver", ("multiprocessing",),
        ),
        (
            ["python3", "-c", "from multiprocessing.resource_tracker import main;main(5)"],
            "multiprocessing.resource_tracker", ("multiprocessing",),
        ),
        (
            ["python", "-m", "joblib.externals.loky.backend.popen_loky_posix", "--pipe", "5"],
            "joblib.externals.loky.backend.popen_loky_posix", ("multiprocessing",),
        ),
        (["VLLM::Worker_TP0"], "VLLM::Worker_TP0", ("title",)),
        (["sglang::scheduler_TP1"], "sglang::scheduler_TP1", ("title",)),
        (["VLLM::APIServer"], "VLLM::APIServer", ()),
        (["python", "-c", "import multiprocessing; hunter2"], "python -c", ()),
        (["python", "train.py", "from multiprocessing.spawn import spawn_main"], "train.py", ()),
    ],
)  # fmt: skip
def test_a_worker_is_known_by_its_command(argv: list[str], name: str, signs: tuple[str, ...]) -> None:
    """Only a child that multiprocessing or a serving framework started has this worker evidence."""
    assert program_name(argv, "python") == name
    assert worker_evidence(argv) == signs


@given(st.lists(st.text()), st.text(max_size=15))
def test_every_command_line_has_a_printable_name(argv: list[str], comm: str) -> None:
    """No command line raises, and every name is printable and short."""
    name = program_name(argv, comm)
    assert len(name) <= 64
    assert name.isprintable()
