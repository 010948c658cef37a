"""Declare the families about the KV caches of holders that serve models."""

from __future__ import annotations

from collections.abc import Callable

from vramledger.metrics.families import PREFIX, HolderFactFamily
from vramledger.model.holder_facts import KvCache

_ABSENT = "when no vLLM server that is certainly the holder's own says it; more than 16 servers take turns"


def _family(
    name: str, read: Callable[[KvCache], float | None], help_: str, source: str, more: str = ""
) -> HolderFactFamily:
    source = f"{source} of its own vLLM server"
    return HolderFactFamily(PREFIX + name, ("pid",), help_, "vllm", source, _ABSENT + more, "kv_caches", read)


FAMILIES = (
    _family(
        "process_kv_cache_usage_ratio",
        lambda cache: cache.usage,
        "Share of the blocks of the holder's KV cache that running requests have, as its vLLM server says, "
        "up to 60 seconds old; prefixes that are only cached do not count.",
        "`vllm:kv_cache_usage_perc` (before vLLM 0.9 `vllm:gpu_cache_usage_perc`)",
    ),
    _family(
        "process_kv_cache_bytes",
        lambda cache: cache.memory,
        "Size of the holder's KV cache on its GPU, which is part of what it holds, as its vLLM server was "
        "told with --kv-cache-memory-bytes.",
        "`kv_cache_memory_bytes` of `vllm:cache_config_info`",
    ),
    _family(
        "process_kv_cache_tokens",
        lambda cache: cache.tokens,
        "Tokens that fit into the holder's KV cache, as its vLLM server says.",
        "`kv_cache_size_tokens` of `vllm:cache_config_info`",
        "; older versions of vLLM do not say it",
    ),
)
