"""Find the name of a program from its command line, without its arguments; and the notebook of a process.

The name is exported to everybody who may scrape, and arguments may hold secrets. So an interpreter's script
is named only when every word before it is understood; otherwise the interpreter's own name stays.

What starts kernels, and what is then known of the notebook (read in their code, or seen):

- jupyter-server from version 2 on, which JupyterLab, JupyterHub and JetBrains use, sets ``JPY_SESSION_NAME``;
- VS Code, on this host or over SSH, and code-server set no variable. The connection file is
  ``--f=.../kernel-v3HEX.json``, in quotes if its path has a space; older versions ``/tmp/tmp-ID.json``;
- Colab sets no variable: ``colab_kernel_launcher -f .../kernel-ID.json``;
- nbconvert, papermill and ``jupyter execute`` set none, and choose ``/tmp/tmpID.json``; ``jupyter run``
  and ``jupyter console`` choose ``kernel-PID.json``;
- Databricks: ``db_ipykernel_launcher.py -f .../connection.json``;
- marimo gives its kernels neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from vramledger_agent.printable import printable

MAX_NAME_LENGTH = 64

REPLACEMENT = "\ufffd"
"""Replaces a character that is not printable."""


class _Interpreter(Struct, frozen=True):
    """How to read an interpreter's options."""

    # letters (or long options) whose value is program text, which has no name
    code: frozenset[str] = frozenset()
    module: frozenset[str] = frozenset()  # options whose value names the program
    value: frozenset[str] = frozenset()  # options that take a value, attached or as the next word
    attached: frozenset[str] = frozenset()  # letters whose value is attached or missing, never the next word
    flags: frozenset[str] = frozenset()  # long options without a value that may precede the script
    single: bool = False  # options are words after a single dash too (java), not clusters of letters
    file: str | None = None  # the option that names the script; the first other word does not (R)
    inline: str = "-e"  # the words that replace the name of program text


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PYTHON = _Interpreter(
    code=_words("c"), module=_words("m"), value=_words("W X Q --check-hash-based-pycs"), inline="-c"
)
_PERL = _Interpreter(code=_words("e E"), value=_words("I"), attached=_words("M m C D x i F 0 l"))
_RUBY = _Interpreter(
    code=_words("e"),
    value=_words("I r C E"),
    attached=_words("F K x i 0 W T"),
    flags=_words("--disable-gems --yjit --jit --verbose"),
)
_NODE = _Interpreter(
    code=_words("e p --eval --print"),
    value=_words("r C --require --import --loader --experimental-loader --conditions --title --env-file"),
    flags=_words(
        "--expose-gc --inspect --no-warnings --trace-warnings --enable-source-maps --watch"
        " --experimental-vm-modules --preserve-symlinks --trace-uncaught --use-openssl-ca"
    ),
)
_JAVA = _Interpreter(
    module=_words("-jar -m --module"),
    value=_words(
        "-cp -classpath --class-path -p --module-path --add-modules --add-opens --add-exports --add-reads"
        " --limit-modules --patch-module --upgrade-module-path"
    ),
    flags=_words("--enable-preview"),
    single=True,
)
_JULIA = _Interpreter(
    code=_words("e E --eval --print"),
    value=_words("L J t p C H --load --threads --procs"),
    attached=_words("O g"),
)
_R = _Interpreter(
    code=_words("e"),
    flags=_words("--no-echo --slave --no-restore --vanilla --no-save --quiet --silent --no-environ"),
    file="--file=",
)

_INTERPRETERS: tuple[tuple[re.Pattern[str], _Interpreter], ...] = (
    (re.compile(r"(python|pypy)(\d+(\.\d+)*)?[a-z]*"), _PYTHON),
    (re.compile(r"perl[\d.]*"), _PERL),
    (re.compile(r"ruby[\d.]*"), _RUBY),
    (re.compile(r"node|nodejs"), _NODE),
    (re.compile(r"java"), _JAVA),
    (re.compile(r"julia[\d.]*"), _JULIA),
    (re.compile(r"R"), _R),
    (re.compile(r"Rscript"), _Interpreter(code=_words("e"), flags=_R.flags)),
)
"""Shells are not among them. A script that a shell runs is a shell to its children, and the judgement of a
parent must see that."""

_MULTIPROCESSING = re.compile(
    r"(?:import sys; )?"  # since Python 3.14
    r"from ((?:billiard|multiprocess|multiprocessing)"
    r"\.(?:spawn|forkserver|resource_tracker|semaphore_tracker)) import \w*main"
)
_LOKY = re.compile(r"(?:joblib\.externals\.)?loky\.backend\.\w+")
_WORKER_TITLE = re.compile(r"VLLM::(?:Engine|Worker|DP)|ray::|sglang::")


def program_name(argv: Sequence[str], comm: str) -> str:
    """Return a program's own name, never its arguments, or ``comm`` where ``argv`` says nothing."""
    return clean(_raw_name(argv, comm)) or clean(comm)


def worker_evidence(argv: Sequence[str]) -> tuple[str, ...]:
    """Return what in a command line shows a worker; forked children show nothing, vLLM and Ray a title."""
    name = _raw_name(argv, "")
    if _MULTIPROCESSING.match(f"from {name} import main") or _LOKY.fullmatch(name):
        return ("multiprocessing",)
    return ("title",) if _WORKER_TITLE.match(name) else ()


def clean(text: str) -> str:
    """Make a name printable and short."""
    return printable(text, REPLACEMENT)[:MAX_NAME_LENGTH].strip()


def _raw_name(argv: Sequence[str], comm: str) -> str:
    if not argv or not argv[0]:
        return comm
    name = os.path.basename(argv[0])  # noqa: PTH119 another process's text, not a path of ours
    if " " in argv[0] and ("/" not in argv[0] or name[:15] != comm):
        # This is a title that the program wrote over its arguments ("VLLM::EngineCore", "nginx: worker
        # process"). The kernel's name distinguishes it from the path of an executable with a space in it.
        words = argv[0].split()
        return words[0].rpartition("/")[2].rstrip(":") if words else comm
    name = name.lstrip("-") or comm  # "-bash" is a login shell
    for pattern, interpreter in _INTERPRETERS:
        if pattern.fullmatch(name):
            return _script_name(name, interpreter, argv[1:])
    return name


def _script_name(name: str, interpreter: _Interpreter, words: Sequence[str]) -> str:
    rest = iter(words)
    script = ""
    for word in rest:
        if interpreter.file is not None and word.startswith(interpreter.file):
            script = word.removeprefix(interpreter.file)
            break
        if word == "--" or not word.startswith("-") or word == "-":
            if interpreter.file is None and word != "-":
                script = next(rest, "") if word == "--" else word
            break
        kind, value = _parse_option(interpreter, word, rest)
        if kind == "code":
            found = _MULTIPROCESSING.match(value)
            return found[1] if found else f"{name} {interpreter.inline}"
        if kind != "flag":
            script = value
            break
    return script.rstrip("/").rpartition("/")[2] or name


def _parse_option(interpreter: _Interpreter, word: str, rest: Iterator[str]) -> tuple[str, str]:
    """Return what an option is (``flag``, ``code``, ``module``, ``unknown``) and its value."""
    kinds = {"code": interpreter.code, "module": interpreter.module, "flag": interpreter.value}
    if word.startswith("--") or interpreter.single:
        option, equals, value = word.partition("=")
        for kind, options in kinds.items():
            if option in options:
                return kind, value if equals else next(rest, "")
        # An option that we do not know might take the next word as its value, and that word may be a secret.
        known = equals or option in interpreter.flags or not option.startswith("--")
        return ("flag" if known else "unknown"), ""
    for position, letter in enumerate(word[1:], start=2):
        for kind, options in kinds.items():
            if letter in options:
                return kind, word[position:] or next(rest, "")
        if letter in interpreter.attached:
            break
    return "flag", ""


MAX_PATH_BYTES = 1024
_SESSION_VARIABLE = b"\0JPY_SESSION_NAME="
_OPTION = re.compile(r"(?:-f|--f|--connection-file)(?:=(?P<given>.*))?", re.DOTALL)
_CONNECTION_FILE = re.compile(r"(?:.*/)?(?P<name>[\w.-]{1,128})\.json", re.ASCII | re.DOTALL)
_KERNEL_NAME = re.compile(r"kernel-[\w-]{1,64}", re.ASCII)
_LAUNCHER = re.compile(
    r"(?:.*/)?(?:(?:db_)?ipykernel(?:_launcher)?|colab_kernel_launcher)(?:\.py)?", re.DOTALL
)
"""The module or script of a kernel for Python. Other programs also launch kernels: those of GPUs."""

_OTHER_LAUNCHER = re.compile(r"IRkernel::main\(\)|(?:.*/)?IJulia/.*/kernel\.jl", re.DOTALL)
"""What runs a kernel for R or Julia, which has its connection file as last argument, without an option."""


def find_notebook(argv: Sequence[str], environment: bytes) -> str:
    """Return the path of a kernel's notebook; without a path the kernel's name; otherwise empty.

    The kernel's children inherit the variable, and belong to the notebook too. A kernel's name is that of its
    connection file, ``kernel-ID.json``.
    """
    _, found, rest = environment.partition(_SESSION_VARIABLE)
    if found:
        path = rest[: MAX_PATH_BYTES + 1].partition(b"\0")[0][:MAX_PATH_BYTES].decode(errors="replace")
        path = printable(path, REPLACEMENT).strip()
        # Measured on jupyter-server 2.21: for a session without a name it is only the directory.
        if path and not path.endswith("/"):
            return path
    return find_kernel_name(argv)


def find_kernel_name(argv: Sequence[str]) -> str:
    """Return a kernel's name, from its connection file; of unknown programs only from ``kernel-ID.json``."""
    runs_kernels = False
    for position, word in enumerate(argv):
        if match := _OPTION.fullmatch(word):
            following = argv[position + 1] if position + 1 < len(argv) else ""
            name = _connection_name(following if match["given"] is None else match["given"])
            if name and (runs_kernels or _KERNEL_NAME.fullmatch(name)):
                return name
        runs_kernels = runs_kernels or _LAUNCHER.fullmatch(word) is not None
    if any(map(_OTHER_LAUNCHER.fullmatch, argv)):
        return _connection_name(argv[-1])
    return ""


def _connection_name(path: str) -> str:
    # VS Code adds the quotes, but starts the program without a shell, which would take them away.
    match = _CONNECTION_FILE.fullmatch(path.strip('"'))
    return match["name"] if match else ""
