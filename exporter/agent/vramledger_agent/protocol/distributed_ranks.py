"""Say how a rank of a distributed job is named, by its environment and by its rendezvous.

The exporter applies these rules to the environment that the kernel shows, the agent to the one that the
program has by now. So both give ranks of one job the same name.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MOST_RANKS = 1_000_000
LONGEST_VALUE = 128
"""The number of characters that are read of a variable."""

LONGEST_JOB = 2 * LONGEST_VALUE + 16
"""The longest name of a job: two values, and what is between and before them."""

_LOCAL = ("localhost", "::1", "0.0.0.0", "::", "ip6-localhost")  # noqa: S104 nothing listens here


def find_rank(value: Callable[[str], str]) -> tuple[int, int, str] | None:
    """Return rank, number of ranks and job that an environment names; None where it does not name all three.

    A job is named by its rendezvous (torchrun, DeepSpeed, Accelerate), by its namespace of PMIx (Open MPI,
    MPICH), or by its step of Slurm. A batch script of Slurm has a rank too, but no step: what it starts is
    not a job of several ranks. A job of a single rank is none. ``value``: returns the value of a variable, at
    most :data:`LONGEST_VALUE` characters, empty if not set.
    """
    for find in (_rendezvous, _pmix, _slurm_step):
        job, rank, size = find(value)
        if job and _is_number(rank) and _is_number(size) and is_rank(int(rank), int(size)):
            return int(rank), int(size), job
    return None


def is_rank(rank: int, size: int) -> bool:
    """Tell whether there can be such a rank in a job of several ranks."""
    return 0 <= rank < size and 1 < size <= MOST_RANKS


def name_rendezvous(address: str, port: str) -> str:
    """Return the name of the job that meets at an address, without the address where that is this node."""
    return f":{port}" if address in _LOCAL or address.startswith("127.") else f"{address}:{port}"


def name_file(path: str) -> str:
    """Return the name of the job that meets in a file, without the node: other nodes are other jobs."""
    return f":{path[-LONGEST_VALUE:]}"


def add_node(job: str, node: str) -> str:
    """Return the name of a job with the node's name, if its rendezvous is local to a node."""
    return node + job if job.startswith(":") and not job.startswith("::") else job


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MOST_RANKS)) and int(text) <= MOST_RANKS


def _rendezvous(value: Callable[[str], str]) -> tuple[str, str, str]:
    address, port = value("MASTER_ADDR"), value("MASTER_PORT")
    if not address or not _is_number(port):
        return "", "", ""
    return name_rendezvous(address, port), value("RANK"), value("WORLD_SIZE")


def _pmix(value: Callable[[str], str]) -> tuple[str, str, str]:
    job = value("PMIX_NAMESPACE")
    if not job:
        return "", "", ""
    rank = value("OMPI_COMM_WORLD_RANK") or value("PMIX_RANK")
    return f"pmix {job}", rank, value("OMPI_COMM_WORLD_SIZE") or value("PMI_SIZE")


def _slurm_step(value: Callable[[str], str]) -> tuple[str, str, str]:
    job, step = value("SLURM_JOB_ID"), value("SLURM_STEP_ID")
    if not job or not step:
        return "", "", ""
    return f"slurm {job}.{step}", value("SLURM_PROCID"), value("SLURM_STEP_NUM_TASKS")
