"""Containers of Podman, with this machine's busybox alone."""

import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from tests.support.requirements import do_without, require_root, require_tool


class Container(NamedTuple):
    name: str
    pid: int  # of its first process


@contextmanager
def busybox_image(folder: Path) -> Iterator[str]:
    require_root()
    for name in ("podman", "runc"):
        require_tool(name)
    archive = folder / "image.tar"
    with tarfile.open(archive, "w") as layer:
        layer.add(require_tool("busybox"), "bin/busybox")
    name = f"vramledger-test-{os.getpid()}"
    subprocess.run(["podman", "import", archive, name], check=True, capture_output=True)
    yield name
    subprocess.run(["podman", "rmi", "-f", name], check=False, capture_output=True)


@contextmanager
def container(image: str, **variables: object) -> Iterator[Container]:
    """Run a container, as a daemon does it for somebody's client."""
    name = f"{image}-{uuid4().hex[:8]}"
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    given = [f"--env={key}={value}" for key, value in variables.items()]
    run = ["podman", "--cgroup-manager=cgroupfs", "run", "-d", "--runtime=runc", "--network=host"]
    command = [*run, *limits, *given, "--name", name, image, "/bin/busybox", "sleep", "600"]
    started = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        if started.returncode:
            do_without(f"podman cannot run a container here ({started.stderr.strip()[-200:]})")
        inspect = ["podman", "inspect", "-f", "{{.State.Pid}}", name]
        yield Container(name, int(subprocess.run(inspect, check=True, capture_output=True, text=True).stdout))
    finally:
        subprocess.run(["podman", "rm", "-f", "-t", "0", name], check=False, capture_output=True)
