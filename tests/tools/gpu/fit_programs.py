"""The programs that ``tests.tools.gpu.fit`` starts: ``python fit_programs.py NAME [hold]``.

Each does a piece of work with a known peak and prints a line. With ``hold`` it repeats its work at each line
on its standard input until that ends. ``FIT_CODE`` is a line of code that limits the framework.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

GIB = 2**30
MIB = 2**20
Work = Callable[[], float]


def torch_train() -> Work:
    """Train a network with AdamW and batches of several sizes, which leave gaps in the pool."""
    import torch

    if "fake" in torch.__version__:
        return lambda: torch.Tensor(GIB).nbytes
    exec(os.environ.get("FIT_CODE", ""), {"torch": torch})  # noqa: S102 the line that fit named
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def work() -> float:
        for batch in (4096, 1500, 8192, 700, 6000, 3000) * 4:
            optimizer.zero_grad()
            model(torch.randn(batch, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated())

    return work


def torch_duty() -> Work:
    """Have 9 GiB, and keep the GPU busy for about a quarter of the time; tells its rounds a second."""
    import torch

    if "fake" in torch.__version__:
        return lambda: torch.Tensor(GIB).nbytes
    exec(os.environ.get("FIT_CODE", ""), {"torch": torch})  # noqa: S102 the line that fit named
    kept = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(9)]
    large = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    moved = large @ large
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        moved = large @ large
    torch.cuda.synchronize()
    times = max(1, round(0.025 / ((time.perf_counter() - begun) / 10)))

    def work() -> float:
        nonlocal moved
        begun, rounds = time.perf_counter(), 0
        while time.perf_counter() - begun < 2.5 and kept:
            for _ in range(times):
                moved = large @ large
            torch.cuda.synchronize()
            rounds += 1
            time.sleep(0.075)
        return rounds / (time.perf_counter() - begun)

    return work


def jax_chain() -> Work:
    """Multiply matrices with a peak of some GiB; variables decide how JAX takes its memory."""
    import jax
    import jax.numpy as jnp

    @jax.jit  # type: ignore[untyped-decorator]
    def chain(given: jax.Array) -> jax.Array:
        made = [given @ (given + number) for number in range(4)]
        return sum(each.sum() for each in made) + jnp.linalg.norm(made[0] @ made[1])

    given = jnp.ones((12288, 12288)) / 12288

    def work() -> float:
        for _ in range(5):
            chain(given).block_until_ready()
        stats = jax.local_devices()[0].memory_stats() or {}
        return float(stats.get("peak_bytes_in_use", 0))

    return work


def cupy_chain() -> Work:
    """Multiply and sort arrays with a peak of some GiB."""
    import cupy  # type: ignore[import-not-found]

    def work() -> float:
        for _ in range(5):
            given = cupy.ones((12288, 12288), dtype=cupy.float32)
            made = given @ given
            made = cupy.sort(made + given, axis=1)
            cupy.cuda.Device().synchronize()
            del made, given
        return float(cupy.get_default_memory_pool().total_bytes())

    return work


PROGRAMS: dict[str, Callable[[], Work]] = {
    "torch": torch_train, "duty": torch_duty, "jax": jax_chain, "jax-growth": jax_chain, "cupy": cupy_chain,
}  # fmt: skip


def main() -> None:
    """Do the work, and tell it, or the error."""
    try:
        work = PROGRAMS[sys.argv[1]]()
        told: dict[str, object] = {"told": work()}
    except Exception as error:  # noqa: BLE001 frameworks have errors of their own
        told = {"error": type(error).__name__, "message": str(error)[:300]}
    print(json.dumps(told), flush=True)
    while "hold" in sys.argv and "error" not in told and sys.stdin.readline():
        print(json.dumps({"told": work()}), flush=True)


if __name__ == "__main__":
    main()
