"""One forward pass of a Megatron model over the compact rows of one microbatch.

Megatron hands `packed_seq_params` to every attention module as it is, in recomputation too. A subclass of it carries
the plan there, and what layers leave behind. R is the number of compact rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from harts.backends.base import FullAttention, LinearAttention
from harts.backends.model.moe import RouterStatistics
from harts.backends.plan_tensors import PlanTensors
from harts.errors import BackendError

TABLE_STEP = 4096
"""Rotary tables have multiples of so many positions, so that microbatches of similar lengths share one."""


class RowSplit(NamedTuple):
    """Which of the rows of a microbatch this process has; one process has all."""

    part: int = 0
    parts: int = 1
    """Of context parallelism: inside a layer it has one of so many parts."""
    piece: int = 0
    pieces: int = 1
    """Of sequence parallelism: between layers it has one of so many pieces of its part."""

    def inside(self, rows: int) -> slice:
        """Of a layer: what its projections give."""
        size = rows // self.parts
        return slice(self.part * size, (self.part + 1) * size)

    def between(self, rows: int) -> slice:
        """Layers, and in experts."""
        size = rows // (self.parts * self.pieces)
        first = (self.part * self.pieces + self.piece) * size
        return slice(first, first + size)


@dataclass(eq=False)
class TreeParams(PackedSeqParams):  # type: ignore[misc]  # megatron has no types
    """Reaches every layer as `packed_seq_params`.

    To Megatron it looks like one packed sequence of the rows inside a layer: its attention then takes rows without a
    batch dimension, and rotates row c by row c of the rotary table that it is given. What a row attends to is in the
    plan alone.
    """

    plan: PlanTensors = field(kw_only=True)
    linear: LinearAttention = field(kw_only=True)
    full: FullAttention = field(kw_only=True)
    rows: RowSplit = field(kw_only=True)
    ran: dict[int, str] = field(default_factory=dict, kw_only=True)
    """Layers, counted from 1, whose attention ran on the plan, and its kind: `linear` or `full`."""
    statistics: dict[int, RouterStatistics] = field(default_factory=dict, kw_only=True)
    """Of each layer with experts, values without gradient: `report` gives them theirs."""
    gradients: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    """Of the loss by the sums of z and of balance over the layers; set when the backward pass begins."""

    @property
    def position_ids(self) -> Tensor:
        """Of the rows inside a layer."""
        return self.plan.position_ids[self.rows.inside(len(self.plan.position_ids))]

    @property
    def input_ids(self) -> Tensor:
        """Of the rows inside a layer."""
        return self.plan.input_ids[self.rows.inside(len(self.plan.input_ids))]

    @property
    def multiplicity(self) -> Tensor:
        """q_c of the rows between layers."""
        return self.plan.multiplicity[self.rows.between(len(self.plan.multiplicity))]


def tree_params(
    plan: PlanTensors, linear: LinearAttention, full: FullAttention, rows: RowSplit | None = None
) -> TreeParams:
    """The carrier of a plan.

    Raises:
        BackendError: rows cannot be split evenly.
    """
    rows, count = rows or RowSplit(), len(plan.input_ids)
    if count % (rows.parts * rows.pieces):
        wanted = rows.parts * rows.pieces
        raise BackendError(f"layout.row_multiple: the layout has {count} rows, the model needs a multiple of {wanted}")
    cu = torch.tensor([0, count // rows.parts], dtype=torch.int32, device=plan.input_ids.device)
    longest = int(np.diff(plan.views.cu_k).max())
    table = -(-longest // TABLE_STEP) * TABLE_STEP
    return TreeParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=table,
        max_seqlen_kv=table,
        plan=plan,
        linear=linear,
        full=full,
        rows=rows,
    )


def plan_of(packed_seq_params: Any, layer: int, kind: str) -> TreeParams:
    """The call that a layer's attention runs in.

    Raises:
        BackendError: it is called without a plan.
    """
    if not isinstance(packed_seq_params, TreeParams):
        raise BackendError(f"layer {layer}: its {kind} attention is called without a plan")
    packed_seq_params.ran[layer] = kind
    return packed_seq_params


def attach(probs: Tensor, found: RouterStatistics, layer: int, call: TreeParams) -> Tensor:
    """Let the gradients of a layer's statistics flow where its routing's do.

    Megatron's recomputation runs a layer without gradient first, so a statistic cannot be returned from it: its
    gradient is added in the backward pass of the layer, when `report` has told what it is.

    Args:
        probs: routing of the layer, any shape.
        found: statistics of the layer.
        layer: its number.
        call: of this forward pass.

    Returns:
        `probs`.
    """
    values = RouterStatistics(*(each.detach() for each in found))
    call.statistics.setdefault(layer, values)
    attached: Tensor = _Attach.apply(probs, found.z, found.balance, call)  # type: ignore[no-untyped-call]
    return attached


def report(hidden: Tensor, call: TreeParams) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of z and balance over this process's layers with experts, whose gradients reach the layers.

    Args:
        hidden: output of the last layer, any shape; what it is used for afterwards must be what is returned here.
        call: of this forward pass.

    Returns:
        hidden, z and balance, scalars; zeros without such layers.
    """
    found = call.statistics.values()
    nothing = call.plan.multiplicity.new_zeros(())
    z, balance = sum((each.z for each in found), nothing), sum((each.balance for each in found), nothing)
    reported: tuple[Tensor, Tensor, Tensor] = _Report.apply(hidden, z, balance, call)  # type: ignore[no-untyped-call]
    return reported


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, z: Tensor, balance: Tensor, call: TreeParams) -> Tensor:
        ctx.call = call
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.gradients is None:
            raise BackendError("model: a layer's backward pass began before that of the model's output")
        return grads[0], *ctx.call.gradients, None


class _Report(torch.autograd.Function):
    """Comes after all layers, so its backward pass comes before theirs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, z: Tensor, balance: Tensor, call: TreeParams) -> tuple[Tensor, ...]:
        ctx.call = call
        return hidden.view_as(hidden), z.clone(), balance.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.gradients = grads[1], grads[2]
        return grads[0], None, None, None
