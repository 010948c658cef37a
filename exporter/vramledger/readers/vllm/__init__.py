"""Ask the vLLM servers of holders how full their KV caches are: only with ``--collector.vllm``.

``server`` finds the server that is certainly a holder's own, ``answer`` asks it and reads what it says, and
``reader`` does both without ever waiting.
"""
