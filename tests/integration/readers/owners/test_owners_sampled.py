"""Owners in the sampler's own output, with the stand-in driver and a real holder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.players.stage import Stage
from tests.support.standin.library import MIB, StandIn, build
from vramledger.config import SamplingConfig
from vramledger.model.reading_json import decode
from vramledger.sampling.protocol import encode_config


def test_names_come_with_the_holders_first_sample(tmp_path: Path, stage: Stage) -> None:
    """The first sample that lists a new holder also has its owner."""
    config = SamplingConfig()
    command = [sys.executable, "-m", "vramledger.sampling.sampler", encode_config(config)]
    root = Path(__file__).resolve().parents[4]
    pid = stage.start(env={"JPY_SESSION_NAME": "/home/ada/gan.ipynb"}).pid
    with StandIn(tmp_path, build(tmp_path)) as standin:
        standin.device(0).set_processes([(pid, 500 * MIB)])
        environment = {**os.environ, **standin.env(), "PYTHONPATH": str(root / "exporter")}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as sampler:
            assert sampler.stdout is not None
            reading = decode(sampler.stdout.readline())
            sampler.kill()

    (facts,) = reading.facts
    assert facts.pid == pid
    assert facts.owner is not None
    assert facts.owner.notebook == "/home/ada/gan.ipynb"
    assert reading.ended == {}
