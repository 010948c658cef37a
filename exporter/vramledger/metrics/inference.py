"""Declare the families about the KV caches of holders that serve models, and make their samples."""

from __future__ import annotations

from vramledger.metrics.families import PREFIX, Collected, Family
from vramledger.model.snapshot import Snapshot

_COLLECTOR = "vllm"
_ABSENT = (
    "when `--collector.vllm` is not given, and when no vLLM server that is certainly the holder's own says "
    "it; of more than 16 servers each has its turn, so that some are absent in between"
)

USAGE = Family(
    PREFIX + "process_kv_cache_usage_ratio",
    ("pid",),
    "Share of the blocks of the holder's KV cache that running requests have, as its vLLM server says, up to "
    "60 seconds old; prefixes that are only cached do not count.",
    _COLLECTOR,
    source="`vllm:kv_cache_usage_perc` (before vLLM 0.9 `vllm:gpu_cache_usage_perc`) of its own vLLM server",
    absent=_ABSENT,
)
SIZE = Family(
    PREFIX + "process_kv_cache_bytes",
    ("pid",),
    "Size of the holder's KV cache on its GPU, which is part of what it holds, as its vLLM server was told "
    "with --kv-cache-memory-bytes.",
    _COLLECTOR,
    source="`kv_cache_memory_bytes` of `vllm:cache_config_info` of its own vLLM server",
    absent=f"{_ABSENT}; vLLM says it only where it was started with `--kv-cache-memory-bytes`",
)
TOKENS = Family(
    PREFIX + "process_kv_cache_tokens",
    ("pid",),
    "Tokens that fit into the holder's KV cache, as its vLLM server says.",
    _COLLECTOR,
    source="`kv_cache_size_tokens` of `vllm:cache_config_info` of its own vLLM server",
    absent=f"{_ABSENT}; older versions of vLLM do not say it",
)

FAMILIES = (USAGE, SIZE, TOKENS)


def collect(snapshot: Snapshot) -> Collected:
    """Return the series of the holders of which something is known."""
    known = sorted(snapshot.kv_caches.items()) if snapshot.up else []
    return [
        (USAGE, [((str(pid),), each.usage) for pid, each in known if each.usage is not None]),
        (SIZE, [((str(pid),), each.memory) for pid, each in known if each.memory is not None]),
        (TOKENS, [((str(pid),), each.tokens) for pid, each in known if each.tokens is not None]),
    ]
