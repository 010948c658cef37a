"""One optimizer, and the hook after the steps of all."""

from __future__ import annotations

from collections.abc import Callable

import torch

_hooks: dict[int, Callable[..., None]] = {}


class _Handle:
    def __init__(self, number: int) -> None:
        self.number = number

    def remove(self) -> None:
        _hooks.pop(self.number, None)


def register_optimizer_step_post_hook(hook: Callable[..., None]) -> _Handle:
    """Call a function after every step of every optimizer."""
    number = len(_hooks)
    _hooks[number] = hook
    return _Handle(number)


class Adam:
    """Two tensors of state for each parameter, from the first step on."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: dict[torch.Tensor, dict[str, object]] = {}

    def step(self) -> None:
        """Make the state, and call the hooks."""
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
