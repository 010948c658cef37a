"""The programs that ``tests.tools.gpu.jobs`` starts, one function each: ranks, kernels, programs in turns.

Each writes down what it does, by the monotonic clock, in the file that ``VRAMLEDGER_TRUTH`` names. Where
``VRAMLEDGER_REHEARSAL`` is set they go through the motions without a GPU.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tools.recordings.programs import cue, gpu

MIB = 2**20
WIDTH, LAYERS, BATCH = 4096, 4, 512


def note(event: str, **facts: object) -> None:
    """Write down what happens now."""
    line = {"t": time.monotonic(), "pid": os.getpid(), "name": os.environ.get("VRAMLEDGER_NAME", "")}
    text = json.dumps({**line, "event": event, **facts}) + "\n"
    descriptor = os.open(os.environ["VRAMLEDGER_TRUTH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def asked(what: str) -> bool:
    """Tell whether the bench has said that something shall happen."""
    return Path(os.environ["VRAMLEDGER_CUES"], what).exists()


class FakeJob:
    """The motions of a rank without a GPU."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.card = gpu.open_gpu(self.rank)
        self.card.hold(gpu.GIB)

    def step(self) -> None:
        """Work for a moment."""
        self.card.work(0.05)

    def wait_elsewhere(self) -> None:
        """Wait for ever."""
        cue.wait()

    def leave(self) -> None:
        """Leave the job."""

    def save(self, path: Path) -> int:
        """Write a little."""
        path.write_bytes(bytes(MIB))
        return MIB


class RealJob:
    """A rank of a distributed training with PyTorch and NCCL."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        torch, self.rank = self.torch, int(os.environ["RANK"])
        torch.cuda.set_device(self.rank)
        self.dist: Any = importlib.import_module("torch.distributed")
        self.dist.init_process_group("nccl")
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.other = self.dist.new_group([0, 1])
        self.small = torch.ones(MIB, device="cuda")
        self.dist.all_reduce(self.small, group=self.other)
        torch.cuda.synchronize()

    def step(self) -> None:
        """Train one step, and wait until it is done."""
        self.optimizer.zero_grad()
        given = self.torch.randn(BATCH, WIDTH, device="cuda")
        loss = self.model(given).square().mean()
        loss.backward()
        self.optimizer.step()
        loss.item()

    def wait_elsewhere(self) -> None:
        """Take part in another collective than the other rank: both wait for ever."""
        self.dist.all_reduce(self.small, group=self.other)
        self.torch.cuda.synchronize()

    def leave(self) -> None:
        """Leave the job as a program does that is done."""
        self.dist.destroy_process_group()

    def save(self, path: Path) -> int:
        """Save a checkpoint of 4 GiB, and wait for the disk."""
        block = self.torch.empty(4 * gpu.GIB, dtype=self.torch.uint8, device="cuda")
        with path.open("wb") as file:
            self.torch.save({"model": self.model.state_dict(), "more": block}, file)
            file.flush()
            os.fsync(file.fileno())
        size = path.stat().st_size
        path.unlink()
        return size


def open_job() -> Any:  # noqa: ANN401 either of the two
    """Join the job."""
    job = FakeJob() if gpu.rehearsing() else RealJob()
    job.step()
    note("ready", rank=job.rank)
    return job


def train(job: Any, seconds: float) -> None:  # noqa: ANN401
    """Train for so long; the ranks agree on the number of steps by the first one's clock."""
    begun, steps = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        job.step()
        steps += 1
    note("trained", steps=steps)


def hang(case: str) -> None:
    """Train until the bench asks the second rank to leave, or to wait elsewhere."""
    job = open_job()
    told, steps = time.monotonic(), 0
    while True:
        job.step()
        steps += 1
        if time.monotonic() - told > 1:
            note("step", steps=steps)
            told = time.monotonic()
        if job.rank == 1 and asked("go"):
            if case == "exit":
                note("leaves")
                job.leave()
                note("ends")
                return
            if case == "deadlock":
                note("waits elsewhere")
                job.wait_elsewhere()


WAITS = ("checkpoint", "short", "loader", "short")


def waits() -> None:
    """Train; between it the first rank saves checkpoints, or waits for its data, as real programs do."""
    job = open_job()
    real = not gpu.rehearsing()
    for what in WAITS:
        for _ in range(300 if real else 3):
            job.step()
        note("trained")
        if job.rank:
            job.step()  # waits here for the other one
            note("went on", after=what)
            continue
        note("begins", what=what)
        written = 0
        if what == "checkpoint":
            begun = time.monotonic()
            while time.monotonic() - begun < (25 if real else 1):
                written += job.save(Path(os.environ["VRAMLEDGER_CUES"], "checkpoint"))
        elif what == "loader":
            stall(30 if real else 1)
        else:
            time.sleep(4 if real else 1)
        note("ends", what=what, bytes=written)
        job.step()
    note("done")
    cue.wait()


def stall(seconds: float) -> None:
    """Wait for a data loader whose worker reads from a slow disk."""
    if gpu.rehearsing():
        time.sleep(seconds)
        return
    data: Any = importlib.import_module("torch.utils.data")
    next(iter(data.DataLoader(SlowData(seconds), batch_size=1, num_workers=2)))


class SlowData:
    """A data set whose items take so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 2

    def __getitem__(self, item: int) -> int:
        time.sleep(self.seconds)
        return item


KERNELS = {
    # Blocks, threads, body of a loop: v and w are integers, x and y floats, data 16 MiB, s shared memory.
    "spin-thread": (1, 1, ""),
    "spin-all": (264, 256, ""),
    "sleep-thread": (1, 1, "__nanosleep(1000);"),
    "read-host": (1, 1, "v += *flag;"),
    "fma-thread": (1, 1, "x = x * 1.0001f + y; y = y * 0.999f + x;"),
    "fma-block": (1, 256, "x = x * 1.0001f + y; y = y * 0.999f + x;"),
    "hash-thread": (1, 1, "v ^= v << 13; v ^= v >> 17; v ^= v << 5;"),
    "hash-block": (1, 256, "v ^= v << 13; v ^= v >> 17; v ^= v << 5; w += v * 2654435761u;"),
    "chase-warp": (1, 32, "v = data[v & 4194303];"),
    "read-cache": (264, 256, "v += data[(v + threadIdx.x + blockIdx.x * 256) & 4194303];"),
    "shared-block": (1, 256, "s[(v + threadIdx.x) & 255] += v; v = s[(v * 7) & 255];"),
    "atomics": (132, 128, "atomicAdd(&data[v & 15], 1u); v++;"),
    "sine-block": (1, 256, "x = __sinf(x) + y;"),
    "half-block": (1, 256, "__half2 h = __float2half2_rn(x); h = __hfma2(h, h, h); x = __low2float(h) + y;"),
}

_SOURCE = """
%s
extern "C" __global__ void work(unsigned *data, volatile unsigned *flag, unsigned long long ns) {
    __shared__ unsigned s[256];
    unsigned v = threadIdx.x + 1, w = 1;
    float x = v, y = 0.5f;
    unsigned long long begun, now;
    s[threadIdx.x & 255] = v;
    asm volatile("mov.u64 %%0, %%%%globaltimer;" : "=l"(begun));
    do {
        for (int i = 0; i < 256; i++) { %s }
        asm volatile("mov.u64 %%0, %%%%globaltimer;" : "=l"(now));
    } while (now - begun < ns);
    if (v + w + x + y == 12345.678f) data[0] = v;
}
"""


def kernels(device: str, seconds: str, *names: str) -> None:
    """Run persistent kernels, one after the other, each for so many seconds, with a second between them."""
    span = float(seconds)
    if gpu.rehearsing():
        card = gpu.open_gpu(int(device))
        note("ready")
        for name in names:
            note("begins", kernel=name)
            card.work(1)
            note("ends", kernel=name)
        return
    cupy: Any = importlib.import_module("cupy")
    cupy.cuda.Device(int(device)).use()
    data = cupy.arange(4 * MIB, dtype=cupy.uint32) * cupy.uint32(2654435761)
    place = cupy.cuda.alloc_pinned_memory(64)
    flag = int(place.ptr)
    compiled: dict[str, Any] = {}
    for name in names:
        try:
            half = name.startswith("half")
            options = ("--std=c++17", *(f"-I{each}" for each in includes() if half))
            code = _SOURCE % ("#include <cuda_fp16.h>" if half else "", KERNELS[name][2])
            module = cupy.RawModule(code=code, options=options)
            compiled[name] = module.get_function("work")
        except Exception as error:  # noqa: BLE001 one that fails must not stop the others
            note("failed", kernel=name, error=str(error)[-500:])
    note("ready")
    time.sleep(2)
    for name, kernel in compiled.items():
        blocks, threads, _ = KERNELS[name]
        note("begins", kernel=name)
        kernel((blocks,), (threads,), (data, cupy.uint64(flag), cupy.uint64(int(span * 1e9))))
        cupy.cuda.Device().synchronize()
        note("ends", kernel=name)
        time.sleep(1.2)
    note("done")
    cue.wait()


def includes() -> Iterator[str]:
    """Return where the headers of CUDA may be."""
    for each in (
        os.environ.get("CUDA_HOME", ""),
        "/usr/local/cuda",
        *map(str, Path("/usr/local").glob("cuda-*")),
    ):
        if each and Path(each, "include", "cuda_fp16.h").exists():
            yield str(Path(each, "include"))
    for entry in sys.path:
        for found in Path(entry or ".").glob("nvidia/*/include/cuda_fp16.h"):
            yield str(found.parent)


def turns(device: str, begin: str, length: str, period: str) -> None:
    """Work for ``length`` seconds from ``begin`` in each period of the clock, and do nothing in the rest."""
    card = gpu.open_gpu(int(device), "torch")
    card.work(0.1)
    note("ready")
    while True:
        wait = (float(begin) - time.monotonic()) % float(period)
        time.sleep(wait)
        note("begins")
        card.work(float(length))
        note("ends")
        time.sleep(0.2)


def idle(device: str, kind: str) -> None:
    """Make a context and do nothing on the GPU, in one of the ways in which programs do nothing."""
    real = not gpu.rehearsing()
    kept: Any = None
    if real and kind in {"jax", "cupy"}:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".1"
        module: Any = importlib.import_module("jax.numpy" if kind == "jax" else "cupy")
        kept = module.ones((1024, 1024))
        kept = kept + kept
        float(kept[0, 0])
    else:
        kept = gpu.open_gpu(int(device), "cuda" if kind == "bare" else "torch")
        kept.work(0.1)
    note("ready", kind=kind)
    if kind == "spin":
        while True:
            pass
    if kind == "threads":
        _poll_threads()
    if kind == "loader":
        while True:  # prepares data that nobody asks for yet, with varying effort
            until = time.monotonic() + random.random() * 0.1  # noqa: S311 no secret
            while time.monotonic() < until:
                pass
            time.sleep(0.05)
    if kind in {"server", "notebook"}:
        asyncio.run(_serve(1.0 if kind == "notebook" else 0.05))
    cue.wait()
    del kept


def _poll_threads() -> None:
    """Poll a queue in four threads, as inference servers without requests do."""
    import queue
    import threading

    empty: queue.Queue[None] = queue.Queue()

    def poll() -> None:
        while True:
            try:
                empty.get(timeout=0.005)
            except queue.Empty:
                continue

    for _ in range(4):
        threading.Thread(target=poll, daemon=True).start()
    cue.wait()


async def _serve(beat: float) -> None:
    """Listen, and wake up at a steady pace, as a server or a notebook does that nobody asks anything."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        while True:  # noqa: ASYNC110 it shall wake up
            await asyncio.sleep(beat)


def symmetric() -> None:
    """Share memory with the other rank, which maps it: torch's symmetric memory."""
    job = open_job()
    if not gpu.rehearsing():
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        block = memory.empty(2 * gpu.GIB, dtype=job.torch.uint8, device=f"cuda:{job.rank}")
        handle = memory.rendezvous(block, job.dist.group.WORLD)
        block.fill_(job.rank + 1)
        job.torch.cuda.synchronize()
        job.dist.barrier()
        there = handle.get_buffer(1 - job.rank, (16,), job.torch.uint8)
        note("shared", there=int(there[0]), bytes=2 * gpu.GIB)
    else:
        note("shared")
    cue.wait()


def peer() -> None:
    """Copy from one GPU to the other, without any kernel."""
    if gpu.rehearsing():
        gpu.open_gpu(0).work(2)
        note("ready")
        return
    torch: Any = importlib.import_module("torch")
    here = torch.ones(gpu.GIB, dtype=torch.uint8, device="cuda:0")
    there = torch.ones(gpu.GIB, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    note("ready")
    time.sleep(8)
    for direction, (source, target) in {"0 to 1": (here, there), "1 to 0": (there, here)}.items():
        note("begins", what=f"copies from GPU {direction}")
        begun, count = time.monotonic(), 0
        while time.monotonic() - begun < 6:
            for _ in range(20):
                target.copy_(source, non_blocking=True)
                count += 1
            torch.cuda.synchronize(source.device)
        note("ends", what=f"copies from GPU {direction}", gib=count)
        time.sleep(3)
    cue.wait()


def video(device: str) -> None:
    """Decode H.264 and then JPEG pictures with the GPU's own decoders, as far as they are available."""
    if gpu.rehearsing():
        note("ready")
        return
    from tests.tools.gpu import video as decoders

    note("libraries", found=decoders.libraries())
    for name, open_decoder in decoders.DECODERS.items():
        try:
            decode = open_decoder(int(device))
            decode()
            note("opened", what=name)
            time.sleep(3)
            note("begins", what=name)
            begun, count = time.monotonic(), 0
            while time.monotonic() - begun < 8:
                count += decode()
            note("stops", what=name, pictures=count)
        except Exception as error:  # noqa: BLE001 one that fails must not stop the other
            note("failed", what=name, error=repr(error)[-800:])
    note("done")
    cue.wait()


if __name__ == "__main__":
    cue.enter()
    try:
        globals()[sys.argv[1]](*sys.argv[2:])
    except BaseException as problem:
        note("ended", by=repr(problem)[-800:])
        raise
