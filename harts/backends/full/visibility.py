"""Which rows see which: by definition, and as the results of a backend show it.

Scores are all zero, so that a row's weights are equal over what it sees: outputs are sums of values over it, and
gradients of values sums of gradients of outputs over the rows that see them, each over the number of rows seen.

Shape suffixes: R compact rows, H query heads, G key/value heads, M numbers of a row.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from harts.backends.base import FullAttention, Need
from harts.backends.plan_tensors import AttentionViews


class Passes(NamedTuple):
    """Something of the forward and of the backward pass."""

    forward: Tensor
    backward: Tensor


def visible_rows(views: AttentionViews) -> Tensor:
    """Row i sees row j, from the definition, for small views: bool on their device, [R, R]."""
    seen = torch.zeros(views.rows, views.rows, dtype=torch.bool)
    for i in range(len(views.cu_q) - 1):
        first, end = int(views.cu_q[i]), int(views.cu_q[i + 1])
        for run in range(int(views.run_offset[i]), int(views.run_offset[i + 1]) - 1):
            seen[first:end, views.run_row[run] : views.run_row[run] + views.run_length[run]] = True
        seen[first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
    return seen.to(views.device)


def read_visibility(backend: FullAttention, need: Need, views: AttentionViews) -> Passes:
    """Which rows each row gets a part of, and which its gradient reaches, by head: bool, [R, H, R] each.

    Values and gradients of outputs are one-hot in all rows: as many columns at a time as a value has channels.
    """
    each = torch.eye(views.rows, device=views.device)
    out, dv = _weighted(backend, need, views, each, each)
    least = 1 / views.rows
    return Passes(out > least / 2, dv.permute(2, 1, 0) > least / 2)


def miscounted(backend: FullAttention, need: Need, views: AttentionViews, seen: Tensor) -> Passes:
    """Which rows do not see as many rows of each digit as they should, and are not seen by as many: bool, [R, H] each.

    A row is numbered by two digits, and every sum counts at most sqrt(R) rows, which 16 bits tell apart up to some
    thousand rows. That takes a few calls where the whole matrix takes R over the channels of a value.

    Args:
        backend: to look at.
        need: heads, head dims, dtype.
        views: which rows should see which.
        seen: the same as a matrix, [R, R].
    """
    digits = _digits(views.rows).to(views.device)
    number = seen.sum(1)
    number = torch.where(number > 0, number, views.rows)[:, None]  # rows that see nothing: any output is too much
    out, dv = _weighted(backend, need, views, digits, digits * number)
    counts, wanted = Passes(out * number[:, None], dv), seen.float()
    return Passes(_differ(counts.forward, wanted @ digits), _differ(counts.backward, wanted.T @ digits))


def _digits(rows: int) -> Tensor:
    """Both digits of each row's number in the base that two of them need, one-hot, [R, M]."""
    number, base = torch.arange(rows), isqrt(rows - 1) + 1
    return torch.cat([one_hot(digit, base) for digit in (number % base, number // base)], dim=1).float()


def _differ(found: Tensor, wanted: Tensor) -> Tensor:
    """Whether [R, H, M] are other whole numbers than [R, M], or none, [R, H]."""
    return ~((found - wanted[:, None]).abs() < 0.5).all(2)


def _weighted(backend: FullAttention, need: Need, views: AttentionViews, values: Tensor, upstream: Tensor) -> Passes:
    """Outputs of values and gradients of values by query head, float32, [R, H, M] each.

    Gradients enter one query head of each key/value head at a time.

    Args:
        backend: to look at.
        need: heads, head dims, dtype.
        views: which rows see which.
        values: [R, M].
        upstream: gradient of the outputs, [R, M].
    """
    (heads, groups), (key_dim, value_dim) = need.full_heads, need.full_head_dims
    sizes = (heads, key_dim), (groups, key_dim), (groups, value_dim)
    options: dict[str, Any] = {"dtype": need.dtype, "device": views.device}
    found = Passes(*torch.zeros(2, views.rows, heads, values.shape[1], device=views.device))
    for column in range(0, values.shape[1], value_dim):
        some = slice(column, min(column + value_dim, values.shape[1]))
        width = some.stop - some.start
        for head in (slice(first, None, heads // groups) for first in range(heads // groups)):
            inputs = [torch.zeros(views.rows, *size, **options) for size in sizes]
            inputs[2][..., :width] = values[:, None, some]
            q, k, v = (each.requires_grad_() for each in inputs)
            out = backend.attend(q, k, v, views, 1.0)
            grad = torch.zeros_like(out)
            grad[:, head, :width] = upstream[:, None, some].to(need.dtype)
            (dv,) = torch.autograd.grad(out, v, grad)
            found.forward[:, head, some] = out.detach()[:, head, :width].float()
            found.backward[:, head, some] = dv[..., :width].float()
    return found
