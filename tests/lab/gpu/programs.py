"""The programs that ``tests.lab.gpu.agent`` starts, under the real torch or the stand-in."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

FAKE = "fake" in torch.__version__
GIB = 2**30
MIB = 2**20


def bytes_on(size: int, ordinal: int = 0) -> Any:  # noqa: ANN401 a tensor of either torch
    if FAKE:
        return torch.Tensor(size, ordinal)
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{ordinal}")


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def hold(*sizes: str) -> None:
    kept = [bytes_on(int(size) * MIB) for size in sizes]
    tell(ready=True, pid=os.getpid())
    sys.stdin.read()
    del kept


def stats(ordinal: str, graph: str) -> None:
    """Allocate, free, wait for some reports, and print torch's own statistics of that moment."""
    device = int(ordinal)
    kept = [bytes_on(size * MIB + 1000 * size, device) for size in (1, 3, 20, 400)]
    gone = [bytes_on(size * MIB, device) for size in (2, 64, 128)]
    del gone
    if graph == "graph" and not FAKE:
        capture = torch.cuda.CUDAGraph()
        still = torch.zeros(4096, 4096, device=f"cuda:{device}")
        with torch.cuda.graph(capture):
            moved = still * 2 + 1
        kept += [capture, still, moved]
    if not FAKE:
        torch.cuda.synchronize(device)
    time.sleep(3.2)
    if FAKE:
        nested = torch._C._cuda_memoryStats(device)
        flat = {
            f"{family}.all.{which}": value
            for family, pools in nested.items()
            if isinstance(pools, dict) and "all" in pools
            for which, value in pools["all"].items()
        }
        flat |= {"num_ooms": nested["num_ooms"], "num_alloc_retries": nested["num_alloc_retries"]}
    else:
        flat = {name: value for name, value in torch.cuda.memory_stats(device).items() if "pool" not in name}
    tell(stats=flat, pid=os.getpid())
    sys.stdin.read()
    del kept


def gradients() -> None:
    """Train with gradients that are set to zero and not to None, and print what the tensors are."""
    if FAKE:
        parameters = [torch.Tensor(MIB) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.Tensor(parameter.nbytes)
        optimizer: Any = torch.optim.Adam(parameters)
        step: Callable[[], object] = optimizer.step
    else:
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam(parameters)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(256, 2048, device="cuda")).sum().backward()
            optimizer.step()

    step()
    time.sleep(2.2)  # the agent starts; it counts at the next step
    step()
    time.sleep(2.2)
    known = [value for state in optimizer.state.values() for value in state.values()]
    on_gpu = [each for each in known if getattr(getattr(each, "device", None), "type", None) == "cuda"]
    tell(
        parameters=sum(parameter.nbytes for parameter in parameters),
        gradients=sum(parameter.grad.nbytes for parameter in parameters),
        optimizer=sum(value.nbytes for value in on_gpu),
        pid=os.getpid(),
    )
    sys.stdin.read()


def wait_for_provider() -> Any:  # noqa: ANN401 each framework's own
    from vramledger_agent.worker import worker

    deadline = time.monotonic() + 10
    while not worker.poller.has_started() and time.monotonic() < deadline:
        time.sleep(0.01)
    return next(state.provider for state in worker.poller.states.values() if state.started)


def lock(blocks: str) -> None:
    """Measure the CPU time of the thread for one report, with this number of live blocks."""
    from vramledger_agent.worker import worker

    kept = [bytes_on(64 * 1024) for _ in range(int(blocks))]
    provider = wait_for_provider()
    time.sleep(1.5)
    worker.stop_thread(1.0)
    spans: dict[str, list[float]] = {"report": [], "counters": [], "snapshot": []}
    for _ in range(500):
        begun = time.thread_time_ns()
        worker.run_turn(time.monotonic())
        spans["report"].append((time.thread_time_ns() - begun) / 1000)
        begun = time.perf_counter_ns()
        torch._C._cuda_memoryStats(0)
        spans["counters"].append((time.perf_counter_ns() - begun) / 1000)
    for _ in range(50):
        begun = time.perf_counter_ns()
        provider.allocator.survey_blocks(0, 1_000_000)
        spans["snapshot"].append((time.perf_counter_ns() - begun) / 1000)
    told = {
        name: [statistics.median(span), sorted(span)[len(span) * 99 // 100]] for name, span in spans.items()
    }
    dropped = worker.session.transport.dropped if worker.session is not None else None
    tell(blocks=len(kept), **told, dropped=dropped)


def hooked(turns: str) -> None:
    """Measure an optimizer step's CPU time with and without the agent's hook, alternately."""
    parameters = [bytes_on(MIB)] if FAKE else [torch.nn.Parameter(torch.zeros(16, device="cuda"))]
    optimizer: Any = (torch.optim.Adam if FAKE else torch.optim.SGD)(parameters)
    steps = wait_for_provider().optimizer_steps

    def span(times: int = 20_000) -> float:
        begun = time.thread_time_ns()
        for _ in range(times):
            optimizer.step()
        return (time.thread_time_ns() - begun) / times / 1000

    steps.register()
    span(100)  # what the optimizer knows is counted now, and not again within ten seconds
    more = []
    for _ in range(int(turns)):
        steps.unregister()
        before = span()
        steps.register()
        during = span()
        steps.unregister()
        more.append(during - (before + span()) / 2)
    tell(more=more, step=before)


def out_of_memory(case: str) -> None:
    bytes_on(MIB)
    time.sleep(1.5)  # the agent exists
    kept: list[Any] = []
    capacity = 80 * GIB if FAKE else torch.cuda.get_device_properties(0).total_memory
    if case.startswith("limited") and not FAKE:
        torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        WAYS[case](kept, capacity)
    except RuntimeError as error:
        tell(exception=type(error).__name__, message=str(error)[:300], pid=os.getpid())
    else:
        tell(exception=None, pid=os.getpid())
    sys.stdin.read()


def take_pieces(size: int, count: int, kept: list[Any]) -> None:
    kept.extend(bytes_on(size) for _ in range(count))


def take_after_pieces(kept: list[Any], capacity: int, request: int) -> None:
    """Break a capacity into pieces, and ask for more than one of them."""
    break_into_pieces(kept, capacity)
    kept.append(bytes_on(request))


def take_beside(kept: list[Any], capacity: int) -> None:
    """Ask for half of the device, of which the same process holds the most elsewhere."""
    kept.append(bytes_beside(capacity * 7 // 10))
    kept.append(bytes_on(capacity * 5 // 10))


def leak_late(kept: list[Any], capacity: int) -> None:
    """Leak after 3,600 flat readings, as after an hour with one each second."""
    read_often(0.005)
    end = time.monotonic() + (1 if FAKE else 18)
    while time.monotonic() < end:
        passing = bytes_on(capacity // 40)
        time.sleep(0.002)
        del passing
    leak(kept, capacity, lambda: time.sleep(0.1))


def leak_early(kept: list[Any], capacity: int) -> None:
    """Leak in the first second, in steps of an optimizer."""
    parameter: Any = bytes_on(MIB) if FAKE else torch.nn.Parameter(torch.zeros(16, device="cuda"))
    parameter.grad = bytes_on(MIB) if FAKE else torch.zeros_like(parameter)
    optimizer: Any = (torch.optim.Adam if FAKE else torch.optim.SGD)([parameter])
    leak(kept, capacity, optimizer.step)


WAYS: dict[str, Callable[[list[Any], int], None]] = {
    "too-big": lambda kept, capacity: take_pieces(capacity // 10, 20, kept),
    "hoarded": lambda kept, capacity: take_pieces(capacity * 6 // 10, 1, kept),
    "fragmented": lambda kept, capacity: take_after_pieces(kept, capacity, capacity // 4),
    "expandable": lambda kept, capacity: take_after_pieces(kept, capacity, capacity * 6 // 10),
    "limited": lambda kept, capacity: take_pieces(capacity // 100, 12, kept),
    "limited-fragmented": lambda kept, capacity: take_after_pieces(kept, capacity // 10, capacity // 40),
    "alone": take_beside,
    "leaking": lambda kept, capacity: leak(kept, capacity, lambda: time.sleep(0.3)),
    "late-leak": leak_late,
    "early": leak_early,
}


def break_into_pieces(kept: list[Any], capacity: int) -> None:
    """Leave half of the pieces in use, so that what is free between them is in pieces."""
    whole = [bytes_on(capacity // 10) for _ in range(8)]
    whole.clear()
    pieces = [bytes_on(capacity // 10 // 16) for _ in range(128)]
    kept.extend(pieces[::2])
    pieces.clear()


def bytes_beside(size: int) -> object:
    """Take bytes from the driver, beside torch's allocator."""
    if FAKE:
        return None
    import ctypes

    address = ctypes.c_uint64(0)
    failed = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    assert not failed, failed
    time.sleep(2.5)  # the exporter sees it
    return address


def read_often(interval: float) -> None:
    """Have the agent read so often that seconds are as long for it as an hour."""
    from vramledger_agent.worker import worker

    worker.settings.interval = interval
    time.sleep(1.5)  # the turn that was planned before


def leak(kept: list[Any], capacity: int, step: Callable[[], object]) -> None:
    while True:
        kept.append(bytes_on(capacity // 60))
        passing = bytes_on(capacity // 40)
        step()
        del passing


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
