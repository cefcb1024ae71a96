"""Log-probs of all semantic positions from the compact rows, with a hand-written backward (equations 17 and 19).

Logits exist for one block of rows at a time, in forward and again in backward; nothing of their size is kept.
Backward only computes logits of rows whose positions have a gradient: in rollouts most tokens are not trained.
On a GPU products of 16-bit numbers are summed in float32, and gradients of logits are rounded to 16 bits before them.
Shape suffixes: b rows of a block, g distributions of a group, V vocabulary (of this process if it is split),
M positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.linear.dtypes import wide_dtype
from harts.backends.split import HeadSplit
from harts.stages.restore.cells import Cells, group_predictions
from harts.stages.restore.head_split import Part, join_parts
from harts.stages.restore.labels import Predictions
from harts.stages.restore.products import operand, product
from harts.stages.restore.softmax import Wanted, d_logits, entropy_of, scaled_logits


def mapped_logprobs(
    hidden: Tensor,
    weight: Tensor,
    wanted: Predictions,
    *,
    rows_per_block: int,
    entropy: bool = False,
    split: HeadSplit | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Read one log-prob a semantic position out of the logits `hidden @ weight.T`.

    With `split`, all processes of its group call this with equal `hidden` and `wanted`, and get equal bits. Forward
    reduces a few numbers a distribution over the group, backward nothing: it takes the loss to be computed alike by
    all of them. Each then has the gradient of its own rows of the head, and of `hidden` the part that comes from
    these rows alone, which the model sums over the group.

    Args:
        hidden: [R, h].
        weight: LM head, [V, h]; with `split` this process's rows of it, maybe none.
        wanted: which row predicts what, M positions; targets are token ids of the whole vocabulary.
        rows_per_block: rows whose logits exist at the same time.
        entropy: also give the entropy of the distribution each position was drawn from.
        split: how the vocabulary is split over processes; None: it is not.

    Returns:
        Log-probs [M] and entropies [M] or None, in nats, in float32 or wider. Memory is O(block * V + M).
    """
    logprobs, entropies = _Mapped.apply(hidden, weight, wanted, rows_per_block, entropy, split)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        wanted: Predictions,
        rows_per_block: int,
        entropy: bool,
        split: HeadSplit | None,
    ) -> tuple[Tensor, Tensor | None]:
        own = None if split is None else range(split.first, split.first + len(weight))
        cells = group_predictions(wanted, rows_per_block, hidden.device, own)
        by_cell, entropies, part = _read(hidden, weight, cells, entropy, split is not None)
        logprobs, log_share = cells.spread(by_cell, cells.cell_length), None
        if split is not None and part is not None:
            whole = join_parts(part, by_cell, entropies, split.group)
            logprobs = cells.spread(whole.target, cells.cell_length) - cells.spread(
                whole.top, cells.distribution_length
            )
            logprobs -= cells.spread(whole.log_sum, cells.distribution_length)
            entropies, log_share = whole.entropy, whole.log_share
        ctx.save_for_backward(hidden, weight, entropies, log_share)
        ctx.wanted, ctx.rows_per_block, ctx.own = wanted, rows_per_block, own
        ctx.numbers = None if entropies is None and log_share is None else cells.numbers()
        return logprobs, None if entropies is None else cells.spread(entropies, cells.distribution_length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Tensor, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, entropies, log_share = ctx.saved_tensors
        live, d_logprobs, d_entropy = _live(d_logprobs, d_entropy)
        cells = group_predictions(ctx.wanted.take(live.cpu().numpy()), ctx.rows_per_block, hidden.device, ctx.own)
        number = None if ctx.numbers is None else cells.first(ctx.numbers[live], cells.distribution_length)
        wanted = Wanted(
            by_cell=cells.collect(d_logprobs, cells.cell_length),
            total=cells.collect(d_logprobs, cells.distribution_length),
            spread=None if d_entropy is None else cells.collect(d_entropy, cells.distribution_length),
            entropy=None if d_entropy is None else entropies[number],
            log_share=None if log_share is None else log_share[number],
        )
        head = operand(weight, hidden)
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_head = torch.zeros_like(head, dtype=wide_dtype(hidden, weight)) if ctx.needs_input_grad[1] else None
        for block in cells.blocks:
            rows_bh = operand(hidden[block.rows], weight)
            logits_bV = product(rows_bh, head.T)
            d_logits_bV = torch.zeros_like(logits_bV)
            for group in block.groups:
                d_gV = d_logits(scaled_logits(logits_bV, group), group, wanted)
                if group.local is None:
                    d_logits_bV += d_gV
                else:
                    d_logits_bV[group.local] += d_gV
            d_logits_bV = d_logits_bV.to(head.dtype)
            if d_hidden is not None:
                d_hidden[block.rows] = product(d_logits_bV, head).to(hidden.dtype)
            if d_head is not None:
                d_head += product(d_logits_bV.T, rows_bh)
        return d_hidden, None if d_head is None else d_head.to(weight.dtype), None, None, None, None


def _read(
    hidden: Tensor, weight: Tensor, cells: Cells, entropy: bool, split: bool
) -> tuple[Tensor, Tensor | None, Part | None]:
    """What this process's vocabulary tells: of each cell its log-prob, or its logit if split; entropies; its part."""
    head = operand(weight, hidden)
    by_cell = hidden.new_zeros(len(cells.cell_length), dtype=wide_dtype(hidden, weight))
    entropies = by_cell.new_zeros(len(cells.distribution_length)) if entropy else None
    part = Part.empty(by_cell, len(cells.distribution_length)) if split else None
    for block in cells.blocks:
        logits_bV = product(operand(hidden[block.rows], weight), head.T)
        for group in block.groups:
            scaled_gV = scaled_logits(logits_bV, group)
            logp_gV = scaled_gV.log_softmax(dim=1)
            if part is None:
                by_cell[group.cell] = logp_gV[group.slot, group.target]
            else:
                by_cell[group.cell] = scaled_gV[group.slot, group.target]
                part.read(group, scaled_gV, logp_gV)
            del scaled_gV
            if entropies is not None:
                entropies[group.distribution] = entropy_of(logp_gV)
    return by_cell, entropies, part


def _live(d_logprobs: Tensor, d_entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Positions that have a gradient, in order, and their gradients; None if no entropy has one."""
    nonzero = d_logprobs != 0
    if d_entropy is not None:
        spread = d_entropy != 0
        nonzero = nonzero | spread
        d_entropy = d_entropy if bool(spread.any()) else None
    live = nonzero.nonzero()[:, 0]
    return live, d_logprobs[live], None if d_entropy is None else d_entropy[live]
