"""From a framework's number to the device: the right one or none."""

import pytest
from msgspec.structs import replace

from tests.support.builders import MIB
from vramledger.accounting.agent_ordinals import SLACK, translate
from vramledger.model.reading import DeviceReading

GIB = 1024 * MIB
HOST = [DeviceReading(index, f"GPU-{index}{index}-aa", name="H200") for index in range(4)]
A, B, C, D = (device.uuid for device in HOST)
MIXED = [replace(device, name=f"model {device.index}") for device in HOST]
MIG = [
    replace(HOST[0], divided=True),
    DeviceReading(0, "MIG-1", parent=A),
    DeviceReading(0, "MIG-2", parent=A),
    HOST[1],
]
UNSET: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None}


def visible(text: str | None, order: str | None = None) -> dict[str, str | None]:
    """Make the environment that the agent reports."""
    return {"CUDA_VISIBLE_DEVICES": text, "CUDA_DEVICE_ORDER": order}


@pytest.mark.parametrize(
    ("settings", "wanted", "held", "expected"),
    [
        (UNSET, [0, 2], [A, C], {0: A, 2: C}),
        (visible("1,0"), [0, 1], [A, B], {0: B, 1: A}),
        (visible("3, 1"), [0, 1], [B, D], {0: D, 1: B}),
        (visible("2,-1,0"), [0], [C], {0: C}),
        (visible("2,9,0"), [0], [C], {0: C}),
        (visible("GPU-33,GPU-11-aa"), [0, 1], [B, D], {0: D, 1: B}),
        (visible("GPU-,1"), [0], [B], {0: B}),  # ambiguous: nothing is visible, but it holds on one alone
        (visible(""), [0, 1], [A, B], {}),
        (visible("1,1"), [0, 1], [A, B], {}),
        (visible("0"), [0], [], {}),
        (None, [0], [C], {0: C}),
        (None, [0, 1], [B, C], {}),
        (UNSET, [1], [A, C], {}),  # a job's device cgroup: either may be meant
        (UNSET, [0, 1], [B, D], {0: B, 1: D}),  # the same: the order tells
        (visible("1,0"), [0, 1], [C, D], {0: D, 1: C}),
    ],
)
def test_numbers_of_the_hosts_devices(
    settings: dict[str, str | None] | None, wanted: list[int], held: list[str], expected: dict[int, str]
) -> None:
    """A number means the device that CUDA chooses by the variables, if the process holds memory there."""
    told = dict.fromkeys(wanted, GIB)
    assert translate(told, dict.fromkeys(held, 2 * GIB), settings, HOST, apart=False) == expected


@pytest.mark.parametrize(
    ("settings", "wanted", "held", "expected"),
    [
        (UNSET, {0: GIB}, {C: GIB}, {0: C}),
        (UNSET, {0: GIB, 1: GIB}, {B: GIB, D: GIB}, {0: B, 1: D}),
        (visible("1,0"), {0: GIB, 1: GIB}, {B: GIB, D: GIB}, {0: D, 1: B}),
        (UNSET, {1: GIB}, {A: 2 * GIB, B: 2 * GIB}, {}),
        (UNSET, {1: GIB}, {A: MIB, B: 2 * GIB}, {1: B}),  # a stray context is too small to be meant
        (UNSET, {0: GIB, 1: GIB}, {B: 2 * GIB}, {}),  # more than it can hold: nothing of it counts
        (UNSET, {0: GIB}, {A: None, B: None}, {}),
        (visible("GPU-22"), {0: GIB}, {A: GIB, C: GIB}, {0: C}),
    ],
)
def test_numbers_of_a_containers_devices(
    settings: dict[str, str | None],
    wanted: dict[int, int],
    held: dict[str, int | None],
    expected: dict[int, str],
) -> None:
    """If the process sees fewer devices than we do, only its holdings can show which device it means."""
    assert translate(wanted, held, settings, HOST, apart=True) == expected


@pytest.mark.parametrize("order", [None, "FASTEST_FIRST"])
def test_the_fastest_device_first_is_not_ours_to_know(order: str | None) -> None:
    """Among different GPUs the default order is unknown, so that only the holdings show the device."""
    told = {0: 2 * GIB, 1: GIB}
    assert translate(told, {A: 2 * GIB, B: 3 * GIB}, visible(None, order), MIXED, apart=False) == {}
    assert translate(told, {A: GIB, B: 3 * GIB}, visible(None, order), MIXED, apart=False) == {0: B, 1: A}
    by_address = visible(None, "PCI_BUS_ID")
    assert translate(told, {A: 2 * GIB, B: 3 * GIB}, by_address, MIXED, apart=False) == {0: A, 1: B}


def test_mig_instances_by_their_names() -> None:
    """An instance is visible by its UUID, or certain because it is the only held one."""
    held = {"MIG-1": GIB, "MIG-2": GIB}
    assert translate({0: GIB}, held, visible("MIG-2"), MIG, apart=False) == {0: "MIG-2"}
    assert translate({0: GIB}, {"MIG-1": GIB}, UNSET, MIG, apart=False) == {0: "MIG-1"}
    assert translate({0: GIB}, held, UNSET, MIG, apart=False) == {}


def test_a_report_may_be_a_moment_ahead() -> None:
    """A little memory that was taken after NVML was read is not a contradiction; much memory is one."""
    assert translate({0: GIB + SLACK}, {A: GIB}, UNSET, HOST, apart=False) == {0: A}
    assert translate({0: GIB + SLACK + 1}, {A: GIB}, UNSET, HOST, apart=False) == {}


def test_an_empty_pool_is_nowhere() -> None:
    """A device on which a framework holds nothing needs no translation."""
    assert translate({0: 0, 1: GIB}, {B: GIB}, UNSET, HOST, apart=False) == {1: B}
