"""How the agent gets into a program: unnoticed, before the program's code, and without replacing anything."""

import ast
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.listening import AGENT_ROOT, FAKE, STARTUP, FakeExporter, environment, finish, go_on, start
from tests.support.requirements import require_newer
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger_agent.commands import run


@pytest.mark.parametrize(
    ("theirs", "program", "errors"),
    [
        (
            "import builtins; builtins.it = __file__",
            "import sitecustomize; print(it == sitecustomize.__file__)",
            "",
        ),
        ("raise ValueError('theirs')", "print(True)", "ValueError: theirs"),
    ],
    ids=["is what the program imports", "its error is reported as ever"],
)
def test_sitecustomize_is_chained(place: Path, theirs: str, program: str, errors: str) -> None:
    """The program's own sitecustomize runs as without the agent."""
    (place / "sitecustomize.py").write_text(theirs)
    out, said = start(program, environment(place, place)).communicate()
    assert (out, errors in said, bool(said)) == ("True\n", True, bool(errors))


@pytest.mark.parametrize("own", [False, True])
def test_no_compiled_files_of_another_python_are_left(place: Path, *, own: bool) -> None:
    """A program of root's leaves nothing in the package; what the package's own Python compiled stays."""
    package = place / "copy" / "vramledger_agent"
    shutil.copytree(STARTUP.parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    compiled = {package / "__init__.py", package / "startup" / "sitecustomize.py"} if own else set()
    for path in compiled:
        py_compile.compile(str(path))
    before = set(package.rglob("*.pyc"))
    environ = environment(place, PYTHONPATH=f"{package / 'startup'}:{FAKE}")
    del environ["PYTHONDONTWRITEBYTECODE"]
    code = "import sys, torch; torch.cuda.init(); print(sum('vramledger' in name for name in sys.modules))"
    assert int(finish(start(code, environ))) > 3
    assert set(package.rglob("*.pyc")) == before


def test_only_where_it_is_asked_for(place: Path) -> None:
    """Without VRAMLEDGER_AGENT=1 the start-up directory does nothing."""
    code = "import sys; print([name for name in sys.modules if 'vramledger' in name])"
    assert finish(start(code, environment(place, VRAMLEDGER_AGENT="0"))) == "[]\n"


def test_children_have_it_too(place: Path, exporter: FakeExporter) -> None:
    """The Python processes that a launcher starts are reported, and the launcher is not."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.stdin.readline()], check=True)"
    process = start(code, environment(place, FAKE))
    sure(process.stdin).write("import sys, torch; kept = torch.Tensor(8); sys.stdin.read()")
    go_on(process)
    wait_until(lambda: exporter.reports, "a report")
    assert process.communicate() == ("", "")
    assert len(exporter.reports) == 1
    assert process.pid not in exporter.reports


@pytest.mark.parametrize("newer", [None, pytest.param("python3.15", marks=pytest.mark.thorough)])
def test_hook_in_an_environment(newer: str | None, place: Path, exporter: FakeExporter) -> None:
    """After ``run --install``, the environment starts the agent, even under -I; without consent, nothing."""
    python = place / "env" / "bin" / "python"
    maker = sys.executable if newer is None else str(require_newer(newer))
    subprocess.run([maker, "-m", "venv", "--without-pip", str(place / "env")], check=True)
    usual = environment(place, PYTHONPATH=str(AGENT_ROOT))

    def hook(flag: str) -> str:
        code = f"import sys; from vramledger_agent.cli import main; sys.exit(main(['run', '{flag}']))"
        return finish(start(code, usual, python=python))

    assert hook("--install").startswith("Installed the start-up hook in ")
    (packages,) = (place / "env").glob("lib/python3.*/site-packages")
    # As an editable install: the hook's file comes after it.
    (packages / "_project.pth").write_text(f"{AGENT_ROOT}\n{FAKE}\n")
    program = "import sys, torch; kept = torch.Tensor(8); sys.stdin.read()"
    told = {name: value for name, value in usual.items() if name != "PYTHONPATH"}
    finish(exporter.watch(start(program, told, "-I", python=python)))
    loaded = "import sys; print('vramledger_agent.import_hook' in sys.modules)"
    assert finish(start(loaded, {**told, "VRAMLEDGER_AGENT": ""}, python=python)) == "False\n"
    (packages / "_project.pth").unlink()
    assert finish(start(loaded, told, python=python)) == "False\n"  # the package is gone, without an error
    assert hook("--uninstall").startswith("Removed the start-up hook from ")
    assert list(packages.iterdir()) == []


def test_start_in_code(place: Path, exporter: FakeExporter) -> None:
    """A program that starts the agent itself, after its first tensor, is reported too."""
    code = "import sys, torch, vramledger_agent as it; kept = torch.Tensor(8); it.start(); it.start()"
    environ = environment(place, FAKE, AGENT_ROOT, VRAMLEDGER_AGENT="")
    finish(exporter.watch(start(f"{code}; sys.stdin.read()", environ)))


def test_startup_reads_in_old_python() -> None:
    """Every file that any Python may find on its path has a syntax that all versions can read."""
    ast.parse((STARTUP / "sitecustomize.py").read_text(), feature_version=(3, 4))


def test_run_keeps_the_programs_own_settings(place: Path) -> None:
    """``run`` keeps a consent, and empty entries of PYTHONPATH, which are the current directory."""
    (place / "own_module.py").write_text("name = 'theirs'\n")
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "program.py").write_text(
        "import own_module, os; print(own_module.name, os.environ.get('VRAMLEDGER_AGENT_CONSENT'))"
    )
    begin = f"import sys; sys.path.insert(0, {str(AGENT_ROOT)!r}); from vramledger_agent.cli import main"
    program = ["run", "--", sys.executable, "elsewhere/program.py"]
    command = [sys.executable, "-c", f"{begin}; sys.exit(main({program}))"]
    for path in (":", "/nowhere:", ":/nowhere", "/nowhere::/other"):
        environ = {**os.environ, "PYTHONPATH": path, "VRAMLEDGER_AGENT_CONSENT": "snapshot"}
        done = subprocess.run(command, env=environ, cwd=place, check=False, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("theirs snapshot\n", ""), path


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", ""), (":", "::"), ("/a", ":/a"), ("/a:", ":/a:"), (str(STARTUP), ""), (f"{STARTUP}:/a", ":/a")],
)
def test_python_path(before: str, expected: str) -> None:
    """Our directory is in PYTHONPATH once, at its beginning, and every other entry stays."""
    assert run.python_path(before) == f"{STARTUP}{expected}"


def test_run_imports_little() -> None:
    """``vramledger run`` imports nothing that starting a program does not need: each import is a delay."""
    code = (
        f"import os, sys; sys.path.insert(0, {str(AGENT_ROOT)!r})\n"
        "os.execve = lambda *_: (print(*sorted(sys.modules)), sys.stdout.flush(), os._exit(0))\n"
        "from vramledger_agent.cli import main\nmain(['run', '--', 'true'])\n"
    )
    plain = [sys.executable, "-I", "-S", "-c"]
    loaded = subprocess.run([*plain, code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"typing", "pathlib", "logging", "dataclasses", "inspect", "json", "subprocess", "contextlib"}
    if sys.version_info >= (3, 14):
        heavy -= {"dataclasses", "inspect"}  # its own argparse needs them
    assert heavy & set(loaded) == set()
    assert [name for name in loaded if name.startswith("vramledger")] == [
        "vramledger_agent", "vramledger_agent.cli", "vramledger_agent.commands",
        "vramledger_agent.commands.parser", "vramledger_agent.commands.run", "vramledger_agent.errors",
        "vramledger_agent.printable",
        "vramledger_agent.protocol", "vramledger_agent.protocol.messages",
    ]  # fmt: skip


def test_run_where_the_hook_is_installed(place: Path, exporter: FakeExporter) -> None:
    """A program started by ``run`` where ``run --install`` was done reports once, and can import as usual."""
    hook = f"exec({run.PTH!r})\n"
    code = """
import sys
def find(name, path=None, target=None):
    seen.append(name)
seen = []
class Theirs:
    find_spec = staticmethod(find)
sys.meta_path.insert(0, Theirs)
sys.setrecursionlimit(300)
import torch
kept = torch.Tensor(8)
ours = sum("vramledger" in type(each).__module__ for each in sys.meta_path)
print(seen.count("torch.cuda"), ours, flush=True)
sys.stdin.read()
"""
    (place / "sitecustomize.py").write_text(hook)
    for path, begin in ((f"{STARTUP}:{AGENT_ROOT}", hook), (f"{place}:{STARTUP}:{AGENT_ROOT}", "")):
        exporter.reports.clear()
        process = start(begin + code, environment(place, PYTHONPATH=f"{path}:{place}:{FAKE}"))
        assert sure(process.stdout).readline() == "1 1\n"
        finish(exporter.watch(process))
