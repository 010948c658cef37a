"""Limits of cgroups, from files as the kernel writes them, and from the stand-in driver."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nvml_readers import ALL, read
from tests.support.standin.library import GIB, Code, StandIn
from vramledger.model.reading import CgroupLimit
from vramledger.readers.hosts.system_memory import DeviceMemoryCgroups, chain_of
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import SLOW_INTERVAL

REGION = "nvidia/0000:0b:00.0/vidmem"
Open = Callable[[], DeviceReader]


def write_cgroup(rootfs: Path, path: str, **files: str) -> None:
    """Write the files of the dmem controller in a cgroup, as ``current="12"``; another GPU is in each."""
    directory = rootfs / "sys/fs/cgroup" / path.strip("/")
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        other = "drm/0000:03:00.0/vram0 17\n"
        (directory / f"dmem.{name}").write_text(f"{other}{REGION} {value}\n")


@pytest.fixture
def open_reader(open_driver: Callable[[], Driver], tmp_path: Path) -> Open:
    """Open the GPU on a host with these cgroups; we ourselves are in the root of the hierarchy."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")

    def open_reader() -> DeviceReader:
        (reader,) = open_driver().readers(ALL, None, DeviceMemoryCgroups(str(tmp_path), tmp_path))
        reader.open()
        reader.cgroups = chain_of("/slurm/job_41")
        return reader

    return open_reader


def test_a_chain_ends_before_the_root() -> None:
    """A cgroup and those above it, from the inside out; a path that leads outside has none."""
    assert chain_of("/a/b/c") == ("/a/b/c", "/a/b", "/a")
    assert chain_of("/") == chain_of("/../x") == chain_of("/x" * 99) == ()


def test_the_kernels_limits(open_reader: Open, tmp_path: Path) -> None:
    """Limit, guarantee and use of each cgroup above a holder; max means no limit."""
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/slurm", current=str(9 * GIB), max="max", min="0")
    write_cgroup(tmp_path, "/slurm/job_41", current=str(8 * GIB), max=str(10 * GIB), min=str(GIB))
    reading = read(open_reader())
    assert reading.limits == (
        CgroupLimit("/slurm/job_41", GIB, 10 * GIB, 8 * GIB),
        CgroupLimit("/slurm", 0, None, 9 * GIB),
    )
    assert (reading.partition, reading.failed) == (None, ())


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


def test_without_the_controller_the_driver_is_asked(standin_here: StandIn, open_reader: Open) -> None:
    """NVML's own limits are those of the cgroup's whole path; a cgroup without any is left out."""
    standin_here.device(0).limit("/sys/fs/cgroup/slurm/job_41", soft=GIB, hard=10 * GIB, used=8 * GIB)
    reading = read(open_reader())
    assert reading.limits == (CgroupLimit("/slurm/job_41", GIB, 10 * GIB, 8 * GIB),)


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


@pytest.mark.parametrize("maximum", ["-1", "x y z", "?", "٣"])
def test_garbage_is_not_a_limit(open_reader: Open, tmp_path: Path, maximum: str) -> None:
    """A limit that is not a number is not known, and not one that is missing."""
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/slurm/job_41", current="5", max=maximum, min="0")
    reading = read(open_reader())
    assert (reading.limits, reading.failed) == (None, ("limits",))


def test_a_use_that_is_garbage_is_not_known(open_reader: Open, tmp_path: Path) -> None:
    """The limit beside it is still known."""
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/slurm/job_41", current="-1", max="7", min="?")
    assert read(open_reader()).limits == (CgroupLimit("/slurm/job_41", None, 7, None),)


def test_a_guarantee_without_a_bound_is_all(open_reader: Open, tmp_path: Path) -> None:
    """The kernel writes max where all memory of the region is guaranteed: that is its capacity, and not 0."""
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/slurm/job_41", current="5", max="max", min="max")
    assert read(open_reader()).limits == (CgroupLimit("/slurm/job_41", 140 * GIB, None, 5),)


def test_all_of_an_unknown_capacity_is_not_known(open_reader: Open, tmp_path: Path) -> None:
    """Where the capacity of the region cannot be read, a guarantee of all of it is not known."""
    write_cgroup(tmp_path, "/", capacity="?")
    write_cgroup(tmp_path, "/slurm/job_41", current="5", max="9", min="max")
    assert read(open_reader()).limits == (CgroupLimit("/slurm/job_41", None, 9, 5),)


def test_a_limit_that_cannot_be_read_is_a_failure(open_reader: Open, tmp_path: Path) -> None:
    """A cgroup that has a use, but no readable limit, is not shown as one without a limit."""
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/slurm", current="5", max=str(GIB))
    write_cgroup(tmp_path, "/slurm/job_41", current="5", min="0")
    reading = read(open_reader())
    assert (reading.limits, reading.failed) == (None, ("limits",))


def test_a_cgroup_that_is_gone_is_left_out(open_reader: Open, tmp_path: Path) -> None:
    """A cgroup whose files have gone away with it limits nobody, and those above it are still read."""
    write_cgroup(tmp_path, "/", capacity=str(140 * GIB))
    write_cgroup(tmp_path, "/slurm", current="5", max=str(GIB))
    (tmp_path / "sys/fs/cgroup/slurm/job_41").mkdir()
    reading = read(open_reader())
    assert (reading.limits, reading.failed) == ((CgroupLimit("/slurm", None, GIB, 5),), ())


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


def test_the_driver_may_guarantee_all(standin_here: StandIn, open_reader: Open) -> None:
    """A guarantee without a bound makes no garbage of the driver's other figures."""
    standin_here.device(0).limit("/sys/fs/cgroup/slurm/job_41", soft=2**64 - 1, hard=10 * GIB, used=8 * GIB)
    reading = read(open_reader())
    assert (reading.limits, reading.failed) == ((CgroupLimit("/slurm/job_41", None, 10 * GIB, 8 * GIB),), ())
