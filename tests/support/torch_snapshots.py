"""Snapshots as PyTorch writes them: with the structure that ``torch.cuda.memory._snapshot`` documents."""

from typing import Any

MIB = 2**20
Frames = list[dict[str, Any]]

TORCH = "/venv/lib/python3.12/site-packages/torch"
LINEAR: Frames = [
    {"filename": f"{TORCH}/nn/functional.py", "line": 2291, "name": "linear"},
    {"filename": f"{TORCH}/nn/modules/linear.py", "line": 134, "name": "forward"},
    {"filename": f"{TORCH}/nn/modules/module.py", "line": 1775, "name": "_call_impl"},
]
"""The frames inside a linear layer, innermost first."""


def user(*lines: tuple[str, int, str]) -> Frames:
    """Return the frames of a program's own lines, innermost first."""
    return [{"filename": filename, "line": line, "name": name} for filename, line, name in lines]


FORWARD = ("/home/ann/train/model.py", 41, "forward")
HEAD = ("/home/ann/train/model.py", 42, "forward")
EVALUATE = ("/home/ann/train/train.py", 77, "evaluate")
STEP = ("/home/ann/train/train.py", 52, "step")
MAIN = ("/home/ann/train/train.py", 99, "<module>")


class Heap:
    """An allocator that gets calls from a test, and writes a snapshot of them."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, Frames]] = {}
        self.trace: list[dict[str, Any]] = []
        self.now = 1_700_000_000_000_000
        self.free = 0x7F0000000000

    def allocate(self, size: int, frames: Frames, *, recorded: bool = True) -> int:
        """Allocate, a millisecond after the last call; return the address."""
        address, self.free, self.now = self.free, self.free + size, self.now + 1000
        self.blocks[address] = (size, frames if recorded else [])
        if recorded:
            self.trace.append(self._event("alloc", address, size, frames))
        return address

    def release(self, address: int) -> None:
        size, frames = self.blocks.pop(address)
        self.now += 1000
        self.trace.append(self._event("free_requested", address, size, frames))
        self.trace.append(self._event("free_completed", address, size, frames))

    def _event(self, action: str, address: int, size: int, frames: Frames) -> dict[str, Any]:
        return {
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": self.now,
            "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0), "frames": frames,
        }  # fmt: skip

    def snapshot(self, *, device: int = 0, unused: int = 32 * MIB) -> dict[str, Any]:
        """Return the snapshot: one segment with the live blocks and one free block after them."""
        used = sum(size for size, _ in self.blocks.values())
        blocks = [
            {
                "address": address, "size": size, "requested_size": size, "state": "active_allocated",
                "frames": frames,
            }
            for address, (size, frames) in sorted(self.blocks.items())
        ]  # fmt: skip
        free = {"address": self.free, "size": unused, "requested_size": 0, "state": "inactive", "frames": []}
        segment = {
            "device": device, "address": 0x7F0000000000, "total_size": used + unused, "allocated_size": used,
            "active_size": used, "requested_size": used, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": [*blocks, free],
        }  # fmt: skip
        return {
            "segments": [segment],
            "device_traces": [[] for _ in range(device)] + [self.trace],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1},
            "external_annotations": [],
        }


def training(evaluations: int) -> dict[str, Any]:
    """Return the snapshot of a training that keeps the outputs of its evaluations with their graphs."""
    heap = Heap()
    heap.allocate(256 * MIB, [], recorded=False)  # the model, from before the recording
    for _ in range(evaluations):
        held = [heap.allocate(4 * MIB, LINEAR + user(FORWARD, STEP, MAIN)) for _ in range(3)]
        for address in held:
            heap.release(address)
        heap.allocate(8 * MIB, LINEAR + user(FORWARD, EVALUATE, MAIN))
        heap.allocate(6 * MIB, LINEAR + user(HEAD, EVALUATE, MAIN))
        heap.allocate(1 * MIB, LINEAR + user(EVALUATE, MAIN))
    return heap.snapshot()
