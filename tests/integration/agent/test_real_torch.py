"""The real PyTorch with the agent inside behaves as without it, on a machine without a GPU."""

import textwrap
from pathlib import Path

import pytest

from tests.support.listening import environment, finish, start
from tests.support.ports import free_port
from tests.support.requirements import require_frameworks

pytestmark = pytest.mark.thorough


def run(place: Path, code: str, *path: Path, **variables: str) -> str:
    """Run a program under the Python that has torch, with the agent inside; return what it printed."""
    environ = environment(place, *path, **variables)
    return finish(start(textwrap.dedent(code), environ, python=require_frameworks()))


def test_to_name_lines_it_imports_nothing(place: Path) -> None:
    """PyTorch names the lines of a stack for us without the import that it would do for that."""
    out = run(place, """
        import sys, threading, torch
        from vramledger_agent.torch.recording import take_without_import

        def name_lines():
            stack = torch._C._profiler.gather_traceback(True, False, False)
            (frames,) = torch._C._profiler.symbolize_tracebacks([stack])
            return [frame["name"] for frame in frames].count("name_lines")

        def named():
            print(take_without_import(torch, name_lines), "torch._inductor" in sys.modules)

        thread = threading.Thread(target=named)
        thread.start()
        thread.join()
        print(name_lines(), "torch._inductor" in sys.modules)
    """)  # fmt: skip
    assert out.splitlines() == ["1 False", "1 True"]


def test_counts_what_the_optimizer_knows(place: Path) -> None:
    """Parameters, gradients and state of the real AdamW are counted separately, to the byte."""
    out = run(place, """
        import torch
        from vramledger_agent.torch.live_tensors import OPTIMIZER, optimizer_tensors
        from vramledger_agent.torch.optimizer_steps import count_bytes
        model = torch.nn.Linear(1000, 10)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        known = [tensor.nbytes for kind, tensor in optimizer_tensors(optimizer) if kind == OPTIMIZER]
        print(count_bytes(optimizer), sorted(known))
    """)  # fmt: skip
    assert out == "{} [4, 4, 40, 40, 40000, 40000]\n"


def test_signatures_that_we_rely_on(place: Path) -> None:
    """This torch has the names that the agent reads, as far as a build without CUDA has them."""
    out = run(place, """
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook
        assert "include_traces" in torch.cuda.memory.memory_snapshot.__code__.co_varnames
        print(torch.cuda.default_generators, torch.compiler.is_compiling(), torch.cuda.memory_stats(0))
    """)  # fmt: skip
    assert out == "() False OrderedDict()\n"


def test_recorded_steps_train_the_same(place: Path) -> None:
    """While a recording goes on, steps, compiled ones too, give the same numbers, and each leaves a mark."""
    code = """
        import logging, os, torch
        torch._logging.set_logs(all=logging.ERROR)
        torch.manual_seed(1)
        marks = []
        if {recorded}:
            from vramledger_agent.torch import optimizer_steps, live_tensors
            from vramledger_agent.torch.recording import recording
            watched = optimizer_steps.OptimizerSteps(torch)
            watched.register()
            recording.active = True
            marks = recording.marks
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        def train():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).sum()
            loss.backward()
            optimizer.step()
            return loss
        for _ in range(3):
            loss = train()
        if {recorded}:
            assert len(marks) == 3, marks
            assert all(mark.begun <= mark.ended for mark in marks)
            facts = live_tensors.read_tensors(torch)
            assert (facts.addresses, facts.types, facts.forward_types) == ({{}}, {{}}, {{}}), "not on a GPU"
        compiled = torch.compile(lambda: optimizer.step(), backend="eager")
        compiled()
        if {recorded}:
            assert len(marks) == 3, "a compiled step has none of our code"
            assert [each.bytes for each in watched.counts.values()] == [{{}}], "no tensor is on a GPU"
        print([round(value, 6) for value in model.weight.flatten().tolist()])
    """
    recorded, plain = (
        run(place, code.format(recorded=each), VRAMLEDGER_AGENT_CONSENT="snapshot") for each in (True, False)
    )
    assert recorded == plain


def test_a_graph_shows_its_batch_and_types(place: Path) -> None:
    """The batch is the first dimension of most results, whatever is folded; casts of weights do not count."""
    out = run(place, """
        import torch
        from vramledger_agent.torch import live_tensors
        def nodes(loss):
            waiting = [loss.grad_fn]
            for node in waiting:
                following = [each for each, _ in node.next_functions if each is not None]
                waiting += [each for each in following if each not in waiting]
            return waiting
        def types(loss):
            return {name for node in nodes(loss) for name, _, _ in live_tensors._shapes(node)}
        mlp = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        loss = mlp(torch.randn(128, 64)).sum()
        print(live_tensors._batch(nodes(loss)), types(loss))
        print(live_tensors._batch(nodes(layer(torch.randn(6, 10, 32)).sum())))
        print(live_tensors._batch(nodes(mlp(torch.randn(1, 64)).sum())))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = mlp(torch.randn(128, 64))
        print(live_tensors._batch(nodes(result)), types(result))
        loss.backward()
        print(live_tensors._batch(nodes(loss)))
    """)  # fmt: skip
    assert out.splitlines() == ["128 {'float32'}", "6", "None", "128 {'bfloat16'}", "128"]


SPAWNED = """
import os
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
from vramledger_agent.session import rank_entry

def told():
    entry = rank_entry()
    return "none" if entry is None else "{number} of {size} at {job}".format(**entry)

def run(rank, port, *methods):
    said = [told()]
    for method in methods:
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
        said.append(told())
        dist.barrier()  # the other may still connect
        dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    said.append(told())
    dist.init_process_group("gloo")
    said.append(told())
    dist.barrier()
    sys.stdout.write(", ".join(said) + "\\n")

def main(*arguments):
    mp.spawn(run, arguments, nprocs=2)
"""


def test_ranks_that_a_program_spawns_are_known(place: Path, tmp_path: Path) -> None:
    """Spawned ranks are read from their group, however they met, and from what they set themselves."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    ports = free_port(), free_port()
    methods = f"tcp://localhost:{ports[0]}", f"file://{tmp_path}/meeting"
    code = f"import spawned; spawned.main('{ports[1]}', {', '.join(map(repr, methods))})"
    jobs = f":{ports[0]}", f":{tmp_path}/meeting", f":{ports[1]}", f":{ports[1]}"
    expected = [", ".join(["none", *(f"{rank} of 2 at {job}" for job in jobs)]) for rank in (0, 1)]
    assert sorted(run(place, code, tmp_path).splitlines()) == expected


def test_views_that_a_step_has_made_stale(place: Path) -> None:
    """The parts of a weight that a step has changed since are skipped, and so is an operation's own name."""
    out = run(place, """
        import torch
        from vramledger_agent.torch import live_tensors
        weight = torch.nn.Parameter(torch.randn(6, 6))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        query, key, value = weight.chunk(3)
        (query.sum() + key.sum()).backward()
        optimizer.step()
        try:
            query.grad_fn
        except RuntimeError:
            print("stale")

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, given):
                ctx.name = "double"
                return 2 * given

            @staticmethod
            def backward(ctx, gradient):
                return 2 * gradient

        class OnGpu:
            "A tensor as the agent sees one on a GPU."
            def __init__(self, tensor):
                self.tensor = tensor
                self.device = torch.device("cuda", 0)

            @property
            def grad_fn(self):
                return self.tensor.grad_fn

        loss = Double.apply(torch.randn(8, 6) @ weight)
        seen = list(live_tensors._nodes([OnGpu(each) for each in (query, loss, value)], 100))
        print(len(seen), live_tensors._batch(seen), live_tensors.young_batch(torch))
        print(live_tensors.read_tensors(torch).batch)
    """)  # fmt: skip
    assert out.splitlines() == ["stale", "3 8 None", "None"]
