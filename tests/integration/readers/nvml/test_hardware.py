"""What nvml/hardware.py reads, from the stand-in through the real pynvml."""

import pytest

from tests.support.nvml_readers import read
from tests.support.standin.library import GIB, MIB, Code, Device, StandIn
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import HARDWARE_METRICS


@pytest.fixture(autouse=True)
def _older_gpu(device: Device) -> None:
    """Take a GPU without GPM, whose counters would replace one of the queries."""
    device.set(gpm_supported=0)


def test_hardware_is_in_base_units(standin_here: StandIn, reader: DeviceReader) -> None:
    """mW, mJ, MHz, KiB and percent become watts, joules, hertz, bytes and ratios."""
    standin_here.fail("nvmlDeviceGetFanSpeed", Code.SUCCESS)
    standin_here.device(0).set(
        temperature=61, memory_temperature=72, power=650_500, power_limit=700_000, energy=12_345,
        clocks=(1500, 1400, 3201, 1200), throttle_reasons=0b1000100, performance_state=2, fan_speed=40,
        ecc=(7, 1), remapped_rows=(3, 2, 1, 0), recovery_action=4, encoder_utilization=50,
        decoder_utilization=25, pcie_generation=4, pcie_width=8, bar1_total=2 * GIB, bar1_used=MIB,
        pcie_transmit=2, pcie_receive=3,
    )  # fmt: skip
    others = "gpu_idle applications_clocks_setting hw_slowdown sync_boost sw_thermal_slowdown"
    others += " hw_power_brake_slowdown display_clock_setting"
    throttle = {**dict.fromkeys(others.split(), 0), "sw_power_cap": 1, "hw_thermal_slowdown": 1}
    assert read(reader).hardware == {
        "device_temperature_celsius": 61, "device_memory_temperature_celsius": 72,
        "device_power_watts": 650.5, "device_power_limit_watts": 700, "device_energy_joules_total": 12.345,
        "device_clock_hertz": {"graphics": 1500e6, "sm": 1400e6, "memory": 3201e6, "video": 1200e6},
        "device_throttle_active": throttle, "device_performance_state": 2, "device_fan_speed_ratio": 0.4,
        "device_ecc_errors_total": {"corrected": 7, "uncorrected": 1},
        "device_remapped_rows": {"corrected": 3, "uncorrected": 2}, "device_row_remap_pending": 1,
        "device_row_remap_failed": 0, "device_recovery_action": {"drain_and_reset": 1},
        "device_encoder_utilization_ratio": 0.5, "device_decoder_utilization_ratio": 0.25,
        "device_pcie_link_generation": {"current": 4, "max": 5},
        "device_pcie_link_width": {"current": 8, "max": 16},
        "device_bar1_memory_bytes": {"used": MIB, "total": 2 * GIB},
        "device_pcie_throughput_bytes_per_second": {"transmit": 2048, "receive": 3072},
    }  # fmt: skip


def test_what_is_not_known_is_left_out(device: Device, reader: DeviceReader) -> None:
    """State 32 is NVML's "unknown", and no P-state; unknown reasons to throttle do not change the others."""
    device.set(performance_state=32, throttle_reasons=1 << 40 | 1)
    hardware = read(reader).hardware
    assert "device_performance_state" not in hardware
    active = hardware["device_throttle_active"]
    assert isinstance(active, dict)
    assert [reason for reason, value in active.items() if value] == ["gpu_idle"]


SLOW_FUNCTIONS = ("TotalEnergyConsumption", "FieldValues", "PcieThroughput", "BAR1MemoryInfo", "MigMode")


def test_expensive_readings_have_their_own_pace(standin_here: StandIn, reader: DeviceReader) -> None:
    """A query that takes more than 100 µs runs every ten seconds; its value is kept in between."""
    for second in range(10):
        assert read(reader, float(second)).hardware["device_energy_joules_total"] == 5000
        standin_here.device(0).set(energy=6_000_000)
    counts = {name: standin_here.calls(f"nvmlDeviceGet{name}") for name in SLOW_FUNCTIONS}
    assert counts == {**dict.fromkeys(SLOW_FUNCTIONS, 1), "PcieThroughput": 2, "FieldValues": 2}
    assert standin_here.calls("nvmlDeviceGetPowerUsage") == 10
    assert read(reader, 10.0).hardware["device_energy_joules_total"] == 6000


def test_a_collector_that_is_off_calls_nothing(standin_here: StandIn) -> None:
    """Without its collector no function of a family is called; the ledger needs none of them."""
    driver = Driver.open()
    (reader,) = driver.readers(frozenset({"ledger", "process"}))
    reading = read(reader)
    driver.close()
    assert (set(reading.hardware), reading.memory is not None) == ({"device_recovery_action"}, True)
    for name in ("PowerUsage", "Temperature", "ClockInfo", "PcieThroughput", "BAR1MemoryInfo"):
        assert standin_here.calls(f"nvmlDeviceGet{name}") == 0


@pytest.mark.parametrize("collector", ["ledger", "hardware", "energy", "pcie"])
def test_a_collector_reads_its_own_families(standin_here: StandIn, collector: str) -> None:
    """Each collector alone reads exactly its own rows of the table."""
    standin_here.fail("nvmlDeviceGetFanSpeed", Code.SUCCESS)
    driver = Driver.open()
    (reader,) = driver.readers(frozenset({collector}))
    keys = set(read(reader).hardware)
    driver.close()
    assert keys == {question.key for question in HARDWARE_METRICS if question.collector == collector}
