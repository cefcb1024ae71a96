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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias, as `torch.nn.functional.linear`, with autocast too.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs], of x's dtype.
        bias: [outputs], of x's dtype.

    Returns:
        [..., outputs].
    """
    x, weight = _cast(x), _cast(weight)
    product: Tensor = _Product.apply(x.flatten(end_dim=-2), weight)  # type: ignore[no-untyped-call]
    product = product.view(*x.shape[:-1], len(weight))
    return product if bias is None else product + _cast(bias)


FUNCTIONS = SimpleNamespace(**{**vars(functional), "linear": linear})
"""`torch.nn.functional` with this product."""


def _cast(x: Tensor) -> Tensor:
    """As autocast casts what goes into a product."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(len(x), len(weight))
        for rows, into in zip(torch.split(x, BLOCK), torch.split(out, BLOCK), strict=True):
            if len(rows) == BLOCK:
                torch.mm(rows, weight.t(), out=into)
            else:
                into.copy_(functional.pad(rows, (0, 0, 0, BLOCK - len(rows))).mm(weight.t())[: len(rows)])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of all rows at once: a gradient is a sum over the microbatch's rows in any case."""
        (x, weight), (grad,) = ctx.saved_tensors, grads
        of_x, of_weight = ctx.needs_input_grad
        return grad.mm(weight) if of_x else None, grad.t().mm(x) if of_weight else None
