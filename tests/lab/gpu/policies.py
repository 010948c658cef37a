"""Take GPU memory with TensorFlow or JAX in a named way: ``python policies.py tensorflow growth``.

It prints a line of JSON after the import and one when it holds memory, and goes on at a line on stdin.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

LOOKED = 5.0
"""Seconds in which the agent polls a framework without an announcement twice."""


def say(**facts: Any) -> None:  # noqa: ANN401 whatever the framework answers
    """Report the state, and wait for the request to continue."""
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


def tensorflow(mode: str) -> None:
    """Configure TensorFlow as requested, and multiply."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    time.sleep(LOOKED)
    # No public name shows whether the context was initialised without initialising it.
    begun = context._context is not None and context._context._context_handle is not None
    say(initialised=begun)
    if mode == "unified session":
        _unified_session(tf)
        return
    if mode == "unified eager":
        tf.compat.v1.enable_eager_execution(config=_unified(tf))
    elif mode == "fraction":
        config = tf.compat.v1.ConfigProto()
        config.gpu_options.per_process_gpu_memory_fraction = 0.25
        tf.compat.v1.enable_eager_execution(config=config)
    else:
        _configure(tf, mode)
    square = tf.random.normal([1024, 1024])
    float(tf.reduce_sum(tf.matmul(square, square)))
    peak = tf.zeros([64, 1024, 1024])
    float(peak[0, 0, 0])
    del peak
    kept = tf.ones([2**29]) if "unified" in mode else square
    float(tf.reduce_sum(kept[:1]))
    devices = tf.config.list_logical_devices("GPU")
    told = [tf.config.experimental.get_memory_info(f"GPU:{index}") for index in range(len(devices))]
    say(in_use=sum(each["current"] for each in told) if told else None)


def _unified(tf: Any) -> Any:  # noqa: ANN401 a module and its own object
    """Return the old configuration that asks for unified memory, of a quarter of the GPU at most."""
    unified = tf.compat.v1.GPUOptions.Experimental(use_unified_memory=True)
    options = tf.compat.v1.GPUOptions(per_process_gpu_memory_fraction=0.25, experimental=unified)
    return tf.compat.v1.ConfigProto(gpu_options=options)


def _unified_session(tf: Any) -> None:  # noqa: ANN401 a module
    """Fill 2 GiB in a session of TensorFlow 1, whose options ask for unified memory."""
    tf.compat.v1.disable_eager_execution()
    session = tf.compat.v1.Session(config=_unified(tf))
    block = tf.Variable(tf.ones([2**29]))
    session.run(block.initializer)
    print(session.run(tf.reduce_sum(block[:16])), file=sys.stderr)
    say(in_use=None)


def _configure(tf: Any, mode: str) -> None:  # noqa: ANN401 a module
    limits = {"limit": (1024,), "logical": (1024, 2048)}.get(mode, ())
    for gpu in tf.config.list_physical_devices("GPU"):
        if mode == "growth":
            tf.config.experimental.set_memory_growth(gpu, enable=True)
        if limits:
            parts = [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]
            tf.config.set_logical_device_configuration(gpu, parts)
    if mode == "hidden":
        tf.config.set_visible_devices([], "GPU")


def jax(mode: str) -> None:
    """Multiply; variables decide how JAX takes its memory."""
    import jax as framework
    import jax.numpy as jnp
    from jax._src import xla_bridge

    time.sleep(LOOKED)
    say(initialised=bool(xla_bridge._backends))
    square = jnp.ones((1024, 1024))
    (square @ square).block_until_ready()
    kept = jnp.ones(2**31, dtype="uint8").block_until_ready() if mode == "unified" else square
    stats = framework.local_devices()[0].memory_stats() or {}
    say(in_use=stats.get("bytes_in_use"), pool=stats.get("pool_bytes"), limit=stats.get("bytes_limit"))
    del kept


PROGRAMS: dict[str, Callable[[str], None]] = {"tensorflow": tensorflow, "jax": jax}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2])
