"""Attention of all rows as one function: packed launches for roots, then one launch for listed rows.

Shape suffixes: R compact rows, C of them tokens, F of these packed, which come first, T listed, H query heads, G
key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.full.packed import Heads, packed_views
from harts.backends.full.tree.kernel import (
    Gradients,
    Operands,
    listed_backward,
    listed_forward,
    packed_backward,
    packed_forward,
)
from harts.backends.full.tree.plan import Listed
from harts.backends.plan_tensors import AttentionViews


def attend(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, roots: AttentionViews, listed: Listed, calls: Sequence[Heads], scale: float
) -> Tensor:
    """Attend. Between the passes, q, k, v and outputs are held once, and a number for each query and head.

    Gradients of keys and values of packed roots are summed over both kinds of launches, each of which rounds its own.

    Args:
        q: [R, H, Dk].
        k: [R, G, Dk].
        v: [R, G, Dv].
        roots: the first F rows.
        listed: all others.
        calls: heads of each packed launch; none if F is 0.
        scale: factor on the scores.

    Returns:
        [R, H, Dv]; zeros on padding rows, whose gradients are zeros.
    """
    out: Tensor = _Attend.apply(q, k, v, roots, listed, calls, scale)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        roots, listed, calls, scale = ctx.given = given
        first, rows = roots.rows, listed.rows
        out = _to_be_written(q.new_empty(*q.shape[:2], v.shape[2]), rows)
        lse_HF, lse_HT = (q.new_empty(q.shape[1], count, dtype=torch.float32) for count in (first, rows - first))
        for heads in calls:
            packed_forward(_of_roots(q, k, v, out, lse_HF, heads), packed_views(roots), scale)
        listed_forward(_of_others(q, k, v, out, lse_HT, rows), listed, scale)
        ctx.save_for_backward(q, k, v, out, lse_HF, lse_HT)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_HF, lse_HT = ctx.saved_tensors
        roots, listed, calls, scale = ctx.given
        first, rows = roots.rows, listed.rows
        grad_CHD = grads[0][:rows].contiguous()
        dq, dk, dv = (_to_be_written(each.new_empty(each.shape), rows) for each in (q, k, v))
        written = Gradients(dq[first:rows], dk[:rows], dv[:rows])
        listed_backward(_of_others(q, k, v, out, lse_HT, rows), grad_CHD[first:], written, listed, scale)
        dk_roots, dv_roots = (torch.empty_like(each[:first]) for each in (dk, dv))
        for heads in calls:
            own, keys = heads
            written = Gradients(dq[:first, own], dk_roots[:, keys], dv_roots[:, keys])
            x = _of_roots(q, k, v, out, lse_HF, heads)
            packed_backward(x, grad_CHD[:first, own], written, packed_views(roots), scale)
        dk[:first].add_(dk_roots)
        dv[:first].add_(dv_roots)
        return dq, dk, dv, *[None] * len(ctx.given)


def _to_be_written(x: Tensor, rows: int) -> Tensor:
    """[R, ...] with zeros on padding rows."""
    x[rows:].zero_()
    return x


def _of_roots(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HF: Tensor, heads: Heads) -> Operands:  # noqa: PLR0917
    own, keys = heads
    first = lse_HF.shape[1]
    return Operands(q[:first, own], k[:first, keys], v[:first, keys], out[:first, own], lse_HF[own])


def _of_others(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HT: Tensor, rows: int) -> Operands:  # noqa: PLR0917
    own = slice(rows - lse_HT.shape[1], rows)
    return Operands(q[own], k[:rows], v[:rows], out[own], lse_HT)
