"""Programs of real frameworks, each run with and without the agent: they print results and state.

``wait_until_polled()`` waits until the agent, where there is one, has done what it does after a stage.
"""

PREAMBLE = """
import json, sys, threading, time, warnings

told, stages = [], {}
warnings.showwarning = lambda message, category, *rest, **more: told.append(f"{category.__name__}: {message}")

def wait_until_polled(framework):
    worker = sys.modules.get("vramledger_agent.worker")
    if worker is None:
        return
    state = worker.worker.poller.states.get(framework)
    if state is None or state.hooked or worker.worker.current_run is None:
        return  # no thread polls: it announces its allocator, or there is no GPU
    before, deadline = state.polls, time.monotonic() + 60
    while state.polls < before + 2 and not state.started:
        assert time.monotonic() < deadline, "the agent did not poll"
        time.sleep(0.01)

def end(result, status=0, **extra):
    worker = getattr(sys.modules.get("vramledger_agent.worker"), "worker", None)
    print(json.dumps({
        "result": result, "stages": stages, "warnings": told, "extra": extra,
        "threads": [thread.name for thread in threading.enumerate()],
        "modules": sorted(sys.modules),
        "agent": "vramledger_agent.import_hook" in sys.modules,
        "noticed": sorted(worker.poller.states) if worker else [],
        "agents_thread": worker is not None and worker.current_run is not None,
    }))
    sys.exit(status)
"""
"""The beginning of each program."""

TORCH = """
import torch

def facts():
    return {"initialised": torch.cuda.is_initialized(), "bad_fork": torch.cuda._is_in_bad_fork()}

wait_until_polled("torch")
stages["imported"] = facts()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
wait_until_polled("torch")
stages["used"] = facts()
end([loss.item(), [float(p.detach().sum()) for p in model.parameters()]], status=3)
"""

TENSORFLOW = """
import tensorflow as tf
from tensorflow.python.eager import context as module

def facts():
    context = module._context
    return {
        "context": context is not None,
        "handle": context is not None and context._context_handle is not None,
        "listed": context is not None and context._physical_devices is not None,
    }

wait_until_polled("tensorflow")
stages["imported"] = facts()
tf.random.set_seed(7)
value = float(tf.reduce_sum(tf.matmul(tf.random.normal([8, 8]), tf.random.normal([8, 8]))))
wait_until_polled("tensorflow")
stages["used"] = facts()

extra = {}
if "vramledger_agent.import_hook" in sys.modules:
    # What only a GPU makes, put where a GPU would put it: the objects are TensorFlow's own.
    from types import SimpleNamespace
    from vramledger_agent.frameworks.tensorflow import TensorFlow

    Device, Logical = module.PhysicalDevice, module.LogicalDeviceConfiguration
    gpus = [Device(f"/physical_device:GPU:{number}", "GPU") for number in range(2)]
    real = module._context

    def read(visible=(0,), growth=None, limits=None, environ=(), known=4, config=None):
        looks = SimpleNamespace(
            _context_handle=real._context_handle, _config=config,
            _physical_devices=real._physical_devices + gpus,
            _visible_device_list=real._visible_device_list + [gpus[number] for number in visible],
            _memory_growth_map={gpu: growth for gpu in gpus},
            _virtual_device_map={
                gpus[number]: [Logical(memory_limit=limit) for limit in each]
                for number, each in (limits or {}).items()
            },
            _logical_devices=[module.LogicalDevice(f"/device:GPU:{n}", "GPU") for n in range(known)],
            get_memory_info=lambda name: {"current": 1000 + int(name[-1]), "peak": 2000},
        )
        module._context = looks
        try:
            provider = TensorFlow()
            assert provider.is_initialised()
            provider._environ = dict(environ)
            return provider.read()
        finally:
            module._context = real

    class Session(tf.compat.v1.Session):
        def list_devices(self):
            name = "/job:localhost/replica:0/task:0/device:GPU:1"
            return [SimpleNamespace(device_type="GPU", name=name, memory_limit_bytes=7000)]

    def read_session(config):
        provider = TensorFlow()
        module._context = None
        try:
            with Session(graph=tf.Graph(), config=config):  # it makes its devices at once
                assert provider.is_initialised()
            return provider.read()
        finally:
            module._context = real

    options = tf.compat.v1.ConfigProto()
    options.gpu_options.per_process_gpu_memory_fraction = 0.5
    pool = tf.compat.v1.ConfigProto()
    pool.gpu_options.experimental.use_cuda_malloc_async = True
    extra = {
        "default": read(), "growth": read(growth=True), "no growth": read(growth=False),
        "limit": read(limits={0: [1024]}), "logical": read(limits={0: [1024, 2048]}),
        "second limited": read(visible=(0, 1), limits={1: [512]}), "hidden": read(visible=()),
        "second alone": read(visible=(1,)),
        "forced growth": read(environ={"TF_FORCE_GPU_ALLOW_GROWTH": "true"}),
        "forbidden growth": read(growth=True, environ={"TF_FORCE_GPU_ALLOW_GROWTH": "false"}),
        "misspelt": read(environ={"TF_FORCE_GPU_ALLOW_GROWTH": "True"}),
        "async": read(environ={"TF_GPU_ALLOCATOR": "cuda_malloc_async"}),
        "async by config": read(config=pool), "fraction": read(config=options),
        "other numbers": read(known=0), "cpu": TensorFlow().is_initialised(),
    }  # fmt: skip
    growing = tf.compat.v1.ConfigProto()
    growing.gpu_options.allow_growth = True
    growing.gpu_options.visible_device_list = "2,5"
    configs = {"growth": growing, "fraction": options, "async": pool, "default": tf.compat.v1.ConfigProto()}
    extra["sessions"] = {name: read_session(config) for name, config in configs.items()}
end(value, **extra)
"""

JAX = """
import jax
from jax._src import xla_bridge

def facts():
    return {"backends": sorted(xla_bridge._backends)}

wait_until_polled("jax")
stages["imported"] = facts()
import jax.numpy as jnp
key = jax.random.key(7)
value = float(jnp.sum(jax.random.normal(key, (8, 8)) @ jax.random.normal(key, (8, 8))))
wait_until_polled("jax")
stages["used"] = facts()

extra = {}
if "vramledger_agent.import_hook" in sys.modules:
    from vramledger_agent.frameworks import jax as ours

    device = ours._device_entry(jax.local_devices()[0])
    version = ours.module_version("jax.version")
    extra = {"cpu": ours.Jax().is_initialised(), "device": device, "version": version}
end(value, **extra)
"""
