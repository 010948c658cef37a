"""A torch program that is recorded: its beginning, what it asks for itself, and what it reports."""

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.support import listening
from vramledger_agent.protocol.messages import CATEGORIES

MIB = 2**20


BEGINNING = """
import sys, time, torch
M = 2**20
def make_model():
    return [torch.Tensor(M) for _ in range(3)]
model = make_model()
from vramledger_agent.oom import handler
from vramledger_agent.worker import worker
while not handler.observer.attached:
    time.sleep(0.01)
optimizer = torch.optim.Adam(model)

def forward(batch):
    parameter = torch.Node("torch::autograd::AccumulateGrad", torch.float32, (4, 512))
    weight = torch.Node("TBackward0", torch.float32, (4, 512), parameter)
    node = parameter
    for number in range(3):
        node = torch.Node(f"AddmmBackward{number}", torch.bfloat16, (batch, 512), node, weight)
    activations = [torch.Tensor(batch * M // 4, dtype=torch.bfloat16) for _ in range(4)]
    activations[-1].grad_fn = node
    return activations

def step(batch=8, clear=True):
    if clear:
        optimizer.zero_grad()
    loss = forward(batch)
    torch.backward(model)
    optimizer.step()

def fail(size=2**40):
    try:
        torch.Tensor(size)
    except torch._C.OutOfMemoryError:
        print("failed")
"""

FROM_START = {"VRAMLEDGER_AGENT_SNAPSHOT_FROM_START": "1"}
CONSENT = {"VRAMLEDGER_AGENT_CONSENT": "snapshot"}


def run(place: Path, code: str, *, before: str = "", **variables: str) -> str:
    """Run a program to its end, with a line before its beginning; return its output."""
    program = f"import torch\n{before}\n{BEGINNING}{textwrap.dedent(code)}\n"
    return listening.run(place, program + "assert worker.errors == {}, worker.errors\n", **variables)


def reports(place: Path) -> list[dict[str, Any]]:
    """Return the reports that a program wrote, the oldest first."""
    return [json.loads(path.read_text()) for path in sorted((place / "reports").glob("*.json"))]


def peak(**held: int) -> dict[str, Any]:
    """Return a peak as reports have it, from MiB by category."""
    categories = {name: held.get(name, 0) * MIB for name in CATEGORIES}
    return {"bytes": sum(categories.values()), "categories": categories}


REQUEST = """
import tempfile, threading
from vramledger_agent.requests import Request
from vramledger_agent.torch import memory_history
from vramledger_agent import step_boundary

def request(work, **arguments):
    "Ask for a snapshot on a thread of its own, and run the program's work until the answer."
    answers = []
    with open(PATH, "wb") as file:
        def ask():
            try:
                asked = Request("snapshot", arguments, [file.fileno()], 0)
                answers.append(memory_history.record_snapshot(asked))
            except Exception as error:
                answers.append(error)
        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            work()
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer["history"]
"""
