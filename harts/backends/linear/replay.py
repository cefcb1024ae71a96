"""Packed rows of all rounds from compact rows; gradients of replays come back in a fixed order.

Shape suffixes: R compact rows, T packed rows of all rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harts.backends.linear.dtypes import wide_dtype
from harts.backends.linear.tree.settlement import Settlement, settlement
from harts.backends.placing import place
from harts.backends.plan_tensors import PlanTensors
from harts.ir.runs import offsets


class Replays(NamedTuple):
    """Which packed rows are copies of which compact rows; int64 on the device of the plan."""

    gather: Tensor
    """Compact row of each packed row, [T]."""
    own: Tensor
    """The packed row that owns each compact row that is a token, [C]."""
    sums: Settlement
    """Compact rows that are replayed, and the packed rows that replay them; none is owned by one of those."""


def gather_rows(x: Tensor, plan: PlanTensors) -> Tensor:
    """Packed rows [T, ...] of all rounds, one round after the other, from compact rows x [R, ...].

    The gradient of a compact row is that of its own packed row plus those of its replays, summed in float32 or wider,
    in the order of the packed rows, on every device.
    """
    rows: Tensor = _Gather.apply(x, plan.once("replays", lambda: _replays(plan)))  # type: ignore[no-untyped-call]
    return rows


def _replays(plan: PlanTensors) -> Replays:
    gather = torch.cat([each.gather for each in plan.rounds])
    begin = offsets(np.array([len(each.gather) for each in plan.rounds], dtype=np.int64)).tolist()
    rounds = list(zip(plan.rounds, begin, strict=False))
    own = torch.cat([each.own + base for each, base in rounds])
    replayed = np.concatenate([each.replayed() + base for each, base in rounds])
    none = np.zeros(0, dtype=np.int64)
    sums = settlement(gather.numpy(), none, replayed, plan.device)
    return Replays(place(gather, plan.device), place(own, plan.device), sums)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, replays: Replays) -> Tensor:
        ctx.replays, ctx.rows = replays, len(x)
        return x.index_select(0, replays.gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        replays, packed = ctx.replays, grads[0].contiguous()
        dx = packed.new_zeros(ctx.rows, *packed.shape[1:])
        dx[: len(replays.own)] = packed.index_select(0, replays.own)
        if len(replays.sums.row):
            _add_replays(dx, packed, replays.sums)
        return dx, None


def _add_replays(dx: Tensor, packed: Tensor, sums: Settlement) -> None:
    if dx.is_cuda:
        from harts.backends.linear.tree.settle import settle_rows  # noqa: PLC0415  (Triton, where there is a GPU)

        settle_rows([dx], [packed], *sums)
        return
    wide = dx.index_select(0, sums.row).to(wide_dtype(dx))
    place = torch.repeat_interleave(torch.arange(len(sums.row)), sums.offset.diff())
    wide.index_add_(0, place, packed.index_select(0, sums.source).to(wide.dtype))  # in order on a CPU
    dx[sums.row] = wide.to(dx.dtype)
