"""Gated MLP, dense or as all experts of a layer side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from harts.backends.model.parameters import Projection


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Projection(hidden, intermediate, dtype)
        self.up = Projection(hidden, intermediate, dtype)
        self.down = Projection(intermediate, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[R, hidden] to [R, hidden]."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """E gated MLPs with their hidden units side by side: expert e has units e * I to (e + 1) * I.

    Every expert runs on every row and the units of those that a row is not routed to are multiplied by zero. That
    costs E / top_k times the arithmetic, and in return no shape depends on the routing: a row's bits cannot depend
    on where other rows go, and an expert that nobody chose has zero gradients.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = experts
        self.gate = Projection(hidden, experts * intermediate, dtype)
        self.up = Projection(hidden, experts * intermediate, dtype)
        self.down = Projection(experts * intermediate, hidden, dtype)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Combine the experts: x [R, hidden], weight [R, E] to [R, hidden]."""
        activation = functional.silu(self.gate(x)) * self.up(x)
        weighted = activation.reshape(x.shape[0], self.experts, -1) * weight.to(x.dtype)[:, :, None]
        out: Tensor = self.down(weighted.reshape(x.shape[0], -1))
        return out
