"""Read what slurmd has told the prolog of each job: a record that the prolog makes and the epilog removes.

It is Slurm's own word, also for a job without a process, and no user can write it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from vramledger.readers.owners.host_files import HostFiles

RECORDS = "run/vramledger-slurm"
"""Where the scripts of deploy/slurm keep what they know, below the root file system; only root may write
there."""

_RECORD_CAP = 65_536


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What slurmd has told the prolog of a job.

    Attributes:
        job: its number.
        sluid: its other name, which the cgroups of Slurm 26.05 have; empty before.
        uid: the number of its user, None when not known.
        user: the name of its user.
        account: its account; empty without accounting.
        devices: its devices as :mod:`slurm_gres` names them, None when they are not known.
    """

    job: str
    sluid: str = ""
    uid: int | None = None
    user: str = ""
    account: str = ""
    devices: tuple[str, ...] | None = None

    def to_json(self) -> str:
        """Write the record as :func:`read_records` reads it."""
        names = ("job", "sluid", "uid", "user", "account", "devices")
        return json.dumps({name: getattr(self, name) for name in names})


def read_records(files: HostFiles, directory: str = RECORDS) -> dict[str, JobRecord]:
    """Return the records of all jobs on this host, of every slurmd."""
    found: dict[str, JobRecord] = {}
    for node in sorted(files.list_directories(f"{directory}/jobs") or ()):
        for name in sorted(files.list_names(f"{directory}/jobs/{node}") or ()):
            data = files.read(f"{directory}/jobs/{node}/{name}", _RECORD_CAP)
            if name.isdigit() and data is not None and (record := _parse_record(name, data)) is not None:
                found[name] = record
    return found


def _parse_record(name: str, data: bytes) -> JobRecord | None:
    try:
        raw = json.loads(data)
        devices = raw["devices"]
        texts = [str(raw[key]) for key in ("sluid", "user", "account")]
        uid = None if raw["uid"] is None else int(raw["uid"])
        return JobRecord(
            name, texts[0], uid, texts[1], texts[2], None if devices is None else tuple(map(str, devices))
        )
    except (ValueError, TypeError, KeyError):
        return None
