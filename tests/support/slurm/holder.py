"""Pretend to hold GPU memory: ``holder.py SECONDS DIRECTORY [key=value]...``.

It writes into DIRECTORY what the stand-in driver shall list for it. ``gpus`` are NVML's indices, by default
those of ``SLURM_JOB_GPUS``; ``gib`` is the memory; ``mig`` an instance's position. ``term=ignore`` ignores
SIGTERM, ``escape=yes`` leaves the step, ``exit=N`` ends with this status, ``dead=yes`` leaves memory of no
process. ``ready`` is a file that is made when the memory is held.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

NO_PROCESS = 2**22
"""One above the largest pid of Linux."""

options = dict(word.partition("=")[::2] for word in sys.argv[3:])
if options.get("escape"):
    for _ in range(2):
        if os.fork():
            while options.get("ready") and not Path(options["ready"]).exists():
                time.sleep(0.01)
            os._exit(0)
        os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if options.get("cgroup"):
        Path(options["cgroup"], "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
if options.get("term") == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
names = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "GPU_DEVICE_ORDINAL")
written = options.get("gpus") or next((os.environ[each] for each in names if os.environ.get(each)), "0")
dead = bool(options.get("dead"))
start = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
hold = {
    "pid": NO_PROCESS if dead else os.getpid(),
    "start": None if dead else start,
    "gpus": [int(number) for number in written.split(",")],
    "bytes": int(float(options.get("gib", 4)) * 2**30),
    "mig": int(options["mig"]) if "mig" in options else None,
}
place = Path(sys.argv[2], f"{os.getpid()}.hold")
fresh = place.with_suffix(".new")
fresh.write_text(json.dumps(hold), encoding="ascii")
fresh.rename(place)
if options.get("ready"):
    Path(options["ready"]).touch()
if not dead:
    time.sleep(float(sys.argv[1]))
sys.exit(int(options.get("exit", 0)))
