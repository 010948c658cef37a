"""One optimizer, and the hook after the steps of all."""

from __future__ import annotations

from collections.abc import Callable

import torch

Hooks = dict[int, Callable[..., None]]

_hooks: Hooks = {}
_pre_hooks: Hooks = {}


class _Handle:
    def __init__(self, hooks: Hooks, hook: Callable[..., None]) -> None:
        self.hooks = hooks
        self.number = len(hooks)
        hooks[self.number] = hook

    def remove(self) -> None:
        self.hooks.pop(self.number, None)


def register_optimizer_step_post_hook(hook: Callable[..., None]) -> _Handle:
    return _Handle(_hooks, hook)


def register_optimizer_step_pre_hook(hook: Callable[..., None]) -> _Handle:
    return _Handle(_pre_hooks, hook)


class Optimizer:
    """What all optimizers are."""


class Adam(Optimizer):
    """Two tensors of state for each parameter, from the first step on."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[torch.Tensor, dict[str, object]] = {}

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self) -> None:
        """Make the state, and call the hooks."""
        for hook in list(_pre_hooks.values()):
            assert hook(self, (), {}) is None, "it would replace the arguments"
        for parameter in self.param_groups[0]["params"]:
            if parameter not in self.state:
                ordinal = parameter.device.index
                self.state[parameter] = {
                    "step": torch.Tensor(4, kind="cpu"),
                    "exp_avg": torch.Tensor(parameter.nbytes, ordinal),
                    "exp_avg_sq": torch.Tensor(parameter.nbytes, ordinal),
                }
        for hook in list(_hooks.values()):
            hook(self, (), {})
