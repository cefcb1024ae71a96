"""Normalisations, computed in float32 or wider and given back in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harts.backends.model.parameters import Draw, Seeded

EPSILON = 1e-6


def widen(x: Tensor) -> Tensor:
    """The same values in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2norm(x: Tensor) -> Tensor:
    """Scale the last dimension to length 1: x / sqrt(|x|^2 + EPSILON), as the delta rules of other libraries do."""
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(x.dtype)


class RmsNorm(Seeded):
    """Root-mean-square norm of the last dimension."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def reset(self, draw: Draw) -> None:  # noqa: D102
        self.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        wide = widen(x)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return (scaled * widen(self.weight)).to(x.dtype)
