"""Run a real Slurm: munged, slurmctld and a slurmd for each node, in namespaces for mounts and the network.

``.ci/provision/slurm`` fetches two versions. Nothing of this machine changes except its cgroups. The PID
namespace is the host's, because NVML and vramledger need that.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.requirements import (
    PROJECT,
    do_without,
    require_host_pid_namespace,
    require_root,
    require_tool,
)
from tests.support.slurm.driver import NodeDriver
from tests.support.standin.library import build, compiler
from tests.support.waiting import wait_until

FETCHED = PROJECT / ".cache" / "slurm"
HOLDER = PROJECT / "tests" / "support" / "slurm" / "holder.py"
SCRIPTS = PROJECT / "deploy" / "slurm"

USERS = {"slurm": 64030, "alice": 64031, "bob": 64032}
"""The users of the namespace; the first runs slurmctld."""

_NAMESPACE = """\
set -e
mount -t overlay overlay -o lowerdir={fetched}/usr:/usr,upperdir={here}/usr,workdir={here}/usr.work /usr
mount -t overlay overlay -o lowerdir=/etc,upperdir={here}/etc,workdir={here}/etc.work /etc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /mnt
for file in null zero random urandom tty full; do touch /mnt/$file; mount --bind /dev/$file /mnt/$file; done
mkdir /mnt/shm /mnt/pts /mnt/nvidia-caps
mount --bind /dev/shm /mnt/shm
mount --bind /dev/pts /mnt/pts
ln -s /proc/self/fd /mnt/fd
for number in $(seq 0 7); do mknod -m 666 /mnt/nvidia$number c 195 $number; done
mknod -m 666 /mnt/nvidiactl c 195 255
for number in $(seq 0 40); do mknod -m 444 /mnt/nvidia-caps/nvidia-cap$number c 235 $number; done
mount --move /mnt /dev
if [ {cgroup} = v2 ]; then
    mount -t cgroup2 none /sys/fs/cgroup
    mkdir -p /sys/fs/cgroup/system.slice
    echo {here}/cgroup_v2.so >/etc/ld.so.preload
fi
ip link set lo up
ip address add 10.99.0.1/32 dev lo
mkdir -p /run/munge /etc/munge /etc/slurm /var/lib/slurm
dd if=/dev/urandom of=/etc/munge/key bs=64 count=1 status=none
chmod 600 /etc/munge/key
chown slurm /var/lib/slurm
munged --force --key-file=/etc/munge/key --pid-file=/run/munge/pid --log-file=/run/munge/log \\
    --seed-file=/run/munge/seed
echo ready
exec sleep infinity
"""


@dataclass(frozen=True)
class Site:
    version: str = "older"  # or "newer", as ``.ci/provision/slurm`` fetches them
    cgroup: str = "v1"  # or "v2", which has no controllers here: Slurm needs them only to limit jobs
    devices: int = 2  # the GPUs that the driver of the node has
    gres: str = "gpu:2"  # ``Gres=`` of the node
    gres_conf: str = "Name=gpu File=/dev/nvidia[0-1]"
    options: Mapping[str, str] = field(default_factory=dict)  # of slurm.conf, in place of those that are here
    settings: str = ""  # the text of the scripts' own file
    partitions: tuple[str, ...] = ()  # further ones, each more important than the one before
    autodetect: bool = False  # slurmd asks the driver for the GPUs, through Slurm's own plugin for NVML
    constrained: bool = False  # a job can open only the device files of its own GPUs
    minors: tuple[int, ...] = ()  # of each GPU's device file, in NVML's order; by default NVML's index


SLURM_CONF = """\
ClusterName=trial SlurmctldHost=localhost(127.0.0.1) SlurmUser=slurm AuthType=auth/munge CredType=cred/munge
AuthInfo=socket=/run/munge/munge.socket.2 ProctrackType=proctrack/cgroup TaskPlugin=task/cgroup
SelectType=select/cons_tres SelectTypeParameters=CR_Core GresTypes=gpu,shard,mps MpiDefault=none KillWait=2
StateSaveLocation=/var/lib/slurm SlurmdSpoolDir={here}/spool-%n SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid SlurmctldLogFile={here}/log/slurmctld SlurmdLogFile={here}/log/slurmd-%n
SlurmdDebug=verbose ReturnToService=1 SlurmdParameters=config_overrides
SchedulerParameters=nohold_on_prolog_fail,sched_min_interval=100000,batch_sched_delay=0
Prolog=/etc/slurm/vramledger/prolog.sh Epilog=/etc/slurm/vramledger/epilog.sh PrologFlags=Alloc,Contain
PrologEpilogTimeout=120 HealthCheckProgram=/etc/slurm/vramledger/health.sh HealthCheckInterval=0
HealthCheckNodeState=IDLE
"""
"""The settings, which become a line each."""


def compile_library(output: Path) -> None:
    """Compile a library from the source of the same name that is beside this module."""
    source = Path(__file__).parent / f"{output.stem}.c"
    flags = ["-O2", "-fPIC", "-shared", "-o", str(output), str(source), "-ldl"]
    subprocess.run([*compiler(), *flags], check=True)


class Cluster:
    """One slurmctld and the node ``n1``; a context manager."""

    def __init__(self, site: Site) -> None:
        """Start the daemons, and wait until the node is idle."""
        require_root()
        require_host_pid_namespace()
        for tool in ("unshare", "nsenter", "ip", "mount"):
            require_tool(tool)
        if not (FETCHED / site.version / "usr/sbin/slurmd").exists():
            do_without(f"no Slurm ({site.version}) in .cache/slurm; bash .ci/provision/slurm fetches it")
        plugin = FETCHED / site.version / "usr/lib/x86_64-linux-gnu/slurm-wlm/gpu_nvml.so"
        if site.autodetect and not plugin.exists():
            do_without(f"Slurm ({site.version}) has no plugin for NVML; bash .ci/provision/slurm fetches it")
        self.site = site
        # The cgroups of two clusters would have the same names.
        place = Path(tempfile.gettempdir(), "vramledger-slurm.lock")
        self._lock = place.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.here = Path(tempfile.mkdtemp(prefix="vramledger-slurm-"))
        self.here.chmod(0o755)
        self.log = self.here / "log"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._holder: subprocess.Popen[str] | None = None
        try:
            library = build(self.here / "library")
            self.driver = NodeDriver(self.here / "n1", library, devices=site.devices)
            for index, minor in enumerate(site.minors):
                self.driver.standin.device(index).set(minor=minor)
            self._write_files(library)
            if site.cgroup == "v2":
                compile_library(self.here / "cgroup_v2.so")
            self._enter()
            self.start("slurmctld", ["slurmctld", "-D"])
            self.start("n1", [self.slurmd, "-D", "-N", "n1"])
            wait_until(lambda: self.states() == {"n1": "IDLE"}, "the node is idle", patience=60)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Cluster":  # noqa: PYI034  # typing has Self from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_files(self, library: Path) -> None:
        site = self.site
        for name in ("usr", "usr.work", "etc", "etc.work", "log", "out"):
            (self.here / name).mkdir()
        self.log.chmod(0o1777)
        (self.here / "out").chmod(0o1777)
        etc, here = self.here / "etc", self.here
        for file, entry in (("passwd", "{0}:x:{1}:{1}::/tmp:/bin/bash\n"), ("group", "{0}:x:{1}:\n")):
            added = "".join(entry.format(name, number) for name, number in USERS.items())
            (etc / file).write_text(Path("/etc", file).read_text() + added)
        slurm = etc / "slurm"
        (slurm / "vramledger").mkdir(parents=True)
        for script in SCRIPTS.glob("*.sh"):
            shutil.copy2(script, slurm / "vramledger")
        (slurm / "vramledger.conf").write_text(site.settings)
        (slurm / "gres.conf").write_text(site.gres_conf + "\n")
        (slurm / "cgroup.conf").write_text(self._cgroup_conf())
        values = dict(word.partition("=")[::2] for word in SLURM_CONF.format(here=here).split())
        values |= site.options
        lines = [f"{key}={value}" for key, value in values.items() if value]
        node = "NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17001 CPUs=16 CoresPerSocket=16"
        lines += [
            f"{node} RealMemory=8000 Gres={site.gres} State=UNKNOWN",
            "PartitionName=all Nodes=n1 Default=YES MaxTime=INFINITE State=UP",
        ]
        lines += [
            f"PartitionName={name} Nodes=ALL PriorityTier={10 * tier} State=UP"
            for tier, name in enumerate(site.partitions, 1)
        ]
        (slurm / "slurm.conf").write_text("\n".join(lines) + "\n")
        driver = (
            f"export LD_LIBRARY_PATH={library.parent}\n"
            f"export VRAMLEDGER_STANDIN={here}/${{SLURMD_NODENAME:-n1}}/standin.state\n"
        )
        start = f'export PYTHONPATH={PROJECT / "exporter"}\nexec {sys.executable} -m vramledger "$@"\n'
        self._write_program("bin/vramledger", driver + start)
        if site.autodetect:
            rest = here / "nvml_for_slurm.so"
            compile_library(rest)
            # Slurm opens it by the name that only development packages have.
            (library.parent / "libnvidia-ml.so").symlink_to(library.name)
            self._write_program(
                "sbin/slurmd", f'{driver}export LD_PRELOAD={rest}\nexec /usr/sbin/slurmd "$@"\n'
            )

    @property
    def slurmd(self) -> str:
        """The program of slurmd; with AutoDetect the one that finds the stand-in driver."""
        return "/usr/local/sbin/slurmd" if self.site.autodetect else "slurmd"

    def _write_program(self, name: str, text: str) -> None:
        program = self.here / "usr" / "local" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/bash\n{text}")
        program.chmod(0o755)

    def _cgroup_conf(self) -> str:
        lines = [f"CgroupPlugin=cgroup/{self.site.cgroup}", "CgroupMountpoint=/sys/fs/cgroup"]
        lines += [f"Constrain{each}=no" for each in ("RAMSpace", "Cores")]
        lines.append(f"ConstrainDevices={'yes' if self.site.constrained else 'no'}")
        if self.site.cgroup == "v2":
            lines.append("IgnoreSystemd=yes")
        return "\n".join(lines) + "\n"

    def _enter(self) -> None:
        fetched = FETCHED / self.site.version
        script = _NAMESPACE.format(fetched=fetched, here=self.here, cgroup=self.site.cgroup)
        with (self.log / "namespace").open("wb") as errors:
            command = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", script]
            self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            do_without(f"this machine does not let us mount: {(self.log / 'namespace').read_text().strip()}")

    def _command(self, words: Sequence[str], user: str | None = None) -> list[str]:
        assert self._holder is not None
        ids = [] if user is None else [f"--setuid={USERS[user]}", f"--setgid={USERS[user]}"]
        return ["nsenter", f"--target={self._holder.pid}", "--mount", "--net", *ids, "--wd=/tmp", *words]

    def configure(self, settings: str) -> None:
        self.run("bash", "-c", f"cat >/etc/slurm/vramledger.conf <<'END'\n{settings}\nEND")

    def write_mig_minors(self, text: str) -> None:
        """Write what the numbers of the device files of MIG instances stand for, as the driver does."""
        place = "/proc/driver/nvidia-caps"
        make = f"mount -t tmpfs tmpfs /proc/driver; mkdir {place}; cat >{place}/mig-minors"
        self.run("bash", "-c", f"{make} <<'END'\n{text}END")

    def start(self, name: str, words: Sequence[str]) -> None:
        """Start a daemon in the namespace; :meth:`close` ends it."""
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        with (self.log / f"{name}.out").open("ab") as output:
            words = self._command(words)
            self._daemons[name] = subprocess.Popen(words, env=environment, stdout=output, stderr=output)

    def stop(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        self._daemons[name].send_signal(number)

    def run(self, *words: str, user: str | None = None, check: bool = True, **environment: str) -> str:
        """Run a command in the namespace and return its output."""
        result = self._finish(words, user, environment)
        if check and result.returncode:
            raise AssertionError(f"{' '.join(words)}: {result.returncode}\n{result.stdout}{result.stderr}")
        return result.stdout

    def ask(self, *words: str) -> str | None:
        """Return what slurmctld says, asked again while it is too busy; None where it knows no such thing."""

        def answer() -> subprocess.CompletedProcess[str] | None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                result = self._finish(words)
                if result.returncode == 0 or "Invalid job id" in result.stderr:
                    return result
            return None

        result = wait_until(answer, f"an answer to {' '.join(words)}", patience=120)
        return result.stdout if result is not None and result.returncode == 0 else None

    def _finish(
        self, words: Sequence[str], user: str | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(words, user),
            env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/bin", **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )

    def submit(self, *flags: str, hold: str = "", command: str = "", user: str = "alice") -> int:
        """Submit a batch job that runs the holder with these words, or a shell command; return its number.

        In the command HOLDER stands for the holder's program, and HOLDS for the directory after it.
        """
        text = command or f"exec HOLDER {hold.partition(' ')[0]} HOLDS {hold.partition(' ')[2]}"
        text = text.replace("HOLDS", str(self.driver.directory)).replace(
            "HOLDER", f"/usr/bin/python3 {HOLDER}"
        )
        output = f"--output={self.here}/out/%j"
        words = ("sbatch", "--parsable", output, *flags, "--wrap", text)
        return int(self.run(*words, user=user).partition(";")[0])

    def states(self) -> dict[str, str]:
        output = self.ask("sinfo", "-h", "-N", "-o", "%N %T") or ""
        return {
            name: state.upper().rstrip("*") for name, state in (line.split() for line in output.splitlines())
        }

    def reason(self) -> str:
        """Return why the node is drained; empty when it is not."""
        text = self.ask("scontrol", "-o", "show", "node", "n1") or ""
        match = re.search(r" Reason=(.*) \[\w+@[^\]]*\]", text)
        return match[1] if match else ""

    def state_of(self, job: int) -> str:
        text = self.ask("scontrol", "-o", "show", "job", str(job))
        match = re.search(r"JobState=(\w+)", text or "")
        return match[1] if match else "GONE"

    def wait_for(self, job: int, *states: str, timeout: float = 60) -> str:
        """Wait until a job has one of these states, and return it."""

        def reached() -> str:
            found = self.state_of(job)
            return found if found in states else ""

        return wait_until(reached, f"job {job} is {' or '.join(states)}", patience=timeout)

    def wait_idle(self) -> None:
        """Wait until no job is on the node and no epilog runs there any more."""
        quiet = {"IDLE", "DRAINED", "DOWN", "MAINT"}
        wait_until(lambda: self.states().get("n1") in quiet, "the node is quiet", patience=90)

    def cancel_all(self) -> None:
        """Cancel all jobs; scancel takes one user."""
        for user in USERS:
            self.run("scancel", f"--user={user}", check=False)

    def resume(self) -> None:
        self.run("scontrol", "update", "NodeName=n1", "State=RESUME")

    def steps(self) -> Iterable[int]:
        """Yield the pids of the processes that have this cluster's mount namespace."""
        assert self._holder is not None
        with contextlib.suppress(OSError):
            ours = Path(f"/proc/{self._holder.pid}/ns/mnt").readlink()
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if entry.name.isdigit() and (entry / "ns/mnt").readlink() == ours:
                        yield int(entry.name)

    def close(self) -> None:
        """End every process of the namespace, and remove its cgroups and files."""
        if hasattr(self, "driver"):
            self.driver.standin.release()
        if self._holder is not None:
            for name in reversed(list(self._daemons)):
                with contextlib.suppress(Exception):
                    self.stop(name)
            for _ in range(50):
                others = [pid for pid in self.steps() if pid != self._holder.pid]
                if not others:
                    break
                for pid in others:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            self._remove_cgroups()
            self._holder.kill()
            self._holder.wait()
            if self._holder.stdout is not None:
                self._holder.stdout.close()
        if hasattr(self, "driver"):
            self.driver.close()
        if os.environ.get("KEEP"):
            return
        shutil.rmtree(self.here, ignore_errors=True)
        self._lock.close()

    def _remove_cgroups(self) -> None:
        names = {"slurm_n1", "n1_slurmstepd.scope"}
        for directory, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
            if names.intersection(Path(directory).parts) or Path(directory).name == "slurm":
                with contextlib.suppress(OSError):
                    Path(directory).rmdir()
