"""Random inputs of the operator, in its contract: q and k normalised, decays and beta in float32.

Shape suffixes: R rows, H query and key heads, HV value heads, K and V head dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from harts.backends.base import Rule

STRONGEST = -4.9
"""Least log-decay of a token: kernels that need bounded gates take no less than -5."""


class Shape(NamedTuple):
    """Of one linear-attention layer."""

    rule: Rule
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str

    def output(self, rows: int) -> tuple[int, int, int]:
        """[R, HV, V]."""
        return rows, self.value_heads, self.value_dim


def leaves(shape: Shape, rows: int, seed: int) -> dict[str, Tensor]:
    """q, k, v, g, beta of `rows` rows, each a leaf that requires a gradient.

    Decays are those of a freshly made layer: rates from 1 to 16 a head, steps around 0.001 to 0.1 a channel.
    """
    draw = torch.Generator(shape.device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, device=shape.device)

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return torch.rand(size, generator=draw, device=shape.device) * (high - low) + low

    channels = (shape.value_heads, shape.key_dim if shape.rule == "kda" else 1)
    step = 10 ** uniform(-3, -1, *channels)
    bias = step + torch.log(-torch.expm1(-step))  # softplus of it is the step
    decay = -uniform(1, 16, shape.value_heads, 1) * softplus(normal(rows, *channels) + bias)
    keys = (rows, shape.heads, shape.key_dim)
    made = {
        "q": normalize(normal(*keys), dim=-1).to(shape.dtype),
        "k": normalize(normal(*keys), dim=-1).to(shape.dtype),
        "v": normal(*shape.output(rows)).to(shape.dtype),
        "g": decay.clamp(min=STRONGEST).squeeze(-1) if shape.rule == "gdn" else decay.clamp(min=STRONGEST),
        "beta": normal(rows, shape.value_heads).sigmoid(),
    }
    return {name: x.requires_grad_() for name, x in made.items()}


def upstream(shape: Shape, rows: int, seed: int) -> Tensor:
    """A gradient of the output, [R, HV, V]."""
    draw = torch.Generator(shape.device).manual_seed(seed)
    return torch.randn(shape.output(rows), generator=draw, device=shape.device).to(shape.dtype)


def gathered(inputs: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Copies of some rows of all inputs, as leaves."""
    return {name: x.detach().index_select(0, rows).requires_grad_() for name, x in inputs.items()}
