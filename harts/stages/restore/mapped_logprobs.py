"""Log-probs of all semantic positions from the compact rows, with a hand-written backward (equations 17 and 19).

Logits exist for one block of rows at a time, in forward and again in backward; nothing of their size is kept.
Backward only computes logits of rows whose positions have a gradient: in rollouts most tokens are not trained.
On a GPU products of 16-bit numbers are summed in float32, and gradients of logits are rounded to 16 bits before them.
Shape suffixes: b rows of a block, g distributions of a group, V vocabulary, M positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.linear.dtypes import wide_dtype
from harts.ir.base import Int64
from harts.stages.restore.cells import Group, group_predictions
from harts.stages.restore.labels import Predictions
from harts.stages.restore.products import operand, product


def mapped_logprobs(
    hidden: Tensor, weight: Tensor, wanted: Predictions, *, rows_per_block: int, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Read one log-prob a semantic position out of the logits `hidden @ weight.T`.

    Args:
        hidden: [R, h].
        weight: LM head, [V, h].
        wanted: which row predicts what, M positions.
        rows_per_block: rows whose logits exist at the same time.
        entropy: also give the entropy of the distribution each position was drawn from.

    Returns:
        Log-probs [M] and entropies [M] or None, in nats, in float32 or wider. Memory is O(block * V + M).
    """
    logprobs, entropies = _Mapped.apply(hidden, weight, wanted, rows_per_block, entropy)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, hidden: Tensor, weight: Tensor, wanted: Predictions, rows_per_block: int, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(hidden, weight)
        ctx.wanted, ctx.rows_per_block = wanted, rows_per_block
        cells = group_predictions(wanted, rows_per_block, hidden.device)
        dtype = wide_dtype(hidden, weight)
        head = operand(weight, hidden)
        by_cell = hidden.new_empty(len(cells.cell_length), dtype=dtype)
        by_distribution = hidden.new_empty(len(cells.distribution_length) if entropy else 0, dtype=dtype)
        for block in cells.blocks:
            logits_bV = product(operand(hidden[block.rows], weight), head.T)
            for group in block.groups:
                logp_gV = _scaled(logits_bV, group).log_softmax(dim=1)
                by_cell[group.cell] = logp_gV[group.slot, group.target]
                if entropy:
                    by_distribution[group.distribution] = _entropy(logp_gV)
        logprobs = cells.spread(by_cell, cells.cell_length)
        return logprobs, cells.spread(by_distribution, cells.distribution_length) if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        live, d_logprobs, d_entropy = _live(d_logprobs, d_entropy)
        cells = group_predictions(ctx.wanted.take(live), ctx.rows_per_block, hidden.device)
        by_cell = cells.collect(d_logprobs, cells.cell_length)
        total = cells.collect(d_logprobs, cells.distribution_length)
        spread = None if d_entropy is None else cells.collect(d_entropy, cells.distribution_length)
        head = operand(weight, hidden)
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_head = torch.zeros_like(head, dtype=wide_dtype(hidden, weight)) if ctx.needs_input_grad[1] else None
        for block in cells.blocks:
            rows_bh = operand(hidden[block.rows], weight)
            logits_bV = product(rows_bh, head.T)
            d_logits_bV = torch.zeros_like(logits_bV)
            for group in block.groups:
                d_gV = _d_logits(_scaled(logits_bV, group), group, by_cell, total, spread)
                if group.local is None:
                    d_logits_bV += d_gV
                else:
                    d_logits_bV[group.local] += d_gV
            d_logits_bV = d_logits_bV.to(head.dtype)
            if d_hidden is not None:
                d_hidden[block.rows] = product(d_logits_bV, head).to(hidden.dtype)
            if d_head is not None:
                d_head += product(d_logits_bV.T, rows_bh)
        return d_hidden, None if d_head is None else d_head.to(weight.dtype), None, None, None


def _live(d_logprobs: Tensor, d_entropy: Tensor | None) -> tuple[Int64, Tensor, Tensor | None]:
    """Positions that have a gradient, and their gradients; None if no entropy has one."""
    nonzero = d_logprobs != 0
    if d_entropy is not None:
        spread = d_entropy != 0
        nonzero = nonzero | spread
        d_entropy = d_entropy if bool(spread.any()) else None
    live = nonzero.nonzero()[:, 0]
    return live.cpu().numpy(), d_logprobs[live], None if d_entropy is None else d_entropy[live]


def _scaled(logits_bV: Tensor, group: Group) -> Tensor:
    picked = logits_bV if group.local is None else logits_bV[group.local]
    return picked if group.scale is None else picked * group.scale.to(picked.dtype)


def _entropy(logp_gV: Tensor) -> Tensor:
    return -(logp_gV.exp() * logp_gV).sum(dim=1)


def _d_logits(scaled_gV: Tensor, group: Group, by_cell: Tensor, total: Tensor, spread: Tensor | None) -> Tensor:
    """Gradient of one group's logits.

    A log-prob gives onehot - p, an entropy H gives -p * (log p + H); each cell is a different (row, target).
    """
    logp_gV = scaled_gV.log_softmax(dim=1)
    p_gV = logp_gV.exp()
    d_gV = p_gV * -total[group.distribution, None]
    if spread is not None:
        mean_g1 = (p_gV * logp_gV).sum(dim=1, keepdim=True)
        d_gV -= spread[group.distribution, None] * p_gV * (logp_gV - mean_g1)
    d_gV[group.slot, group.target] += by_cell[group.cell]
    return d_gV if group.scale is None else d_gV * group.scale.to(d_gV.dtype)
