"""What nvml/mig.py reads of a divided GPU, from the stand-in through the real pynvml."""

import time

from tests.support.nvml_readers import Open
from tests.support.standin.library import GIB, Code, StandIn
from tests.support.sure import sure
from vramledger.readers.nvml.hardware import SLOW_INTERVAL


def test_instances_are_devices_and_their_gpu_has_none(standin_here: StandIn, open_readers: Open) -> None:
    """A divided GPU has hardware readings; its instances have the memory and the holders."""
    device = standin_here.device(0)
    device.set_processes([(10, GIB), (20, 2 * GIB)])
    small, large = device.divide("1g.18gb", "2g.35gb")
    small.set_processes([(10, GIB)])
    large.set_processes([(20, 2 * GIB)])
    (reader,) = open_readers()
    gpu, first, second = reader.read(time.time(), 0.0)
    assert (gpu.divided, gpu.memory, gpu.processes, gpu.process_utilization) == (True, None, None, None)
    assert "device_power_watts" in gpu.hardware
    assert (gpu.error, gpu.failed) == (None, ())
    for instance, unit, profile, number, pid in (
        (first, small, "1g.18gb", 1, 10),
        (second, large, "2g.35gb", 2, 20),
    ):
        assert (instance.uuid, instance.parent, instance.index) == (unit.uuid, gpu.uuid, 0)
        assert (instance.mig_profile, instance.gpu_instance, instance.compute_instance) == (
            profile,
            number,
            0,
        )
        assert instance.memory is not None
        assert [entry.pid for entry in sure(instance.processes)] == [pid]
        assert (instance.divided, instance.process_utilization, instance.hardware) == (False, None, {})


def test_a_profile_without_a_name_is_from_attributes(standin_here: StandIn, open_readers: Open) -> None:
    """An instance has a profile even if its MIG name has none."""
    (unit,) = standin_here.device(0).divide("2g.35gb")
    unit.name = "NVIDIA H200"
    (reader,) = open_readers()
    _, instance = reader.read(time.time(), 0.0)
    assert instance.mig_profile == "2g.35gb"


def test_the_mig_layout_is_asked_for_at_the_slow_pace(standin_here: StandIn, open_readers: Open) -> None:
    """A new layout is seen after ten seconds, because the query takes 114 µs."""
    (reader,) = open_readers()
    assert len(reader.read(time.time(), 0.0)) == 1
    standin_here.device(0).divide("1g.18gb")
    assert len(reader.read(time.time(), SLOW_INTERVAL - 1)) == 1
    assert len(reader.read(time.time(), SLOW_INTERVAL)) == 2
    assert standin_here.calls("nvmlDeviceGetMigMode") == 2


def test_a_destroyed_instance_is_gone_the_next_sample(standin_here: StandIn, open_readers: Open) -> None:
    """An instance that does not answer any more causes a new read of the layout; others keep their data."""
    device = standin_here.device(0)
    device.divide("1g.18gb", "1g.18gb")
    (reader,) = open_readers()
    reader.read(time.time(), 0.0)
    device.raw.instances[0].present = 0
    _, gone, alive = reader.read(time.time(), 1.0)
    assert (gone.error, gone.memory, gone.processes) == ("failed", None, None)
    assert (alive.error, alive.failed) == (None, ())
    assert [reading.uuid for reading in reader.read(time.time(), 2.0)] == [device.uuid, alive.uuid]


def test_the_instances_of_a_lost_gpu_are_lost(standin_here: StandIn, open_readers: Open) -> None:
    """The MIG instances of a lost GPU are reported as lost; they do not just disappear."""
    device = standin_here.device(0)
    (unit,) = device.divide("1g.18gb")
    (reader,) = open_readers()
    reader.read(time.time(), 0.0)
    device.lost = True
    readings = reader.read(time.time(), 1.0)
    assert [(each.uuid, each.error) for each in readings] == [(device.uuid, "lost"), (unit.uuid, "lost")]


def test_an_instance_has_a_place(standin_here: StandIn, open_readers: Open) -> None:
    """Its first memory slice and their number distinguish instances of one profile."""
    device = standin_here.device(0)
    first, second = device.divide("3g.71gb", "3g.71gb")
    first.place(0, 4)
    second.place(4, 4)
    (reader,) = open_readers()
    assert [each.mig_placement for each in reader.read(time.time(), 0.0)] == [None, "0:4", "4:4"]


def test_a_place_that_is_not_told_is_not_a_failure(standin_here: StandIn, open_readers: Open) -> None:
    """NVML tells the place only to root; the instance has its data all the same."""
    standin_here.device(0).divide("3g.71gb")
    standin_here.fail("nvmlDeviceGetGpuInstanceById", Code.NO_PERMISSION)
    (reader,) = open_readers()
    _, instance = reader.read(time.time(), 0.0)
    assert (instance.mig_placement, instance.error, instance.failed) == (None, None, ())
    assert instance.memory is not None
