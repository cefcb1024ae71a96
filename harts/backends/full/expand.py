"""Keys or values of all branches from compact rows; gradients of copies come back in a fixed order.

Shape suffixes: R compact rows, n keys of all branches (a compact row has a copy in every branch that sees it), G
key/value heads, D head dim, I intervals of rows that the same runs hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.linear.dtypes import wide_dtype
from harts.backends.placing import place
from harts.backends.plan_tensors import AttentionViews
from harts.ir.runs import offsets, ranges


class Copies(NamedTuple):
    """Where the copies of each compact row are; int64 on the device of the views.

    The copies of row r are rows base[j] + r of the expanded ones, for j from offset[i] up to offset[i + 1] where i is
    interval[r], in the order of the branches.
    """

    interval: Tensor
    """[R]."""
    offset: Tensor
    """[I + 1]."""
    base: Tensor
    """[runs over all intervals]."""


def expand(x: Tensor, views: AttentionViews) -> Tensor:
    """Gather the keys or values of every branch, each with its ancestors'.

    The gradient of a compact row is the sum over its copies in float32 or wider, in the order of the branches, rounded
    once: the same bits in every run, on every device.

    Args:
        x: [R, G, D].
        views: which rows the branches see.

    Returns:
        [n, G, D], contiguous, branch after branch. Where those are the rows as they lie, nothing is copied: x itself,
        or its part that is tokens.
    """
    if lie_in_order(views):
        tokens = int(views.cu_q[-1])
        return (x if tokens == views.rows else x.narrow(0, 0, tokens)).contiguous()
    rows: Tensor = _Expand.apply(x, views)  # type: ignore[no-untyped-call]
    return rows


def lie_in_order(views: AttentionViews) -> bool:
    """Whether no branch has an ancestor, so that keys are the tokens' rows in their order; found once for the views."""
    return views.once("lie in order", lambda: np.array_equal(views.run_row, views.cu_q[:-1]))


def copies_of(views: AttentionViews) -> Copies:
    """Where the copies of each row are, listed once for the views."""
    return views.once("copies", lambda: _copies(views))


def _copies(views: AttentionViews) -> Copies:
    begin, end = views.run_row, views.run_row + views.run_length
    bounds = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), begin, end]))
    first, last = np.searchsorted(bounds, begin), np.searchsorted(bounds, end)
    interval, run = ranges(first, last), np.repeat(np.arange(len(begin)), last - first)
    in_order = run[np.argsort(interval, kind="stable")]
    columns = (
        np.searchsorted(bounds, np.arange(views.rows), side="right") - 1,
        offsets(np.bincount(interval, minlength=len(bounds))),
        (offsets(views.run_length)[:-1] - begin)[in_order],
    )
    return Copies(*(place(each.astype(np.int64), views.device) for each in columns))


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, views: AttentionViews) -> Tensor:
        ctx.views = views
        if not x.is_cuda:
            return x.index_select(0, views.key_row)
        from harts.backends.full.expand_rows import gather_rows  # noqa: PLC0415  (Triton, where there is a GPU)

        return gather_rows(x, views.key_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, views = grads[0].contiguous(), ctx.views
        if grad.is_cuda:
            from harts.backends.full.expand_rows import sum_copies  # noqa: PLC0415  (Triton, where there is a GPU)

            return sum_copies(grad, copies_of(views)), None
        total = grad.new_zeros(views.rows, *grad.shape[1:], dtype=wide_dtype(grad))
        total.index_add_(0, views.key_row, grad.to(total.dtype))  # in order on a CPU
        return total.to(grad.dtype), None
