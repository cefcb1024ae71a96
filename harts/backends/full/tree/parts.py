"""What rows of roots and rows with ancestors get of a tensor of all rows, and what comes back of both.

Shape suffixes: C rows, F of them of roots, which come first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def halves(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(x[:first], x[first:]): what queries are split into; x is [C, ...]."""
    parts: tuple[Tensor, Tensor] = _Halves.apply(x, first)  # type: ignore[no-untyped-call]
    return parts


def beginning_and_all(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(x[:first], x): what roots see of keys or values, and what the others see; x is [C, ...].

    Gradients of both are added once for a row, and rounded once.
    """
    parts: tuple[Tensor, Tensor] = _BeginningAndAll.apply(x, first)  # type: ignore[no-untyped-call]
    return parts


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return x[:first], x[first:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(grads), None


class _BeginningAndAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return x[:first], x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        beginning, whole = grads
        first, total = len(beginning), torch.empty_like(whole)
        torch.add(beginning, whole[:first], out=total[:first])
        total[first:] = whole[first:]
        return total, None
