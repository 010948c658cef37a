"""Find which rank of which distributed job a process is, as its launcher wrote into its environment.

Only the rank, the number of ranks and the identity of the job leave this module. Nobody attests an
environment: who joins ranks of one job also compares what the kernel attests (the user, the namespace).
"""

from __future__ import annotations

from collections.abc import Callable

from vramledger.model.reading import Rank
from vramledger.printable import printable
from vramledger.readers.hosts.program_names import REPLACEMENT

MOST_RANKS = 1_000_000
LONGEST_JOB = 128

_LOCAL = ("localhost", "::1", "0.0.0.0", "::", "ip6-localhost")  # noqa: S104 nothing listens here


def find_rank(environment: bytes, node: str) -> Rank | None:
    """Return the rank that an environment names; None where it names none, or a job of a single rank.

    A job is named by its rendezvous (torchrun, DeepSpeed, Accelerate), by its namespace of PMIx (Open MPI,
    MPICH), or by its step of Slurm. A batch script of Slurm has a rank too, but no step: what it starts is
    not a job of several ranks.

    Args:
        environment: begins with a zero byte.
        node: the name of this host, which tells a rendezvous on localhost from that of another host.
    """

    def value(name: str) -> str:
        mark = b"\0" + name.encode() + b"="
        begin = environment.find(mark)
        if begin < 0:
            return ""
        begin += len(mark)
        # Cut before searching for the end, and at four bytes a character at most.
        found = environment[begin : begin + 4 * LONGEST_JOB].partition(b"\0")[0]
        return printable(found.decode(errors="replace"), REPLACEMENT)[:LONGEST_JOB]

    for find in (_rendezvous, _pmix, _slurm_step):
        job, rank, size = find(value, node)
        if job and _is_number(rank) and _is_number(size) and int(rank) < int(size) and int(size) > 1:
            return Rank(int(rank), int(size), job)
    return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MOST_RANKS)) and int(text) <= MOST_RANKS


def _rendezvous(value: Callable[[str], str], node: str) -> tuple[str, str, str]:
    address, port = value("MASTER_ADDR"), value("MASTER_PORT")
    if not address or not _is_number(port):
        return "", "", ""
    if address in _LOCAL or address.startswith("127."):
        address = node
    return f"{address}:{port}", value("RANK"), value("WORLD_SIZE")


def _pmix(value: Callable[[str], str], _: str) -> tuple[str, str, str]:
    job = value("PMIX_NAMESPACE")
    rank = value("OMPI_COMM_WORLD_RANK") or value("PMIX_RANK")
    return (f"pmix {job}" if job else ""), rank, value("OMPI_COMM_WORLD_SIZE") or value("PMI_SIZE")


def _slurm_step(value: Callable[[str], str], _: str) -> tuple[str, str, str]:
    job, step = value("SLURM_JOB_ID"), value("SLURM_STEP_ID")
    return (
        (f"slurm {job}.{step}" if job and step else ""),
        value("SLURM_PROCID"),
        value("SLURM_STEP_NUM_TASKS"),
    )
