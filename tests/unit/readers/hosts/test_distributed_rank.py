"""Which rank of which distributed job an environment names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramledger.model.reading import Rank
from vramledger.readers.hosts.facts import find_rank
from vramledger_agent.protocol.distributed_ranks import LONGEST_VALUE

TORCHRUN = "MASTER_ADDR=n0 MASTER_PORT=29500 RANK=5 WORLD_SIZE=16 LOCAL_RANK=1 TORCHELASTIC_RUN_ID=none"
SRUN = "SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8 SLURM_NTASKS=8"
MPI = "PMIX_NAMESPACE=prterun-n0-12@1 PMIX_RANK=2 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4"


def found(text: str) -> Rank | None:
    """Return the rank of an environment whose variables stand between spaces, on the node gpu-7."""
    return find_rank(b"\0" + text.replace(" ", "\0").encode() + b"\0", "gpu-7")


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        (TORCHRUN, Rank(5, 16, "n0:29500")),
        (TORCHRUN + " " + SRUN, Rank(5, 16, "n0:29500")),  # srun starts torchrun once a node
        (TORCHRUN.replace("=n0 ", "=127.0.0.1 "), Rank(5, 16, "gpu-7:29500")),
        (TORCHRUN.replace("=n0 ", "=localhost "), Rank(5, 16, "gpu-7:29500")),
        (SRUN, Rank(3, 8, "slurm 17.0")),
        (SRUN + " MASTER_ADDR=n0 MASTER_PORT=29500", Rank(3, 8, "slurm 17.0")),  # the program sets RANK
        (MPI, Rank(2, 4, "pmix prterun-n0-12@1")),
        (MPI + " " + SRUN, Rank(2, 4, "pmix prterun-n0-12@1")),
    ],
)
def test_a_launcher_names_the_rank_and_the_job(environment: str, rank: Rank) -> None:
    """Ranks of one job get one identity on all nodes, and a job on localhost another one on each node."""
    assert found(environment) == rank


@pytest.mark.parametrize(
    "environment",
    [
        "",
        "RANK=0 WORLD_SIZE=2",  # of which job?
        "MASTER_ADDR=n0 MASTER_PORT=29500 RANK=0",
        TORCHRUN.replace("WORLD_SIZE=16", "WORLD_SIZE=1"),
        TORCHRUN.replace("RANK=5", "RANK=16"),
        TORCHRUN.replace("RANK=5", "RANK=-1"),
        TORCHRUN.replace("RANK=5", "RANK=\u0665"),  # a digit of another script
        TORCHRUN.replace("RANK=5", "RANK=" + "9" * 5000),
        TORCHRUN.replace("29500", "x"),
        SRUN.replace("SLURM_STEP_ID=0 ", ""),  # a batch script, and what it starts itself
        "XMASTER_ADDR=n0 XMASTER_PORT=1 XRANK=0 XWORLD_SIZE=2",
    ],
)
def test_what_is_not_named_is_not_known(environment: str) -> None:
    """A part that is missing, wrong or absurd, and a job of a single rank, give no rank."""
    assert found(environment) is None


@given(st.binary(max_size=400), st.sampled_from([b"MASTER_ADDR", b"PMIX_NAMESPACE", b"SLURM_JOB_ID"]))
def test_any_environment_gives_a_short_printable_name_or_none(value: bytes, name: bytes) -> None:
    """Whatever a program writes into its environment, the job's name is short, printable and one line."""
    rest = f"\0MASTER_PORT=1\0RANK=0\0WORLD_SIZE=2\0{MPI} {SRUN}\0".replace(" ", "\0").encode()
    rank = find_rank(b"\0" + name + b"=" + value + rest, "gpu-7")
    assert rank is None or (
        len(rank.job) <= LONGEST_VALUE + len(":1000000 slurm .") and rank.job.isprintable()
    )
