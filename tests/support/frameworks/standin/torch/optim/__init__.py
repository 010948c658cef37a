"""The optimizers."""

from torch.optim.optimizer import Adam

__all__ = ["Adam"]
