"""One forward pass of a Megatron model over the compact rows of one microbatch.

Megatron hands `packed_seq_params` to every attention module as it is, in recomputation too. A subclass of it carries
the plan there, and what layers leave behind. R is the number of compact rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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


@dataclass(eq=False)
class TreeParams(PackedSeqParams):  # type: ignore[misc]  # megatron has no types
    """Reaches every layer as `packed_seq_params`.

    To Megatron it looks like one packed sequence of all rows: its attention then takes rows without a batch dimension,
    and rotates row c by row c of the rotary table that it is given. What a row attends to is in the plan alone.
    """

    plan: PlanTensors = field(kw_only=True)
    linear: LinearAttention = field(kw_only=True)
    full: FullAttention = field(kw_only=True)
    ran: dict[int, str] = field(default_factory=dict, kw_only=True)
    """Layers, counted from 1, whose attention ran on the plan, and its kind: `linear` or `full`."""
    statistics: dict[int, RouterStatistics] = field(default_factory=dict, kw_only=True)
    """Of each layer with experts, values without gradient: `report` gives them theirs."""
    gradients: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    """Of the loss by the sums of z and of balance over the layers; set when the backward pass begins."""


def tree_params(plan: PlanTensors, linear: LinearAttention, full: FullAttention) -> TreeParams:
    """The carrier of a plan."""
    cu = torch.tensor([0, len(plan.input_ids)], dtype=torch.int32, device=plan.input_ids.device)
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
    """Sums of z and balance over the layers with experts, whose gradients reach the layers.

    Args:
        hidden: output of the last layer, [R, hidden]; what it is used for afterwards must be what is returned here.
        call: of this forward pass.

    Returns:
        hidden [R, hidden], z and balance, scalars.
    """
    found = call.statistics.values()
    z, balance = torch.stack([each.z for each in found]).sum(), torch.stack([each.balance for each in found]).sum()
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
