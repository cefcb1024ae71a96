"""A linear product whose rows do not depend on how many there are.

Libraries choose a product's kernel by its number of rows, and kernels add in different orders where an output has few
columns: a router's logits, and with them the experts of a token, would depend on the rows that its microbatch happens
to hold. In blocks of one size, rows have the same bits in every packing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

BLOCK = 16384
"""Rows of a product: enough to fill a large GPU."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x @ weight^T + bias.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs].
        bias: [outputs].
        dtype: in which everything is computed, and what comes of it; copies in it are not kept for the backward pass.
            Otherwise as in `torch.nn.functional.linear`: what is given has one dtype, which autocast casts.

    Returns:
        [..., outputs].

    Raises:
        ValueError: there are two dtypes, and none is asked for.
    """
    if dtype is None:
        x, weight, bias = _cast(x), _cast(weight), None if bias is None else _cast(bias)
        dtype = x.dtype
        if weight.dtype != dtype:
            raise ValueError(f"rows of {dtype} and a weight of {weight.dtype}: they need one dtype")
    product: Tensor = _Product.apply(x.flatten(end_dim=-2), weight, dtype)  # type: ignore[no-untyped-call]
    product = product.view(*x.shape[:-1], len(weight))
    return product if bias is None else product + bias.to(dtype)


FUNCTIONS = SimpleNamespace(**{**vars(functional), "linear": linear})
"""`torch.nn.functional` with this product."""


def _cast(x: Tensor) -> Tensor:
    """As autocast casts what goes into a product."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _Product(torch.autograd.Function):
    """In the dtype that is asked for: autocast casts what some overloads of a product are given, and not others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        with torch.autocast(x.device.type, enabled=False):
            return _in_blocks(x, weight.to(dtype).t(), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Of all rows at once: a gradient is a sum over the microbatch's rows in any case."""
        (x, weight), (grad,) = ctx.saved_tensors, grads
        of_x, of_weight, _ = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            dx = grad.mm(weight.to(ctx.dtype)).to(x.dtype) if of_x else None
            return dx, grad.t().mm(x.to(ctx.dtype)).to(weight.dtype) if of_weight else None, None


def _in_blocks(x: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    out = x.new_empty(len(x), columns.shape[1], dtype=dtype)
    for rows, into in zip(torch.split(x, BLOCK), torch.split(out, BLOCK), strict=True):
        if len(rows) == BLOCK:
            torch.mm(rows.to(dtype), columns, out=into)
        else:
            whole = functional.pad(rows.to(dtype), (0, 0, 0, BLOCK - len(rows)))
            into.copy_(whole.mm(columns)[: len(rows)])
    return out
