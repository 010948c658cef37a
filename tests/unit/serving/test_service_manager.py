"""A driver that comes after the unit: its devices are forbidden until the unit starts again."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from vramledger.readers.hosts.driver_watch import has_device_class, open_control_device
from vramledger.serving.service_manager import wait_for_forbidden_driver


def answers(*values: int) -> Callable[[], int]:
    """Return a function that gives these values, and the last one for ever."""
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


async def returned(classes: tuple[int, ...], opened: tuple[int, ...]) -> bool:
    """Tell whether the wait ends while the loop turns a hundred times."""
    has_class = answers(*classes)
    task = asyncio.create_task(wait_for_forbidden_driver(lambda: bool(has_class()), answers(*opened), 0.0))
    for _ in range(100):
        await asyncio.sleep(0)
    task.cancel()
    return task.done()


@pytest.mark.parametrize(
    ("classes", "opened", "expected"),
    [
        ((0, 0, 1), (errno.EPERM,), True),
        ((0, 1), (errno.ENOENT, errno.ENOENT, errno.EPERM), True),  # its file comes later than its class
        ((0, 1), (errno.EACCES, errno.EPERM), True),
        ((1,), (errno.EPERM,), False),  # a new start would change nothing
        ((0,), (errno.EPERM,), False),  # no driver has come
        ((0, 1), (0, errno.EPERM), False),  # it is allowed
        ((0, 1), (errno.ENXIO,), False),
        ((0, 1), (errno.EACCES,), False),  # the file's own mode forbids it
    ],
)
def test_a_restart_where_it_helps(classes: tuple[int, ...], opened: tuple[int, ...], expected: bool) -> None:
    """It ends for a class of devices that came after our start and is forbidden, and never in a circle."""
    assert asyncio.run(returned(classes, opened)) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n", True),
        ("195 nvidia-frontend\n", True),
        ("Character devices:\n  1 mem\n\nBlock devices:\n259 nvme\n", False),
        ("505 nvidia-uvm\n", False),
        ("", False),
    ],
)
def test_the_class_of_the_driver(tmp_path: Path, text: str, expected: bool) -> None:
    """The kernel's list names the class while the driver's module is loaded."""
    (tmp_path / "devices").write_text(text)
    assert has_device_class(tmp_path) is expected
    assert has_device_class(tmp_path / "nowhere") is False


def test_opening_the_control_device(tmp_path: Path) -> None:
    """The error is that of the kernel, and 0 says that the device is allowed."""
    (tmp_path / "there").touch()
    assert open_control_device(tmp_path / "there") == 0
    assert open_control_device(tmp_path / "missing") == errno.ENOENT
