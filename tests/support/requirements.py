"""What a test needs from the machine: present, a skip that is listed at the end, or a failure in CI."""

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

PROJECT = Path(__file__).resolve().parents[2]

NOT_TESTED = "NOT TESTED: "
"""The beginning of the reason of a reported skip."""


def do_without(reason: str) -> NoReturn:
    """Skip the running test with a report, or fail it in CI, because this machine lacks something."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"CI must not skip this: {reason}", pytrace=False)
    pytest.skip(NOT_TESTED + reason)


def require_tool(name: str) -> Path:
    """Return the path of a program, such as ``promtool``, ``cc`` or ``tmux``.

    ``make test`` provides the programs that ``.ci/provision/tools`` names, and puts them on PATH.
    """
    path = shutil.which(name)
    if path is None:
        do_without(f"{name} is not on this machine")
    return Path(path)


def require_frameworks() -> Path:
    """Return the Python of an environment with the real PyTorch, TensorFlow and JAX.

    ``make frameworks`` sets it up; ``VRAMLEDGER_FRAMEWORKS`` names another: who names one gets no skip.
    """
    named = os.environ.get("VRAMLEDGER_FRAMEWORKS")
    python = Path(named) if named else PROJECT / ".venv-frameworks" / "bin" / "python"
    if not _has_frameworks(python):
        reason = f"PyTorch, TensorFlow and JAX are not in {python}; 'make frameworks' sets them up"
        if named:
            pytest.fail(reason, pytrace=False)
        do_without(reason)
    return python


@functools.cache
def _has_frameworks(python: Path) -> bool:
    look = "from importlib.util import find_spec as f; assert f('torch') and f('tensorflow') and f('jax')"
    try:
        return subprocess.run([python, "-c", look], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


NEWER = Path(__file__).parents[2] / ".cache" / "newer" / "bin"


def require_newer(name: str) -> Path:
    """Return the path of an engine newer than the system's own, such as ``prometheus`` 3 or ``helm``.

    ``make test`` provides the programs that ``.ci/provision/newer`` names.
    """
    path = NEWER / name
    if not os.access(path, os.X_OK):
        do_without(f"no {name} in .cache/newer; bash .ci/provision/newer fetches it where it can")
    return path


VERSIONS = ("older", "newer")
"""The engines that run our files: the oldest version, as the system's release has it, and the current."""


EACH_VERSION = (VERSIONS[0], pytest.param(VERSIONS[1], marks=pytest.mark.thorough))
"""The same as parameters of slow tests: the oldest in ``make test``, both in ``make test-all``."""


def require_version(name: str, version: str) -> Path:
    """Return the path of an engine, such as ``promtool`` or ``amtool``, in one of :data:`VERSIONS`."""
    return require_tool(name) if version == "older" else require_newer(name)


def require_root() -> None:
    if os.geteuid() != 0:
        do_without("needs root")


INITIAL_PID_NAMESPACE = "pid:[4026531836]"


def require_host_pid_namespace() -> None:
    """Go on only where we see all of the host's processes, and so may call one dead."""
    if str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE:
        do_without("needs the host's PID namespace")


def require_namespaces() -> None:
    """Continue only where ``unshare`` may make a PID and a mount namespace."""
    require_tool("unshare")
    if not _namespaces():
        do_without("this machine does not let us make namespaces (unshare --pid --fork --mount-proc)")


@functools.cache
def _namespaces() -> bool:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
