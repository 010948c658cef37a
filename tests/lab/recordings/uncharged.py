"""The situations in which NVML charges memory to no process: alone, in pairs, and among ordinary holders."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.lab.recordings.recorder import Recorder
from tests.lab.recordings.scenarios import GIB, Scenario, mps_control
from tests.lab.recordings.stage import Program, Stage
from tests.support.judging import hidden

SETTLING = 8
"""Readings after the last event until the result counts."""

TENSORFLOW_GIB = 4.13
"""A session of TensorFlow 2.21 that fills 4 GiB of unified memory takes 135 MiB more (H100)."""


class _Scene:
    """One situation: its recording, its programs, and the bytes that each has in truth."""

    def __init__(self, stage: Stage, name: str, note: str, **more: Any) -> None:  # noqa: ANN401
        self.stage = stage
        self.name, self.note, self.more = name, note, more
        self.recorder: Recorder | None = None
        self.roles: dict[str, int] = {}
        self.truth: dict[str, int] = {}
        self.ended: list[int] = []
        self.programs: dict[str, Program] = {}

    def record(self) -> None:
        """Begin to record."""
        self.recorder = self.stage.record(self.name, self.note, **self.more)

    def start(self, role: str, *arguments: object, gib: float = 0.0, **options: Any) -> Program:  # noqa: ANN401
        """Start a program that has so many GiB uncharged in truth, and wait until it is listed."""
        program = self.stage.start("uncharged.py", role, *arguments, **options)
        self._started(role, program, gib)
        return program

    def ordinary(self, count: int) -> None:
        """Start holders that have nothing uncharged."""
        for number in range(count):
            role = f"holder-{number}"
            self._started(role, self.stage.hold(role, 0.5), 0.0)

    def _started(self, role: str, program: Program, gib: float) -> None:
        self.programs[role] = program
        self.roles |= program.wait_for(role, timeout=90)
        self.truth[role] = int(gib * GIB)
        if self.recorder is not None:
            self.recorder.listed(self.roles[role])
            self.recorder.more(3)

    def kill(self, role: str, heir: str | None = None, gib: float = 0.0, *, wait: bool = True) -> None:
        """Kill a program; ``heir`` still has so many GiB of what it had created.

        Without ``wait`` it is not known whether NVML goes on listing it.
        """
        self.programs[role].kill()
        pid = self.roles.pop(role)
        self.truth.pop(role)
        if wait:
            self.ended.append(pid)
        if heir is not None:
            self.truth[heir] += int(gib * GIB)
        if self.recorder is not None and wait:
            self.recorder.gone(pid)

    def finish(self, *unlisted: str, **more: Any) -> None:  # noqa: ANN401
        """Let it settle, and judge it; ``unlisted`` roles are not in NVML's lists."""
        if self.recorder is None:
            self.record()
        assert self.recorder is not None
        self.recorder.more(SETTLING)
        roles = {role: pid for role, pid in self.roles.items() if role not in unlisted}
        uncharged = {pid: self.truth[role] for role, pid in roles.items()}
        states = dict.fromkeys(roles, "active")
        facts = {"unattributed_below": None, "uncharged": uncharged, "absent": self.ended, **more}
        self.stage.finish(self.recorder, self.roles, states, **facts)


def _managed(
    name: str, note: str, mapped: float, resident: float, host: float = 0
) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        scene = _Scene(stage, name, note)
        scene.record()
        scene.start("managed", "managed", mapped, resident, host, gib=resident)
        scene.finish()

    return play


def oversubscribed(stage: Stage) -> None:
    """Record a program whose managed memory is larger than the device."""
    scene = _Scene(
        stage, "uncharged-oversubscribed", "managed memory of 105 % of the device, all touched there"
    )
    scene.record()
    scene.start("managed", "sweep", 1.05)
    shot = scene.recorder.snapshot if scene.recorder is not None else None
    ledger = shot.devices[0].ledger if shot is not None else None
    scene.truth["managed"] = ledger.uncharged if ledger is not None else 0
    scene.finish()


def pair(stage: Stage) -> None:
    """Record two programs with all of their managed memory on the device."""
    scene = _Scene(stage, "uncharged-pair", "8 and 3 GiB of managed memory, all on the device")
    scene.record()
    scene.start("first", "managed", 8, 8, gib=8)
    scene.start("second", "managed", 3, 3, gib=3)
    scene.finish()


def pair_with_room(stage: Stage) -> None:
    """Record a program whose memory is on the device beside a later one whose memory is on the host."""
    scene = _Scene(
        stage, "uncharged-pair-with-room", "6 of 8 GiB on the device; then 12 GiB on the host alone"
    )
    scene.record()
    scene.start("first", "managed", 8, 6, gib=6)
    scene.start("second", "managed", 12, 0, 2, gib=0)
    scene.finish()


def pair_late(stage: Stage) -> None:
    """Record the same pair from after both have come: a range."""
    scene = _Scene(stage, "uncharged-pair-late", "6 of 8 GiB on the device and 12 GiB on the host, seen late")
    scene.start("first", "managed", 8, 6, gib=6)
    scene.start("second", "managed", 12, 0, 2, gib=0)
    scene.finish()


def among_ten(stage: Stage) -> None:
    """Record managed memory and a dead creator's among ten ordinary holders."""
    scene = _Scene(
        stage, "uncharged-among-ten", "5 of 8 GiB managed, and a handle of 4 GiB, among ten holders"
    )
    scene.ordinary(10)
    scene.record()
    scene.start("managed", "managed", 8, 5, gib=5)
    scene.start("creator", "create", stage.scratch / "ten", 4)
    scene.start("importer", "take", stage.scratch / "ten", 4)
    scene.kill("creator", "importer", _imported(stage))
    scene.finish()


def late_among_ten(stage: Stage) -> None:
    """Record managed memory among ten ordinary holders, seen only afterwards."""
    scene = _Scene(stage, "uncharged-late-among-ten", "8 GiB of managed memory among ten holders, seen late")
    scene.ordinary(10)
    scene.start("managed", "managed", 8, 8, gib=8)
    scene.finish()


def _imported(stage: Stage) -> float:
    """Return the GiB that are without a charge when the creator of imported memory has ended.

    On an H100 NVML then charged what cuMemCreate had made to the importer, mapped or not, and
    what came from a pool to nobody. The stand-in leaves both to nobody.
    """
    return 4.0 if stage.rehearsing else 0.0


def mapped_handle(stage: Stage) -> None:
    """Record a dead creator's memory that the importer has mapped: NVML charges it to the importer."""
    scene = _Scene(stage, "uncharged-mapped-handle", "a dead creator's 4 GiB, which the importer has mapped")
    scene.record()
    scene.start("creator", "create", stage.scratch / "mapped", 4)
    scene.start("importer", "take", stage.scratch / "mapped", 4, "mapped")
    scene.kill("creator", "importer", _imported(stage))
    scene.finish()


def _handle(name: str, note: str, kind: str) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        scene = _Scene(stage, name, note)
        scene.record()
        place = stage.scratch / name
        scene.start("creator", kind, place, 4)
        scene.start("importer", "take", place, 4)
        scene.kill("creator", "importer", 4 if kind == "pool" else _imported(stage))
        scene.finish()

    return play


def two_importers(stage: Stage) -> None:
    """Record a dead creator with two importers, one of which has closed what it had."""
    scene = _Scene(
        stage, "uncharged-two-importers", "a dead creator's 4 GiB, and two programs that imported them"
    )
    scene.record()
    place = stage.scratch / "two"
    scene.start("creator", "create", place, 4)
    scene.start("first", "take", place, 4)
    scene.start("second", "take", place, 4)
    scene.kill("creator", "first", _imported(stage))
    scene.kill("second")
    scene.finish()


def handle_and_managed(stage: Stage) -> None:
    """Record a dead creator's memory beside managed memory that lies on the host in part."""
    scene = _Scene(stage, "uncharged-handle-and-managed", "a handle of 4 GiB beside 3 of 8 GiB managed")
    scene.record()
    scene.start("managed", "managed", 8, 3, 1, gib=3)
    scene.start("creator", "create", stage.scratch / "both", 4)
    scene.start("importer", "take", stage.scratch / "both", 4)
    scene.kill("creator", "importer", _imported(stage))
    scene.finish()


def kept_descriptor(stage: Stage) -> None:
    """Record memory that only a program without CUDA keeps, by its descriptor."""
    scene = _Scene(
        stage, "uncharged-kept-descriptor", "a dead creator's 4 GiB, kept by a program without CUDA"
    )
    scene.record()
    scene.start("creator", "create", stage.scratch / "kept", 4)
    keeper = stage.start("uncharged.py", "keeper", "keep", stage.scratch / "kept")
    keeper.wait_for("keeper")
    scene.kill("creator")
    assert scene.recorder is not None
    scene.recorder.more(SETTLING)
    scene.finish()


def forked(stage: Stage) -> None:
    """Record a killed program whose forked child lives on with the device open: NVML lists it still."""
    scene = _Scene(stage, "uncharged-forked", "a program of 4 GiB was killed, and its forked child lives on")
    scene.record()
    program = scene.start("parent", "fork", 4)
    program.wait_for("parent-child")
    scene.kill("parent", wait=False)
    recorder = scene.recorder
    assert recorder is not None
    child = program.wait_for("parent-child")["parent-child"]
    if not stage.rehearsing:  # the stand-in has no device files that anybody could hold open
        recorder.until("the child", lambda shot: child in (hidden(shot) or []), timeout=60)
    recorder.more(4)
    os.kill(child, signal.SIGKILL)
    recorder.more(SETTLING)
    scene.finish()


def _framework(
    name: str,
    kind: str,
    *more: str,
    gib: float = 4.0,
    env: Mapping[str, str] | None = None,
    note: str = "4 GiB of managed memory by {name}",
) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        scene = _Scene(stage, f"uncharged-{name}", note.format(name=name))
        scene.record()
        if stage.rehearsing:
            scene.start("holder", "managed", 4, 4, gib=4)
        else:
            arguments = [stage.scratch if each == "SCRATCH" else each for each in more]
            scene.start("holder", kind, 4, *arguments, gib=gib, env=env)
        scene.finish()

    return play


def beside_tensorflow(stage: Stage) -> None:
    """Record TensorFlow's unified memory beside another program's managed memory and an ordinary holder."""
    scene = _Scene(
        stage, "uncharged-tensorflow-pair", "unified memory of TensorFlow beside 3 GiB of managed memory"
    )
    scene.ordinary(1)
    scene.record()
    scene.start("managed", "managed", 3, 3, gib=3)
    if stage.rehearsing:
        scene.start("holder", "managed", 4, 4, gib=4)
    else:
        scene.start("holder", "tensorflow", 4, "session", gib=TENSORFLOW_GIB)
    scene.finish()


def another_user(stage: Stage) -> None:
    """Record managed memory of another user in a PID namespace of its own, as in a container."""
    scene = _Scene(stage, "uncharged-namespace", "4 GiB of managed memory in another PID namespace")
    scene.record()
    unshare = ("unshare", "--pid", "--fork", "--mount-proc")
    program = stage.start("uncharged.py", "holder", "managed", 4, 4, before=unshare)
    program.wait_for("holder")
    recorder = scene.recorder
    assert recorder is not None
    recorder.until("a holder", lambda shot: bool(shot.devices[0].holdings))
    recorder.more(3)
    assert recorder.snapshot is not None
    scene.roles["holder"] = recorder.snapshot.devices[0].holdings[0].pid
    scene.truth["holder"] = 4 * GIB
    scene.finish()


def mps(stage: Stage) -> None:
    """Record a client of MPS with managed memory beside one without."""
    directory = Path(stage.scratch, "mps-uncharged")
    directory.mkdir()
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory),
        "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    control = mps_control(stage)
    scene = _Scene(stage, "uncharged-mps", "a client of MPS with 4 GiB of managed memory, and one without")
    scene.record()
    try:
        if control:
            subprocess.run([control, "-d"], env=stage.env(env), check=True, timeout=20, capture_output=True)
        scene.start("managed", "managed", 4, 4, gib=4, env=env)
        scene.start("plain", "managed", 0.01, 0, env=env)
        recorder = scene.recorder
        if control and recorder is not None and recorder.snapshot is not None:
            known = set(scene.roles.values())
            listed = [each.pid for each in recorder.snapshot.devices[0].holdings if each.pid not in known]
            scene.roles["server"], scene.truth["server"] = listed[0], 0
        scene.finish()
    finally:
        if control:
            for program in scene.programs.values():
                program.kill()
            subprocess.run(
                [control], input="quit -t 2\n", text=True, env=stage.env(env), check=False, timeout=20,
                capture_output=True,
            )  # fmt: skip


def checkpointed(stage: Stage) -> None:
    """Record a program that was checkpointed: its device memory lies on the host."""
    scene = _Scene(stage, "uncharged-checkpointed", "a program of 0.5 GiB that was checkpointed")
    scene.record()
    scene.ordinary(1)
    if not stage.rehearsing:
        pid = scene.roles["holder-0"]
        stage.start("uncharged.py", "checkpointer", "checkpoint", pid).wait_for("checkpointer")
        scene.finish("holder-0")
    else:
        scene.finish()


UNCHARGED: tuple[Scenario, ...] = (
    Scenario(
        "uncharged-managed", _managed("uncharged-managed", "8 GiB of managed memory on the device", 8, 8)
    ),
    Scenario(
        "uncharged-on-host",
        _managed("uncharged-on-host", "8 GiB of managed memory on the host alone", 8, 0, 8),
    ),
    Scenario(
        "uncharged-in-part",
        _managed("uncharged-in-part", "8 GiB of managed memory, 2 on the device, 1 on the host", 8, 2, 1),
    ),
    Scenario("uncharged-mapped-handle", mapped_handle, 15),
    Scenario("uncharged-pair", pair, 15),
    Scenario("uncharged-pair-with-room", pair_with_room, 15),
    Scenario("uncharged-pair-late", pair_late, 15),
    Scenario(
        "uncharged-handle", _handle("uncharged-handle", "a dead creator's 4 GiB of cuMemCreate", "create"), 15
    ),
    Scenario(
        "uncharged-pool", _handle("uncharged-pool", "a dead creator's 4 GiB of an exported pool", "pool"), 15
    ),
    Scenario("uncharged-two-importers", two_importers, 20),
    Scenario("uncharged-handle-and-managed", handle_and_managed, 20),
    Scenario("uncharged-among-ten", among_ten, 35),
    Scenario("uncharged-late-among-ten", late_among_ten, 20),
    Scenario("uncharged-cupy", _framework("cupy", "cupy"), 20),
    Scenario("uncharged-torch", _framework("torch", "torch", "SCRATCH"), 20),
    Scenario(
        "uncharged-jax",
        _framework(
            "jax",
            "jax",
            gib=4.12,
            env={"TF_FORCE_UNIFIED_MEMORY": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        ),
        25,
    ),
    Scenario(
        "uncharged-tensorflow",
        _framework(
            "tensorflow",
            "tensorflow",
            "session",
            gib=TENSORFLOW_GIB,
            note="4 GiB of unified memory by a session of TensorFlow, and 0.13 of its own",
        ),
        60,
        "tensorflow",
    ),
    Scenario(
        "uncharged-tensorflow-variable",
        _framework(
            "tensorflow-variable",
            "tensorflow",
            "variable",
            gib=0.0,
            note="4 GiB by TensorFlow, which ignores TF_FORCE_UNIFIED_MEMORY",
            env={"TF_FORCE_UNIFIED_MEMORY": "1", "TF_FORCE_GPU_ALLOW_GROWTH": "true"},
        ),
        60,
        "tensorflow",
    ),
    Scenario("uncharged-tensorflow-pair", beside_tensorflow, 60, "tensorflow"),
    Scenario("uncharged-namespace", another_user, 12),
    Scenario("uncharged-kept-descriptor", kept_descriptor, 20),
    Scenario("uncharged-mps", mps, 25),
    Scenario("uncharged-checkpointed", checkpointed, 20),
    Scenario("uncharged-oversubscribed", oversubscribed, 40),
    Scenario("uncharged-forked", forked, 60),
)
