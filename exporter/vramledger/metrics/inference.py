"""Declare the families about the KV caches of holders that serve models."""

from __future__ import annotations

from vramledger.metrics.families import PREFIX, HolderFactFamily

_COLLECTOR = "vllm"
_ABSENT = "when no server says it"

USAGE = HolderFactFamily(
    PREFIX + "process_kv_cache_usage_ratio",
    ("pid",),
    "Share of the blocks of the holder's KV cache that running requests have, as its vLLM server says, up to "
    "60 seconds old; prefixes that are only cached do not count.",
    _COLLECTOR,
    source="`vllm:kv_cache_usage_perc` (before vLLM 0.9 `vllm:gpu_cache_usage_perc`) of its own vLLM server",
    absent=_ABSENT,
    fact="kv_caches",
    read=lambda cache: cache.usage,
)
SIZE = HolderFactFamily(
    PREFIX + "process_kv_cache_bytes",
    ("pid",),
    "Size of the holder's KV cache on its GPU, which is part of what it holds, as its vLLM server was told "
    "with --kv-cache-memory-bytes.",
    _COLLECTOR,
    source="`kv_cache_memory_bytes` of `vllm:cache_config_info` of its own vLLM server",
    absent=_ABSENT,
    fact="kv_caches",
    read=lambda cache: cache.memory,
)
TOKENS = HolderFactFamily(
    PREFIX + "process_kv_cache_tokens",
    ("pid",),
    "Tokens that fit into the holder's KV cache, as its vLLM server says.",
    _COLLECTOR,
    source="`kv_cache_size_tokens` of `vllm:cache_config_info` of its own vLLM server",
    absent=f"{_ABSENT}, as with older versions of vLLM",
    fact="kv_caches",
    read=lambda cache: cache.tokens,
)

FAMILIES = (USAGE, SIZE, TOKENS)
