"""Limits of cgroups, from files as the kernel writes them, and from the stand-in driver."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nvml_readers import opened, read
from tests.support.standin.library import GIB, Code, Device, StandIn
from vramledger.model.reading import CgroupLimit
from vramledger.readers.hosts.system_memory import DeviceMemoryCgroups, chain_of
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import SLOW_INTERVAL

REGION = "nvidia/0000:0b:00.0/vidmem"
Open = Callable[[], DeviceReader]
Files = dict[str, str]


def write_cgroup(rootfs: Path, path: str, **files: str) -> None:
    """Write the files of the dmem controller in a cgroup, as ``current="12"``; another GPU is in each."""
    directory = rootfs / "sys/fs/cgroup" / path.strip("/")
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / f"dmem.{name}").write_text(f"drm/0000:03:00.0/vram0 17\n{REGION} {value}\n")


@pytest.fixture
def open_reader(open_driver: Callable[[], Driver], tmp_path: Path) -> Open:
    """Open the GPU on a host with these cgroups; we ourselves are in the root of the hierarchy."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")

    def open_reader() -> DeviceReader:
        reader = opened(open_driver(), None, DeviceMemoryCgroups(str(tmp_path), tmp_path))
        reader.cgroups = chain_of("/slurm/job_41")
        return reader

    return open_reader


def test_a_chain_ends_before_the_root() -> None:
    """A cgroup and those above it, from the inside out; a path that leads outside has none."""
    assert chain_of("/a/b/c") == ("/a/b/c", "/a/b", "/a")
    assert chain_of("/") == chain_of("/../x") == chain_of("/x" * 99) == ()


JOB, FULL = "/slurm/job_41", str(140 * GIB)
UNKNOWN = (None, ("limits",))


@pytest.mark.parametrize(
    ("capacity", "cgroups", "known"),
    [
        (FULL, ({"current": "9", "max": "max", "min": "0"}, {"current": "8", "max": "10", "min": "1"}),
         ((CgroupLimit(JOB, 1, 10, 8), CgroupLimit("/slurm", 0, None, 9)), ())),
        *(
            (FULL, ({}, {"current": "5", "max": bad, "min": "0"}), UNKNOWN)
            for bad in ("-1", "x y z", "?", "٣")
        ),
        (FULL, ({}, {"current": "-1", "max": "7", "min": "?"}), ((CgroupLimit(JOB, None, 7, None),), ())),
        (FULL, ({}, {"current": "5", "max": "max", "min": "max"}),
         ((CgroupLimit(JOB, 140 * GIB, None, 5),), ())),
        ("?", ({}, {"current": "5", "max": "9", "min": "max"}), ((CgroupLimit(JOB, None, 9, 5),), ())),
        (FULL, ({"current": "5", "max": "6"}, {"current": "5", "min": "0"}), UNKNOWN),
        (FULL, ({"current": "5", "max": "6"}, {}), ((CgroupLimit("/slurm", None, 6, 5),), ())),
    ],
    ids=["of each above", "-1", "words", "?", "digits of others", "a use that is garbage",
         "a guarantee of all is the capacity", "all of an unknown capacity", "no readable limit",
         "a cgroup that is gone"],
)  # fmt: skip
def test_the_kernels_limits(
    open_reader: Open, tmp_path: Path, capacity: str, cgroups: tuple[Files, Files], known: tuple[object, ...]
) -> None:
    """Limit, guarantee and use of each cgroup above a holder; a text for a number is unknown, not missing."""
    write_cgroup(tmp_path, "/", capacity=capacity)
    write_cgroup(tmp_path, "/slurm", **cgroups[0])
    write_cgroup(tmp_path, JOB, **cgroups[1])
    reading = read(open_reader())
    assert (reading.limits, reading.failed, reading.partition) == (*known, None)


def test_a_new_holder_has_its_limit_at_the_next_sample(open_reader: Open, tmp_path: Path) -> None:
    """Limits are read every ten seconds, and at once when the holders' cgroups change."""
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/a", current="1", max="2")
    reader = open_reader()
    assert read(reader).limits == ()
    reader.cgroups = ("/a",)
    assert read(reader, 1.0).limits == (CgroupLimit("/a", None, 2, 1),)
    write_cgroup(tmp_path, "/a", current="3", max="4")
    assert read(reader, 2.0).limits == (CgroupLimit("/a", None, 2, 1),)
    assert read(reader, SLOW_INTERVAL + 1).limits == (CgroupLimit("/a", None, 4, 3),)


def test_a_limit_of_our_own_is_a_partition(open_reader: Open, tmp_path: Path) -> None:
    """NVML shows a process in a partition no more than that: the reading says so."""
    (tmp_path / "self/cgroup").write_text("0::/system.slice/vramledger.service\n")
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/system.slice", current="0", max=str(20 * GIB))
    assert read(open_reader()).partition == 20 * GIB


@pytest.mark.parametrize(("soft", "guaranteed"), [(GIB, GIB), (2**64 - 1, None)])
def test_limits_of_the_driver(device: Device, open_reader: Open, soft: int, guaranteed: int | None) -> None:
    """Without the controller NVML is asked, for the whole path; a guarantee of all makes no garbage."""
    device.limit("/sys/fs/cgroup/slurm/job_41", soft=soft, hard=10 * GIB, used=8 * GIB)
    reading = read(open_reader())
    assert reading.limits == (CgroupLimit("/slurm/job_41", guaranteed, 10 * GIB, 8 * GIB),)
    assert reading.failed == ()


@pytest.mark.parametrize("code", [Code.FUNCTION_NOT_FOUND, Code.NOT_SUPPORTED])
def test_a_driver_without_limits_is_asked_once(standin_here: StandIn, open_reader: Open, code: Code) -> None:
    """Before driver 615 nothing is limited by cgroup, which is not a failure and costs no calls."""
    standin_here.fail("nvmlDeviceGetMemoryLimits_v1", code)
    reader = open_reader()
    for moment in (0.0, SLOW_INTERVAL, 2 * SLOW_INTERVAL):
        reading = read(reader, moment)
        assert (reading.limits, reading.failed) == (None, ())
    assert standin_here.calls("nvmlDeviceGetMemoryLimits_v1") <= 1


def test_a_query_that_fails_is_not_a_missing_limit(standin_here: StandIn, open_reader: Open) -> None:
    """The failure is reported, nothing is known then, and the GPU keeps its ledger."""
    standin_here.fail("nvmlDeviceGetMemoryLimits_v1", Code.UNKNOWN)
    reading = read(open_reader())
    assert (reading.limits, reading.failed, reading.error) == (None, ("limits",), None)
    assert reading.memory is not None


def test_the_regions_of_others_are_no_gpus(open_reader: Open, tmp_path: Path) -> None:
    """A region of an unknown name, or of another GPU, limits nothing here."""
    directory = tmp_path / "sys/fs/cgroup/slurm/job_41"
    directory.mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/dmem.capacity").write_text(
        "nvidia/0000:0c:00.0/vidmem 9\nnvidia/0000:0b:00.0/other 9\nxe/0000:0b:00.0/vram0 9\n"
    )
    (directory / "dmem.max").write_text("nvidia/0000:0b:00.0/other 7\n")
    reading = read(open_reader())
    assert (reading.limits, reading.partition, reading.failed) == ((), None, ())
