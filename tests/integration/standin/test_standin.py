"""The stand-in driver: what programs and tests can rely on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.standin.library import GIB, StandIn
from vramledger.errors import DriverError
from vramledger.readers.nvml.driver import Driver


def test_a_child_process_gets_the_stand_in_from_its_environment(standin: StandIn) -> None:
    """With LD_LIBRARY_PATH and the state file's name any program reads the stand-in's current state."""
    standin.device(0).set_processes([(4321, GIB)])
    program = (
        "from vramledger.readers.nvml.driver import Driver\n"
        "(reader,) = Driver.open().readers(frozenset())\n"
        "print(reader.read(0.0, 0.0)[0].processes[0].pid)\n"
    )
    environment = {**os.environ, **standin.env(), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "4321\n"


def test_a_state_file_of_another_layout_is_refused(
    standin_here: StandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stand-in refuses a state file that it does not understand."""
    standin_here.state.version += 1
    with pytest.raises(DriverError):
        Driver.open()
    assert "is no state file of this build" in capfd.readouterr().err
