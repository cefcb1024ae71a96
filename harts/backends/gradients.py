"""Gradients of a model in one process: how they come to be, their norm, and who uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from harts.errors import HartsError
from harts.ir import CompactOutputs

Optimizer = Literal["sgd", "adamw"]
"""sgd without momentum; adamw with betas 0.9 and 0.999 and without weight decay."""


@dataclass(frozen=True)
class Pass:
    """One microbatch's way through a model, forward and backward."""

    forward: Callable[[], CompactOutputs]
    """Runs the model."""
    loss: Callable[[CompactOutputs], Tensor]
    """Share of the step's loss that comes from hidden states; scalar."""
    z: float
    """Factor of its router z statistic in the step's loss."""
    balance: float
    """Factor of its router balance statistic in the step's loss."""

    def router_loss(self, outputs: CompactOutputs) -> Any:
        """Share of the step's loss that comes from routers; scalar."""
        loss = 0.0 if outputs.router_z is None else self.z * outputs.router_z
        return loss if outputs.router_balance is None else loss + self.balance * outputs.router_balance

    def run(self) -> None:
        """Forward, then backward; nothing of the graph outlives it."""
        outputs = self.forward()
        torch.autograd.backward(self.loss(outputs) + self.router_loss(outputs))


def gradient_norm(parameters: Iterable[tuple[str, Tensor]]) -> float:
    """Euclidean norm of all gradients.

    Raises:
        HartsError: a gradient is not finite; the parameter is named.
    """
    total = 0.0
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        square = float(parameter.grad.double().square().sum())
        if not math.isfinite(square):
            raise HartsError(f"parameter {name}: its gradient is not finite")
        total += square
    return math.sqrt(total)


def build_optimizer(name: Optimizer, learning_rate: float, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of this name, over all parameters."""
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=learning_rate)
    return torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=0.0)
