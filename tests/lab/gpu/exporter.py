"""The agent and the exporter together on a GPU: ``python -m tests.lab.gpu.exporter OUT``.

Writes ``OUT/agents.jsonl.gz``, the masked recording of four programs with the agent inside that
``tests/recordings`` replays, and says for eight ways of choosing devices whether every figure was assigned to
the right GPU (two GPUs needed). About a minute.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.server import AgentServer, run_agent_server
from vramledger.config import SamplingConfig
from vramledger.model.reading import Reading, encode
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.masking import Mask
from vramledger.sampling.replay import encode_header
from vramledger.sampling.supervisor import Supervisor

GIB = 2**30
SECONDS = 21.0
IDLE_AFTER = 6.0
NOTE = "torch training, a torch cache, a failed allocation and JAX, each with the agent inside"

RECORDED = {
    "train": """
import torch, time, sys
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
end = time.time() + float(sys.argv[1])
while time.time() < end:
    model(torch.randn(256, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""",
    "cache": """
import torch, time, sys
keep = torch.empty(2**30, dtype=torch.uint8, device="cuda")
gone = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(20)]
del gone
time.sleep(float(sys.argv[1]))
""",
    "oom": """
import torch, time, sys
keep = torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")
time.sleep(3)
try:
    torch.empty(200 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
time.sleep(float(sys.argv[1]) - 3)
""",
    "jax": """
import jax.numpy as jnp, time, sys
x = jnp.ones((1024, 1024))
(x @ x).block_until_ready()
time.sleep(float(sys.argv[1]))
""",
}

CHOOSING = """
import torch, time, sys
keep = [
    torch.empty(int(gib) * 2**30, dtype=torch.uint8, device=f"cuda:{ordinal}")
    for ordinal, gib in enumerate(sys.argv[2:]) if int(gib)
]
time.sleep(float(sys.argv[1]))
"""


class Choice(NamedTuple):
    """``CUDA_VISIBLE_DEVICES``, the GiB on each of torch's devices, and where they must be by index."""

    visible: str | None
    gib: tuple[int, ...]
    expected: Mapping[int, int]


def choices(first: str, second: str) -> dict[str, Choice]:
    """Return the ways to choose devices, for two GPUs of these UUIDs."""
    return {
        "nothing set": Choice(None, (2, 5), {0: 2, 1: 5}),
        "the second alone used": Choice(None, (0, 5), {1: 5}),
        "1": Choice("1", (3,), {1: 3}),
        "1,0": Choice("1,0", (3, 4), {1: 3, 0: 4}),
        "cut at -1": Choice("1,-1,0", (3,), {1: 3}),
        "a UUID": Choice(second, (3,), {1: 3}),
        "the beginning of one": Choice(second[:10], (3,), {1: 3}),
        "two UUIDs": Choice(f"{second},{first}", (3, 6), {1: 3, 0: 6}),
    }


def start(home: Path, name: str, code: str, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
    """Start a program with the agent inside, for some seconds."""
    path = home / f"program-{name.replace(' ', '-')}.py"  # jax.py would import itself
    path.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "vramledger", "run", "--", sys.executable, str(path), str(SECONDS + 2)]
    inherited = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return subprocess.Popen([*command, *arguments], env={**inherited, **environ}, stdout=subprocess.DEVNULL)


@asynccontextmanager
async def listener(home: Path) -> AsyncIterator[tuple[AgentServer, str]]:
    """Listen for agents; yields the address too."""
    blank = Snapshot()
    path = home / "agent.sock"
    async with run_agent_server(path, Path("/proc"), lambda: blank) as heard:
        yield heard, str(path)


async def readings(heard: AgentServer) -> AsyncIterator[Reading]:
    """Yield readings with the agents' reports, for :data:`SECONDS`."""
    begun = time.monotonic()
    async with aclosing(Supervisor(SamplingConfig()).readings()) as read:  # type: ignore[type-var]
        async for reading in read:
            if reading is not None:
                yield await heard.add_agents(reading)
            if time.monotonic() - begun > SECONDS:
                return


async def record(home: Path, out: Path) -> None:
    """Write the masked recording of the four programs."""
    mask = Mask()
    async with listener(home) as (heard, socket):
        environ = {"VRAMLEDGER_AGENT_SOCKET": socket, "XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}
        programs = [start(home, name, code, **environ) for name, code in RECORDED.items()]
        with gzip.open(out / "agents.jsonl.gz", "wb") as file:
            file.write(encode_header(NOTE, IDLE_AFTER))
            async with aclosing(readings(heard)) as read:  # type: ignore[type-var]
                async for reading in read:
                    file.write(encode(mask.mask_reading(reading)))
        for program in programs:
            program.terminate()


def gpus() -> list[str]:
    """Return the UUIDs of this host's GPUs, in the driver's order."""
    listed = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    return [line.split("UUID: ")[1].rstrip(")") for line in listed.splitlines()]


async def choose(home: Path, uuids: list[str]) -> int:
    """Print whether each way to choose a GPU has its figures on the right one; return how many have not."""
    tracker, last, wrong = HoldingTracker(idle_after=60.0), Snapshot(), 0
    ways = choices(*uuids[:2])
    async with listener(home) as (heard, socket):
        programs = {}
        for name, way in ways.items():
            environ = {} if way.visible is None else {"CUDA_VISIBLE_DEVICES": way.visible}
            arguments = map(str, way.gib)
            programs[name] = start(
                home, name, CHOOSING, *arguments, VRAMLEDGER_AGENT_SOCKET=socket, **environ
            )
        async with aclosing(readings(heard)) as read:  # type: ignore[type-var]
            async for reading in read:
                last = tracker.update(reading)
        for name, program in programs.items():
            program.terminate()
            agent = last.agents.get(program.pid)
            told = {
                uuids.index(uuid): pool.figures["allocated"] / GIB
                for uuid, pools in ({} if agent is None else agent.pools).items()
                for pool in pools
            }
            right = told == ways[name].expected
            wrong += not right
            print(f"{'PASS' if right else 'FAIL'} {name}: {told}, expected {ways[name].expected}")
    return wrong


def main() -> None:
    """Do both."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(record(Path(home), out))
        sys.exit(1 if asyncio.run(choose(Path(home), gpus())) else 0)


if __name__ == "__main__":
    main()
