"""The optimizers."""

from torch.optim.optimizer import Adam, Optimizer

__all__ = ["Adam", "Optimizer"]
