"""The service, through systemd's own checks."""

import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.exporter import QUICK, SOURCES, serving
from tests.support.procs import NOBODY
from tests.support.requirements import PROJECT, do_without, require_root, require_tool
from tests.support.standin.library import StandIn
from vramledger.config import DEFAULT_PORT

SYSTEMD = Path(__file__).parents[3] / "deploy" / "systemd"
EXPOSURE = 2.5
"""From 0 (none) to 10: the README has the figure of one release, later ones ask more questions."""


def unit(tmp_path: Path, name: str = "vramledger.service") -> Path:
    """Return a service with a program that exists on this machine, and without its manual page."""
    text = (SYSTEMD / name).read_text(encoding="utf-8")
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
    text = re.sub(r"^Documentation=.*\n", "", text, flags=re.MULTILINE)
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def settings(name: str, pattern: str) -> list[str]:
    return re.findall(rf"^(?:{pattern})=(.*)$", (SYSTEMD / name).read_text(encoding="utf-8"), re.MULTILINE)


SETTINGS = {
    "the socket is the exporter's port": ("vramledger.socket", "ListenStream", [str(DEFAULT_PORT)]),
    "containers see no new folder after a restart": (
        "vramledger.service", "RuntimeDirectory(?:Preserve)?", ["vramledger", "yes"],
    ),
    "mail is delivered after the report has ended": ("vramledger-report.service", "KillMode", ["process"]),
    "mail is delivered into a home": (
        "vramledger-report.service", "(?:Protect|Private|NoNewPrivileges|Restrict).*", [],
    ),
    "no memory is writable and executable": ("vramledger.service", "MemoryDenyWriteExecute", ["yes"]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "pattern", "values"), SETTINGS.values(), ids=SETTINGS)
def test_unit_says(name: str, pattern: str, values: list[str]) -> None:
    """A setting that no check of systemd's can miss."""
    assert settings(name, pattern) == values


def test_unit_is_understood(tmp_path: Path) -> None:
    """Systemd knows every setting of the services, of the socket and of the timer."""
    text = (SYSTEMD / "vramledger.socket").read_text(encoding="utf-8")
    (tmp_path / "vramledger.socket").write_text(re.sub(r"Documentation=.*\n", "", text), encoding="utf-8")
    services = [unit(tmp_path), unit(tmp_path, "vramledger-report.service")]
    answer = subprocess.run(
        [require_tool("systemd-analyze"), "verify", *services,
         tmp_path / "vramledger.socket", SYSTEMD / "vramledger-report.timer"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (answer.returncode, answer.stderr) == (0, "")


def test_unit_stays_closed(tmp_path: Path) -> None:
    """Systemd's exposure figure of the service is not above the one in the README."""
    answer = subprocess.run(
        [require_tool("systemd-analyze"), "security", "--offline=true", f"--threshold={10 * EXPOSURE:.0f}",
         "--no-pager", unit(tmp_path)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip

    assert answer.returncode == 0, answer.stdout
    text = (SYSTEMD / "README.md").read_text(encoding="utf-8")
    assert f"{EXPOSURE} or less" in text
    told = re.search(r"gives ([\d.]+) \(OK\) with systemd (\d+)", text)
    assert told is not None
    version = subprocess.run(["systemd-analyze", "--version"], check=True, capture_output=True, text=True)
    if version.stdout.split()[1] == told[2]:
        assert f"exposure level for vramledger.service: {told[1]} OK" in answer.stdout


def test_unit_lets_it_give_up_its_rights() -> None:
    """The filter of system calls allows what the exporter needs to give up its capabilities."""
    allowed: set[str] = set()
    for each in settings("vramledger.service", "SystemCallFilter"):
        calls = set()
        for name in each.lstrip("~").split():
            calls |= system_calls(name)
        allowed = allowed - calls if each.startswith("~") else allowed | calls
    assert {"capset", "capget", "prctl", "kill", "sendmsg"} <= allowed
    assert {"setuid", "setresuid", "mount", "bpf"}.isdisjoint(allowed)


def test_unit_lets_it_open_its_sockets() -> None:
    """The service may open every family of sockets that the exporter uses."""
    allowed = settings("vramledger.service", "RestrictAddressFamilies")
    code = "".join(file.read_text() for file in (SOURCES / "vramledger").rglob("*.py"))
    assert set(re.findall(r"socket\.(AF_\w+)", code)) == set(" ".join(allowed).split())


def system_calls(name: str) -> set[str]:
    """Return the calls of a set of systemd's, with those of the sets in it; or the one call of this name."""
    if not name.startswith("@"):
        return {name}
    listed = subprocess.run(
        [require_tool("systemd-analyze"), "syscall-filter", "--no-pager", name],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    lines = (line.strip() for line in listed.stdout.splitlines()[1:])
    names = [line for line in lines if line and not line.startswith("#")]
    return set().union(*(system_calls(each) for each in names))


def test_user_and_folder_are_understood(tmp_path: Path) -> None:
    """The user and the socket's folder are made as written, in a separate root."""
    (tmp_path / "etc").mkdir()
    program = str(require_tool("systemd-sysusers"))
    subprocess.run([program, f"--root={tmp_path}", SYSTEMD / "vramledger.sysusers"], check=True)
    users = (tmp_path / "etc/passwd").read_text()
    assert re.search(r"^vramledger:.*:/usr/sbin/nologin$", users, re.MULTILINE)


def test_installer_installs_and_removes_the_same() -> None:
    """``--uninstall`` removes every file that the installer has installed; the settings stay."""
    text = (SYSTEMD / "install.sh").read_text(encoding="utf-8")
    removed = text[text.index("--uninstall |") : text.index(";;")]
    installed = re.findall(r"^install -Dm 644 \S+ (\S+)$", text, re.MULTILINE)
    assert len(installed) == 6
    assert [path for path in installed if path.strip('"') not in removed] == []


def test_installer_imports_nothing_from_where_it_is_started(tmp_path: Path) -> None:
    """Root's Python runs in a folder of root's, isolated from the caller's folder and variables."""
    require_root()
    require_tool("systemctl")
    python, called = tmp_path / "python", tmp_path / "called"
    python.write_text(f'#!/bin/sh\nprintf "%s %s %s." "$PWD" "$1" "$PYTHONPATH" >>{called}\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(
        [SYSTEMD / "install.sh"],
        check=False, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHON": "./python", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, called.read_text()) == (1, "/ -I ."), done.stderr


def wheel(directory: Path, version: str, code: str) -> Path:
    """Make a package vramledger of this version, whose command runs this code."""
    directory.mkdir()
    path = directory / f"vramledger-{version}-py3-none-any.whl"
    about = f"vramledger-{version}.dist-info"
    files = {
        "vramledger/__init__.py": "",
        "vramledger/part.py": f"version = '{version}'\n",
        "vramledger/cli.py": f"def main():\n    {code}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: vramledger\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\nvramledger = vramledger.cli:main\n",
    }
    with zipfile.ZipFile(path, "w") as package:
        for name, text in files.items():
            package.writestr(name, text)
        package.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD")))
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python that copies a virtual environment to make one: pip is unpacked and compiled once."""
    home = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-I", "-m", "venv", home / "made"], check=True)
    program = home / "python"
    program.write_text(
        f'#!/bin/sh\n[ "$*" != "-I -m venv $4" ] || exec cp -a {home}/made "$4"\nexec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return program


OVERLAYS = """\
set -eu
for place in opt etc usr/local var/lib; do
    mkdir -p "$PLACE/$place" "$PLACE/$place.work"
    mount -t overlay overlay -o "lowerdir=/$place,upperdir=$PLACE/$place,workdir=$PLACE/$place.work" "/$place"
done
mount -t tmpfs tmpfs /run
"""
"""What the installer changes goes to a folder of the test."""

UPDATES = (
    OVERLAYS
    + """\
install() { VRAMLEDGER_PACKAGE=$1 "$INSTALLER" >>"$PLACE/log" 2>&1; }
says() { [ "$(/usr/local/bin/vramledger)" = "$1" ] || { echo "it does not say $1"; exit 1; }; }

# What an older installer has left: the environment itself.
mkdir -p /opt/vramledger/bin
install "$PLACE/a/vramledger-1.0-py3-none-any.whl"
says 1.0
while [ ! -e "$PLACE/stop" ]; do
    /usr/local/bin/vramledger >>"$PLACE/said" 2>&1 || echo failed >>"$PLACE/said"
done &
install "$PLACE/b/vramledger-2.0-py3-none-any.whl"
says 2.0
touch "$PLACE/stop"
wait
! install "$PLACE/c/vramledger-3.0-py3-none-any.whl"
says 2.0
ls -d /opt/vramledger* | wc -l
mkdir -p /var/lib/vramledger /etc/systemd/system/vramledger.socket.d
"$INSTALLER" --uninstall >"$PLACE/kept"
ls -d /opt/vramledger* /usr/local/bin/vramledger 2>/dev/null || echo removed
"$INSTALLER" --purge
kept="/var/lib/vramledger /etc/default/vramledger /etc/systemd/system/vramledger*"
ls -d $kept 2>/dev/null || id vramledger 2>/dev/null || echo purged
"""
)


def in_overlays(script: str, place: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that calls the installer; nothing of this machine changes."""
    require_root()
    if find_spec("ensurepip") is None:
        pytest.skip("this Python cannot make virtual environments, and install.sh says so")
    for tool in ("systemctl", "systemd-sysusers", "unshare", "flock"):
        require_tool(tool)
    known = {"INSTALLER": str(SYSTEMD / "install.sh"), "PLACE": str(place), "PYTHON": str(python)}
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
        check=False, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **known},
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_an_update_never_breaks_the_command(tmp_path: Path, python: Path) -> None:
    """While an update runs, each start is one version or the other; one that fails changes nothing."""
    whole = "from vramledger import part; print(part.version)"
    wheel(tmp_path / "a", "1.0", whole)
    wheel(tmp_path / "b", "2.0", whole)
    wheel(tmp_path / "c", "3.0", "raise SystemExit(1)")
    done = in_overlays(UPDATES, tmp_path, python)
    log = (tmp_path / "log").read_text()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + log
    said = (tmp_path / "said").read_text().split()
    assert (set(said), said) == ({"1.0", "2.0"}, sorted(said)), log
    # The link, its version, the one before, and the lock.
    assert done.stdout.split() == ["4", "removed", "purged"]
    kept = (tmp_path / "kept").read_text()
    dropped_in = "/etc/systemd/system/vramledger.socket.d"
    for each in ("/var/lib/vramledger", "/etc/default/vramledger", dropped_in, "the user vramledger"):
        assert f"kept: {each}" in kept


STARTS = (
    OVERLAYS
    + """\
mkdir -p /run/systemd/system "$PLACE/bin"
cat >"$PLACE/bin/systemctl" <<'STOP'
#!/bin/sh
echo "$*" >>"$PLACE/asked"
case $* in
"is-active --quiet vramledger.socket") exit 3 ;;
"restart vramledger.service") [ ! -e "$PLACE/fails" ] ;;
esac
STOP
printf '#!/bin/sh\\necho the port is taken\\n' >"$PLACE/bin/journalctl"
chmod +x "$PLACE/bin/systemctl" "$PLACE/bin/journalctl"
export PLACE PATH="$PLACE/bin:$PATH" VRAMLEDGER_PACKAGE="$PLACE/a/vramledger-1.0-py3-none-any.whl"
touch "$PLACE/fails"
! "$INSTALLER" >"$PLACE/first" 2>&1
rm "$PLACE/fails" "$PLACE/asked"
echo 'VRAMLEDGER_FLAGS="--web.systemd-socket"' >/etc/default/vramledger
"$INSTALLER" >"$PLACE/second" 2>&1
"""
)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_the_installer_says_why_the_service_did_not_start(tmp_path: Path, python: Path) -> None:
    """It prints the service's last lines and fails; where the flags want the socket, that starts first."""
    require_root()
    ours = wheel(tmp_path / "a", "1.0", "print(1)")
    stranger = ours.with_name("vramledger_agent-1.0-py3-none-any.whl")
    stranger.write_text("no wheel, and a stranger's")
    os.chown(stranger, NOBODY, NOBODY)
    done = in_overlays(STARTS, tmp_path, python)
    assert (done.returncode, done.stderr) == (0, ""), (tmp_path / "first").read_text()
    *_, cause, verdict = (tmp_path / "first").read_text().splitlines()
    assert cause == "the port is taken"
    assert verdict.startswith("install.sh: the files are installed, but the service did not start")
    assert (tmp_path / "second").read_text().startswith("vramledger runs: ")
    asked = (tmp_path / "asked").read_text().splitlines()
    socket = asked.index("enable --quiet --now vramledger.socket")
    assert asked.index("stop vramledger.service") < socket < asked.index("restart vramledger.service")


@pytest.mark.parametrize("way", ["PR_SET_MDWE", "filter"])
def test_no_memory_is_writable_and_executable(standin: StandIn, way: str) -> None:
    """The service may have none; the exporter samples without it, by either way of systemd."""
    wrapper = (sys.executable, "-m", "tests.support.write_execute", way)
    environ = {**standin.env(), "PYTHONPATH": os.pathsep.join(map(str, (SOURCES, PROJECT)))}
    if (tried := subprocess.run([*wrapper, "true"], check=False, env={**os.environ, **environ})).returncode:
        do_without(f"this kernel does not know {way}: {tried.returncode}")
    with serving(*QUICK, driver=environ, wrapper=wrapper) as exporter:
        exporter.until(lambda page: page.up, "data")
