"""The sampler and its supervisor."""
