"""The programs that ``tests.tools.gpu.flight`` starts, one function each, with a recording from the start.

They run under the machine's own torch, or, to rehearse them, under the one of
``tests/support/frameworks/standin``. Each ends with an allocation that fails.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FAKE = "fake" in torch.__version__
GIB = 2**30
MIB = 2**20
LIMIT = 6 * GIB
"""What a program may take, so that several of them run side by side."""

WIDTH, LAYERS = 2048, 8
Facts = dict[str, Any]


def tell(**facts: object) -> None:
    """Print a line of facts for the program that started us."""
    print(json.dumps(facts), flush=True)


class RealTraining:
    """A network of linear layers with AdamW, in the machine's own torch."""

    def __init__(self, *, clear: bool = True, mixed: bool = False) -> None:
        self.clear = clear
        self.mixed = mixed
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMIT / total)
        self.model = build_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.peaks: dict[str, int] = {}

    def step(self, batch: int) -> None:
        """Train one step, and keep torch's own peaks of its parts, in requested bytes."""
        self.peaks = {}
        if self.clear:
            self.optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss = self.forward(batch)
        self._keep_peak("forward")
        loss.backward()
        self._keep_peak("backward")
        self.optimizer.step()
        self._keep_peak("optimizer")

    def forward(self, batch: int) -> Any:  # noqa: ANN401 a tensor
        """Return the loss of a batch."""
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.mixed):
            given = torch.randn(batch, WIDTH, device="cuda")
            return self.model(given).float().pow(2).mean()

    def _keep_peak(self, part: str) -> None:
        self.peaks[part] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        torch.cuda.reset_peak_memory_stats()

    def fail(self) -> str | None:
        """Fail to allocate; return the exception's name."""
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.mixed):
                allocate_too_much(lambda: torch.empty(2 * LIMIT, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError as error:
            return type(error).__name__
        return None

    def tensors(self) -> Facts:
        """Return the tensors' own bytes by category."""
        parameters = list(self.model.parameters())
        return {
            "parameters": sum(each.nbytes for each in parameters),
            "gradients": sum(each.grad.nbytes for each in parameters if each.grad is not None),
            "optimizer": sum(
                value.nbytes
                for state in self.optimizer.state.values()
                for value in state.values()
                if value.device.type == "cuda"
            ),
        }


def build_model() -> Any:  # noqa: ANN401 a module
    """Return the network: this function's line holds the parameters."""
    layers = [module for _ in range(LAYERS) for module in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers).cuda()


def allocate_too_much(allocate: Callable[[], object]) -> None:
    """Fail: this function is on the failing stack."""
    allocate()


class FakeTraining:
    """The same motions with the torch that holds no GPU."""

    def __init__(self, *, clear: bool = True, mixed: bool = False) -> None:
        self.clear = clear
        self.type = torch.bfloat16 if mixed else torch.float32
        torch.autocast = self.type if mixed else None
        self.parameters = [torch.Tensor(MIB) for _ in range(LAYERS)]
        self.optimizer = torch.optim.Adam(self.parameters)
        self.peaks: dict[str, int] = {}

    def step(self, batch: int) -> None:
        """Train one step."""
        if self.clear:
            self.optimizer.zero_grad()
        loss = self.forward(batch)
        torch.backward(self.parameters)
        self.optimizer.step()
        del loss

    def forward(self, batch: int) -> Any:  # noqa: ANN401 some tensors
        """Return the activations of a batch."""
        node = torch.Node("MmBackward0", self.type, (batch, WIDTH))
        made = [torch.Tensor(batch * WIDTH * self.type.itemsize, dtype=self.type) for _ in range(LAYERS)]
        made[-1].grad_fn = torch.Node("ReluBackward0", self.type, (batch, WIDTH), node)
        return made

    def fail(self) -> str | None:
        """Fail to allocate; return the exception's name."""
        try:
            allocate_too_much(lambda: torch.Tensor(1000 * GIB))
        except torch._C.OutOfMemoryError as error:
            return type(error).__name__
        return None

    def tensors(self) -> Facts:
        """Return nothing: there is nothing to compare."""
        return {}


Training = FakeTraining if FAKE else RealTraining


def wait_for_agent() -> None:
    """Wait until failures are reported."""
    from vramledger.agent.oom import handler

    deadline = time.monotonic() + 30
    while not handler.observer.attached and time.monotonic() < deadline:
        time.sleep(0.01)


def finish(training: Any, **facts: object) -> None:  # noqa: ANN401 either of the two
    """Fail, and tell the facts."""
    from vramledger.agent.worker import worker

    tensors, peaks = training.tensors(), training.peaks
    tell(exception=training.fail(), tensors=tensors, peaks=peaks, errors=worker.errors, **facts)


def train(clear: str, mixed: str) -> None:
    """Train some steps, then fail between two of them."""
    training = Training(clear=clear == "clear", mixed=mixed == "mixed")
    wait_for_agent()
    for _ in range(5):
        training.step(4096)
    kept = training.forward(1024)
    finish(training)
    del kept


def batch() -> None:
    """Train with two sizes of batches, fail with a large one, and try the size that the report names."""
    training = Training()
    wait_for_agent()
    for size in (2048, 2048, 4096, 4096):
        training.step(size)
    large = 90_000
    failed = None
    try:
        training.step(large)
    except RuntimeError as error:
        failed = type(error).__name__
        del error
    training.optimizer.zero_grad()
    gc.collect()
    report = newest_report()
    fits = (report.get("flight") or {}).get("fitting_batch")
    outcome = {}
    if fits is not None and not FAKE:
        for name, share in (("beside the cache of the failed one", 1.0), ("1.0", 1.0), ("1.25", 1.25)):
            outcome[name] = _try_batch(training, int(fits * share))
            torch.cuda.empty_cache()
    tell(exception=failed, fits=fits, outcome=outcome, large=large)


def _try_batch(training: Any, size: int) -> str:  # noqa: ANN401 real or fake
    """Train one step, and say whether it fits."""
    try:
        training.step(size)
        fits = "fits"
    except RuntimeError:
        fits = "does not fit"
    training.optimizer.zero_grad()
    gc.collect()
    return fits


def newest_report() -> Facts:
    """Return the newest report of this process."""
    directory = Path(os.environ["VRAMLEDGER_AGENT_REPORTS"])
    paths = sorted(directory.glob(f"oom-*-{os.getpid()}-*.json"))
    return json.loads(paths[-1].read_text()) if paths else {}


def backward() -> None:
    """Fail in the backward pass, on autograd's own thread."""
    training = Training()
    wait_for_agent()
    if FAKE:
        finish(training)
        return
    training.step(64)
    given = torch.zeros(GIB, dtype=torch.uint8, device="cuda").view(torch.float32).requires_grad_()
    held = [torch.empty(LIMIT - 3 * GIB - 100 * MIB, dtype=torch.uint8, device="cuda")]
    exception = None
    try:
        start_backward((given * given).sum())
    except torch.OutOfMemoryError as error:
        exception = type(error).__name__
    tell(exception=exception, held=len(held))


def start_backward(loss: Any) -> None:  # noqa: ANN401 a tensor
    """Start the backward pass: this function waits for it."""
    loss.backward()


def cycles() -> None:
    """Make reference cycles with tensors, and ask which lines made them."""
    from vramledger.agent.torch.cycles import collect_cycles

    training = Training()
    wait_for_agent()
    training.step(1024)
    gc.collect()
    gc.disable()
    for _ in range(4):
        make_cycle(100 * MIB)
    tell(found=collect_cycles(torch)["cycles"], again=collect_cycles(torch)["cycles"])


class Node:
    """An object that refers to itself."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.Tensor(size) if FAKE else torch.empty(size, dtype=torch.uint8, device="cuda")
        self.hook = lambda: self


def make_cycle(size: int) -> None:
    """Make one cycle, and forget it."""
    Node(size)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
