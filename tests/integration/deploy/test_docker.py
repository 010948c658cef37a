"""The image, built and run by Podman on a base that debootstrap makes once: no registry is asked."""

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.fleet.engines import until
from tests.support.kubelet import devices, kubelet, listed, pod
from tests.support.ports import free_port
from tests.support.requirements import do_without, require_root, require_tool
from vramledger.kubernetes.kubelet import SOCKET

REPOSITORY = Path(__file__).parents[3]
OURS = f"vramledger-test-{os.getpid()}"
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")  # a nested machine allows no more
SIZE = 60 * 10**6
"""Bytes that the image may add to its base; deploy/docker/README.md has the measured figure."""

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


def podman(*arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Podman with runc until it ends; a failure shows its output."""
    done = subprocess.run(
        ["podman", "--runtime=runc", *arguments], check=False, capture_output=True, text=True, timeout=500
    )
    assert not check or done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done


def archive() -> str:
    """Return a root file system with Python, as a tar file; it is made the first time."""
    made = subprocess.run(
        ["bash", REPOSITORY / ".ci/provision/base"], check=False, capture_output=True, text=True, timeout=500
    )
    if made.returncode != 0:
        do_without(f"debootstrap cannot make a base ({made.stderr.strip()[-200:]})")
    return made.stdout.strip()


def settings() -> list[str]:
    """Return how pip in the build reaches the packages that pip on this machine reaches."""
    shared = [
        Path(each) for each in ("/etc/pip.conf", "/etc/ssl/certs", os.environ.get("PIP_FIND_LINKS", ""))
    ]
    mounts = [f"--volume={path}:{path}:ro" for path in shared if path.is_absolute() and path.exists()]
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
    return mounts + [f"--build-arg={name}={os.environ[name]}" for name in names if name in os.environ]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    require_root()
    for name in ("podman", "runc"):
        require_tool(name)
    base = f"{OURS}-base"
    podman("import", archive(), base)
    try:
        probe = podman("run", "--rm", "--network=host", *LIMITS, base, "true", check=False)
        if probe.returncode != 0:
            do_without(f"podman cannot run a container here ({probe.stderr.strip()[-200:]})")
        podman(
            "build", "--network=host", *LIMITS, "--layers=false", "--format=docker",
            f"--build-arg=BASE=localhost/{base}", "--build-arg=VERSION=1.2.3", *settings(),
            f"--file={REPOSITORY / 'deploy/docker/Dockerfile'}", f"--tag={OURS}", REPOSITORY,
        )  # fmt: skip
        yield OURS
    finally:
        podman("rmi", "--force", OURS, base, check=False)


class Container:
    """A running container of the exporter, on a port of loopback."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self._port = port

    def get(self, path: str) -> str | None:
        """Return the answer of a path; None while there is none."""
        url = f"http://127.0.0.1:{self._port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return None

    def until(self, line: str) -> str:
        """Return the first page with a line that begins like this regular expression."""

        def page() -> str | None:
            text = self.get("/metrics")
            return text if text is not None and re.search(f"^{line}", text, re.MULTILINE) else None

        try:
            return until(page, line) or ""
        except TimeoutError as error:
            raise TimeoutError(self.log) from error

    @property
    def log(self) -> str:
        done = podman("logs", self.name, check=False)
        return done.stdout + done.stderr

    def inspect(self) -> dict[str, Any]:
        (found,) = json.loads(podman("inspect", self.name).stdout)
        return dict(found)


@contextmanager
def running(image: str) -> Iterator[Container]:
    """Run the image with the fewest rights: its own user, no capability, a read-only root."""
    port = free_port()
    where = f"127.0.0.1:{port}"
    podman(
        "run", "--detach", f"--name={OURS}", "--network=host", *LIMITS, "--read-only", "--cap-drop=all",
        "--security-opt=no-new-privileges", f"--env=VRAMLEDGER_URL=http://{where}",
        image, "serve", f"--web.listen-address={where}",
    )  # fmt: skip
    try:
        yield Container(OURS, port)
    finally:
        podman("rm", "--force", "--time=0", OURS, check=False)


def test_without_a_driver_it_stays_up_and_says_so(image: str) -> None:
    """Without driver, rights and a writable root it is healthy, serves the reason, and ends in order."""
    with running(image) as container:
        page = container.until(r'vramledger_sample_failures_total\{reason="no-library"\} [1-9]')
        pid = container.inspect()["State"]["Pid"]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.partition(":\t")[::2] for line in lines)
        healthy = podman("exec", container.name, "healthcheck", check=False)
        places = ("/opt/vramledger/file", "/file", "/run/vramledger/file")
        written = podman("exec", container.name, "touch", *places, check=False)
        ended = podman("stop", "--time=20", container.name)
        code = container.inspect()["State"]["ExitCode"]
        log = container.log

    assert "vramledger_up 0.0" in page.splitlines()
    assert "vramledger_device_" not in page
    assert set(status["Uid"].split()) == {"65532"}
    assert int(status["CapEff"], 16) == 0
    assert healthy.returncode == 0, healthy.stderr
    assert written.stderr.count("Read-only file system") >= 2
    assert ended.returncode == 0
    assert code == 0, log
    assert "reason=no-library" in log
    assert "Traceback" not in log


def test_kubelets_socket_answers_through_a_read_only_mount(image: str) -> None:
    """Root with the chart's two capabilities reads the kubelet's socket below a read-only ``/host``."""
    program = (
        "from pathlib import Path; from vramledger.kubernetes.kubelet import read_kubelet;"
        " print(read_kubelet(Path('/host')))"
    )
    with TemporaryDirectory(prefix="v") as directory:
        root = Path(directory)
        given = listed(pod("train-0", devices("nvidia.com/gpu", "GPU-1")))
        with kubelet(root / SOCKET, List=lambda _: given):
            (root / SOCKET).chmod(0o660)
            (root / "var/lib/kubelet").chmod(0o700)
            answer = podman(
                "run", "--rm", "--network=host", *LIMITS, "--read-only", "--user=0", "--cap-drop=all",
                "--cap-add=SYS_PTRACE", "--cap-add=DAC_READ_SEARCH", f"--volume={root}:/host:ro",
                "--entrypoint=python", image, "-c", program,
            )  # fmt: skip

    assert "ml/train-0" in answer.stdout
    assert "GPU-1" in answer.stdout


def test_healthcheck_fails_where_nobody_answers(image: str) -> None:
    """The image's health check is ours; its exit status is 1 with one line when nothing listens."""
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    where = f"--env=VRAMLEDGER_URL=http://127.0.0.1:{free_port()}"
    done = podman(
        "run", "--rm", "--network=host", *LIMITS, where, "--entrypoint=healthcheck", image, check=False
    )
    assert found["Healthcheck"]["Test"] == ["CMD", "healthcheck"]
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("time=")]  # Podman's own log
    assert len(said) == 1
    assert "/-/healthy: " in said[0]


def test_wrong_flag_ends_it_with_a_word(image: str) -> None:
    """A wrong flag gives exit status 2 and a line that names it, as outside of a container."""
    done = podman("run", "--rm", "--network=host", *LIMITS, image, "serve", "--idle-after=soon", check=False)
    assert done.returncode == 2
    assert "--idle-after" in done.stderr


def test_image_is_small_and_can_be_scanned(image: str) -> None:
    """The image stays below its size, keeps its packages' metadata, and has labels and a user."""
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    (base,) = json.loads(podman("image", "inspect", f"{OURS}-base").stdout)
    program = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    listed = podman("run", "--rm", "--network=host", *LIMITS, "--entrypoint=python", image, "-c", program)
    packages = set(listed.stdout.replace("_", "-").split())

    added = found["Size"] - base["Size"]
    print(f"{added / 10**6:.0f} MB on {base['Size'] / 10**6:.0f} MB")  # noqa: T201 shown when it is too much

    assert added < SIZE
    needed = {"vramledger", "aiohttp", "prometheus-client", "nvidia-ml-py", "psutil", "pyyaml", "bcrypt"}
    assert needed <= packages
    assert "pip" not in packages
    assert found["Config"]["User"] == "65532:65532"
    assert found["Config"]["Labels"]["org.opencontainers.image.version"] == "1.2.3"
