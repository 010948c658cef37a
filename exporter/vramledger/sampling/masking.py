"""Mask readings, so that a recording of a host may be published.

These are masked: UUIDs, users and their numbers, jobs, program names that are not common, labels of pods, the
ids and names in cgroup paths, values of variables that are neither a plain number nor a known word, and
messages. Each gets one replacement throughout the file, so that equal values stay equal. We keep a name only
when we know that it reveals nothing. Pids, times and bytes stay.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from vramledger.model.agent_report import Agent
from vramledger.model.reading import (
    DeviceReading,
    Grant,
    Owner,
    ParentFacts,
    PodLabels,
    ProcessFacts,
    Reading,
    Scheduler,
)
from vramledger_agent.protocol.frameworks import REPORTING_FRAMEWORKS

COMMON_PROGRAMS = frozenset(
    "sh ash bash dash zsh fish ksh ksh93 mksh csh tcsh busybox nu xonsh pwsh tmux screen zellij byobu"
    " gnome-terminal konsole xterm kitty alacritty foot wezterm-gui xfce4-terminal mosh-server ttyd script"
    " expect dtach abduco sshd sshd-session login su sudo doas runuser getty agetty gdm-session-wor"
    " systemd init upstart openrc-run supervise-daemo supervisord runsv runsvdir s6-supervise s6-svscan"
    " circusd monit cron crond atd anacron containerd-shim conmon runc crun docker-init podman kubelet"
    " slurmstepd slurmd pbs_mom sge_execd sge_shepherd condor_starter nomad start-stop-daem env nohup"
    " setsid nice ionice chrt taskset numactl timeout time stdbuf unbuffer flock chroot unshare nsenter"
    " bwrap xargs parallel watch nsys nsys-launcher nsys-ui ncu ncu-ui nv-nsight-cu-cl nvprof compute-"
    " sanitize cuda-memcheck cuda-gdb gdb gdbserver lldb lldb-server rr strace ltrace perf py-spy memray"
    " scalene austin valgrind tini tini-static dumb-init catatonit podman-init sleep tail pause torchrun"
    " torch.distributed.run accelerate deepspeed ray raylet jupyter-lab jupyter-notebook"
    " ipykernel_launcher gunicorn uvicorn tritonserver vllm nvidia-cuda-mps nvidia-cuda-mps-server nvidia-"
    " cuda-mps-control Xorg nvidia-persistenced nvidia-smi dcgm-exporter vramledger multiprocessing.spawn"
    " multiprocessing.forkserver multiprocessing.resource_tracker java node python".split()
)
"""Program names that say nothing about the user and are needed to understand the situation."""

_INTERPRETER = re.compile(r"(?:python|pypy|perl|ruby)[\d.]*(?: -c)?|pt_(?:main_thread|data_worker|data_pin)")

_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}")
_PROVIDERS = frozenset((*REPORTING_FRAMEWORKS, "collector", "transport", "oom", "categories", "snapshot"))
_PLAIN = re.compile(r"[-+]?\d*\.?\d*[A-Za-z]?|\d+=\d+[A-Za-z]?")
_COMMON_WORDS = frozenset(
    "true false yes no on off default bfc platform cuda_async vmm cuda_malloc_async cuda_malloc memory_guard"
    " backend native cudamallocasync expandable_segments max_split_size_mb garbage_collection_threshold >"
    " roundup_power2_divisions per_process_memory_fraction release_lock_on_cudamalloc"
    " pinned_use_cuda_host_register pinned_num_register_threads max_non_split_rounding_mb".split()
)
"""The words that the allocators' variables may hold; any other word could identify somebody."""
_OWNER_KINDS = ("namespace", "pod", "container", "notebook")

_COMMON_SEGMENTS = frozenset(
    ".. -.slice system.slice user.slice machine.slice app.slice session.slice background.slice init.scope"
    " kubelet.slice kubelet kubepods kubepods.slice besteffort burstable guaranteed docker lxc system user"
    " container buildkit podruntime libpod_parent slurm slurmstepd.scope"
    " cri-containerd cri-dockerd containerd crio".split()
)
"""The parts of cgroup paths that are alike on every host."""

_CONTROLLERS = frozenset(
    "cpu cpuacct cpuset memory blkio io devices freezer net_cls net_prio perf_event hugetlb pids rdma misc"
    " debug dmem name=systemd".split()
)
_HARMLESS_PART = re.compile(
    r"(?:kubelet-)?kubepods(?:-besteffort|-burstable|-guaranteed)?(?:\.slice)?"
    r"|step_(?:[0-9]{1,10}(?:\.[0-9]{1,10})?|batch|extern|interactive)|task_(?:[0-9]{1,10}|special)"
)
_UUID = r"[0-9a-f]{8}(?P<mark>[-_])[0-9a-f]{4}(?:(?P=mark)[0-9a-f]{4}){2}(?P=mark)[0-9a-f]{12}"
_ID_PART = re.compile(
    # The text that may surround an id; somebody chose any other text there.
    r"(?P<before>(?:docker|cri-containerd|containerd|cri-dockerd|crio|crio-conmon|libpod|libpod-conmon"
    r"|libpod-payload|nerdctl)-|(?:(?:kubelet-)?kubepods(?:-besteffort|-burstable|-guaranteed)?-)?pod)?"
    rf"(?:(?P<id>[0-9a-f]{{32,64}})|(?P<uuid>{_UUID}))"
    r"(?P<after>\.(?:scope|service|slice))?"
)
_NUMBERED = (
    # The pattern of a part and the kind of the number in it.
    (re.compile(r"(user-)([0-9]{1,10})(\.slice)"), "uid"),
    (re.compile(r"(user@|user-runtime-dir@)([0-9]{1,10})(\.service)"), "uid"),
    (re.compile(r"(uid_)([0-9]{1,10})()"), "uid"),
    (re.compile(r"(job_)([0-9]{1,10})()"), "job"),
    (re.compile(r"()(s[0-9A-Z]{13})()"), "job"),
    (re.compile(r"(session-)(c?[0-9]{1,10})(\.scope)"), "session"),
    (re.compile(r"(lxc\.payload\.|systemd-nspawn@)(.+?)(\.service|)"), "container"),
    (re.compile(r"(slurm_)(.+)()"), "node"),
    (re.compile(r"()(.+)(_slurmstepd\.scope)"), "node"),
)
_SUFFIX = re.compile(r"\.(?:service|scope|slice|mount|socket|swap)$")
_DELETED = " (deleted)"
"""The kernel appends this to the path of a removed cgroup."""
_FIRST_UID = 1000
_FAILURE_MESSAGE = "the message is not in the recording, which is masked"


class Mask:
    """Replace what could identify a person, a customer or a card, consistently."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def mask_reading(self, reading: Reading) -> Reading:
        return replace(
            reading,
            boot_id=self._stand_in("boot", reading.boot_id),
            # Messages hold paths and the driver's text.
            failure=None if reading.failure is None else (reading.failure[0], _FAILURE_MESSAGE),
            # The sentences name the owners.
            ended=dict.fromkeys(reading.ended, "its owner has ended"),
            devices=tuple(self._mask_device(device) for device in reading.devices),
            facts=tuple(self._mask_facts(facts) for facts in reading.facts),
            hidden=None
            if reading.hidden is None
            else tuple(
                holder._replace(
                    command=self._mask_program(holder.command),
                    user=None if holder.user is None else self._mask_user(holder.user),
                )
                for holder in reading.hidden
            ),
            schedulers=tuple(self._mask_scheduler(each) for each in reading.schedulers),
            pods=tuple(self._mask_pod_labels(each) for each in reading.pods),
            events=tuple(event._replace(uuid=self._mask_uuid(event.uuid)) for event in reading.events),
            agents=tuple(self._mask_agent(agent) for agent in reading.agents),
        )

    def _mask_agent(self, agent: Agent) -> Agent:
        masked = agent._replace(uid=int(self._mask_uid(str(agent.uid))))
        report = agent.report
        if report is None:
            return masked
        visible = report.visible
        oom, rank = report.last_oom, report.rank
        return masked._replace(
            report=replace(
                report,
                visible=None
                if visible is None
                else {name: value and self._mask_setting(value) for name, value in visible.items()},
                frameworks=tuple(
                    replace(
                        each,
                        devices=tuple(
                            replace(device, uuid=device.uuid and self._mask_uuid(device.uuid))
                            for device in each.devices
                        ),
                        allocator=each.allocator and self._mask_word(each.allocator),
                        version=each.version and self._mask_version(each.version),
                    )
                    for each in report.frameworks
                ),
                agent=report.agent and self._mask_version(report.agent),
                python=report.python and self._mask_version(report.python),
                errors={name: count for name, count in report.errors.items() if name in _PROVIDERS},
                last_oom=None if oom is None else replace(oom, report=None),
                rank=rank and replace(rank, job=rank.job and self._stand_in("distributed", rank.job)),
            )
        )

    def _mask_version(self, real: str) -> str:
        return real if _VERSION.fullmatch(real) else self._stand_in("version", real)

    def _stand_in(self, kind: str, real: str) -> str:
        return f"{kind}-{self._stand_in_number(kind, real)}"

    def _stand_in_number(self, kind: str, real: str) -> int:
        count = sum(1 for known, _ in self._numbers if known == kind)
        return self._numbers.setdefault((kind, real), count + 1)

    def _mask_uid(self, real: str) -> str:
        """Return a user's replacement; root stays, because it is on every host and runs its services."""
        number = int(real)
        return str(_FIRST_UID + self._stand_in_number("uid", str(number)) if number else number)

    def _mask_user(self, real: str) -> str:
        return self._mask_uid(real) if re.fullmatch("[0-9]+", real) else self._stand_in("user", real)

    def _mask_job(self, real: str) -> str:
        """Return a job's replacement in the same form as the real id: a number, or a SLUID."""
        number = self._stand_in_number("job", real)
        return f"s{number:013}" if real.startswith("s") else str(number)

    def _mask_uuid(self, real: str) -> str:
        kind, dash, _ = real.partition("-")
        if kind not in ("GPU", "MIG"):
            kind, dash = "", ""
        return f"{kind}{dash}{self._stand_in_number(f'uuid-{kind}', real):08x}-0000-4000-8000-000000000000"

    def _mask_scheduler(self, scheduler: Scheduler) -> Scheduler:
        return scheduler._replace(
            managed=tuple(self._mask_scheduler_device(name) for name in scheduler.managed),
            grants=tuple(
                Grant(
                    grant.type,
                    self._mask_grant_name(grant),
                    tuple(self._mask_scheduler_device(name) for name in grant.devices),
                    self._mask_cgroup(f"0::{grant.place}").removeprefix("0::"),
                    grant.user and self._mask_user(grant.user),
                    grant.account and self._stand_in("account", grant.account),
                    grant.claimed,
                )
                for grant in scheduler.grants
            ),
        )

    def _mask_pod_labels(self, pod: PodLabels) -> PodLabels:
        """Mask a pod's labels with their names, because a name may be that of a customer."""
        return PodLabels(
            self._stand_in("namespace", pod.namespace),
            self._stand_in("pod", pod.pod),
            tuple(
                (self._stand_in("label", name), value and self._stand_in("label-value", value))
                for name, value in pod.labels
            ),
        )

    def _mask_grant_name(self, grant: Grant) -> str:
        if grant.type == "slurm":
            return self._mask_job(grant.name)
        if grant.type == "pod":
            namespace, _, pod = grant.name.partition("/")
            return f"{self._stand_in('namespace', namespace)}/{self._stand_in('pod', pod)}"
        return self._stand_in("task", grant.name)

    def _mask_scheduler_device(self, name: str) -> str:
        """Mask a scheduler's id of a device. Only indices, as in ``nvidia0`` or ``gpu-0``, stay."""
        device, replica, number = name.partition("::")
        if re.fullmatch(r"\*|(?:nvidia|gpu-)\d+(?:/gi\d+)?(?:/vgpu\d+)?|gpu-\d+-mig-[\d-]+", device):
            return device + replica + (number if number.isdigit() else "")
        old, slash, ids = device.partition("/")
        if old.startswith("MIG-GPU-") and re.fullmatch(r"\d+/\d+", ids):
            return f"MIG-{self._mask_uuid(old.removeprefix('MIG-'))}{slash}{ids}"
        return self._mask_uuid(device) + replica + (number if number.isdigit() else "")

    def _mask_program(self, name: str) -> str:
        # What programs add to their names may be anything: "sshd: ada@pts/0", "tmux: server", "-bash".
        base = re.split("[: ]", name, maxsplit=1)[0].strip("()-")
        base = "containerd-shim" if base.startswith("containerd-shim") else base
        if name in COMMON_PROGRAMS or _INTERPRETER.fullmatch(name):
            return name
        if base in COMMON_PROGRAMS:
            return base
        stem, dot, suffix = name.rpartition(".")
        masked = self._stand_in("program", stem or name)
        return f"{masked}.{suffix}" if dot and suffix in ("py", "sh", "jar", "R", "jl") else masked

    def _mask_device(self, device: DeviceReading) -> DeviceReading:
        return replace(
            device,
            uuid=self._mask_uuid(device.uuid),
            parent=None if device.parent is None else self._mask_uuid(device.parent),
            limits=None
            if device.limits is None
            else tuple(
                each._replace(cgroup=self._mask_cgroup(f"0::{each.cgroup}").removeprefix("0::"))
                for each in device.limits
            ),
        )

    def _mask_facts(self, facts: ProcessFacts) -> ProcessFacts:
        return replace(
            facts,
            uid=None if facts.uid is None else int(self._mask_uid(str(facts.uid))),
            user=None if facts.user is None else self._mask_user(facts.user),
            comm=self._mask_program(facts.comm)[:15],
            command=self._mask_program(facts.command),
            cgroup=None if facts.cgroup is None else tuple(self._mask_cgroup(line) for line in facts.cgroup),
            settings=tuple((name, self._mask_setting(value)) for name, value in facts.settings),
            owner=None if facts.owner is None else self._mask_owner(facts.owner),
            parent=None if facts.parent is None else self._mask_parent(facts.parent),
            rank=None
            if facts.rank is None
            else facts.rank._replace(job=self._stand_in("distributed", facts.rank.job)),
        )

    def _mask_setting(self, value: str) -> str:
        """Mask a variable's value word by word: ids of devices, and every word that is not known."""
        return "".join(
            part if index % 2 else self._mask_word(part)
            for index, part in enumerate(re.split(r"([,:\[\]\s])", value))
        )

    def _mask_word(self, word: str) -> str:
        if _PLAIN.fullmatch(word) or word.lower() in _COMMON_WORDS:
            return word
        if re.match(r"(GPU|MIG)-", word):
            # CUDA accepts the beginning of a UUID.
            whole = [
                real for kind, real in self._numbers if kind.startswith("uuid-") and real.startswith(word)
            ]
            return self._mask_uuid(whole[0] if len(whole) == 1 else word)
        return self._stand_in("value", word)

    def _mask_owner(self, owner: Owner) -> Owner:
        masked = Owner(
            owner.type,
            "",
            slurm_job=owner.slurm_job and self._mask_job(owner.slurm_job),
            unit=owner.unit and self._mask_segment(owner.unit),
            **{kind: self._stand_in(kind, real) for kind in _OWNER_KINDS if (real := getattr(owner, kind))},
        )
        if owner.type == "user":
            return masked._replace(name=self._mask_user(owner.name))
        name = masked.slurm_job if owner.type == "slurm" else getattr(masked, owner.type)
        if owner.type == "pod" and masked.namespace:
            name = f"{masked.namespace}/{masked.pod}"
        return masked._replace(name=name)

    def _mask_parent(self, parent: ParentFacts) -> ParentFacts:
        return parent._replace(
            comm=self._mask_program(parent.comm)[:15],
            command=self._mask_program(parent.command),
            uid=None if parent.uid is None else int(self._mask_uid(str(parent.uid))),
            user=None if parent.user is None else self._mask_user(parent.user),
            program=parent.program and self._mask_program(parent.program),
        )

    def _mask_cgroup(self, line: str) -> str:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not number.isdecimal():
            return self._stand_in("cgroup", line)  # the kernel writes no such line
        named = ",".join(
            each if each in _CONTROLLERS or not each else self._stand_in("name=controller", each)
            for each in controllers.split(",")
        )
        end = _DELETED if path.endswith(_DELETED) else ""
        parts = path.removesuffix(_DELETED).split("/")
        # containerd without systemd joins three parts: "kubepods-….slice:cri-containerd:ID".
        masked = (":".join(self._mask_segment(each) for each in part.split(":")) for part in parts)
        return f"{number}:{named}:{'/'.join(masked)}{end}"

    def _mask_segment(self, part: str) -> str:
        """Keep the structure by which owners are recognised; mask the ids, numbers and names in it."""
        if not part or part in _COMMON_SEGMENTS or _HARMLESS_PART.fullmatch(part):
            return part
        if match := _ID_PART.fullmatch(part):
            return f"{match['before'] or ''}{self._mask_id(match)}{match['after'] or ''}"
        for pattern, kind in _NUMBERED:
            if match := pattern.fullmatch(part):
                return f"{match[1]}{self._mask_numbered(kind, match[2])}{match[3]}"
        suffix = _SUFFIX.search(part)
        return self._stand_in("cgroup", part) + (suffix.group() if suffix else "")

    def _mask_numbered(self, kind: str, real: str) -> str:
        if kind == "uid":
            return self._mask_uid(real)
        if kind == "job":
            return self._mask_job(real)
        return str(self._stand_in_number(kind, real)) if kind == "session" else self._stand_in(kind, real)

    def _mask_id(self, match: re.Match[str]) -> str:
        if match["id"]:
            return f"{self._stand_in_number('id', match['id']):0{len(match['id'])}x}"
        number = self._stand_in_number("pod", match["uuid"].replace("_", "-"))
        return match["mark"].join(["00000000", "0000", "4000", "8000", f"{number:012x}"])
