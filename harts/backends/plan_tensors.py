"""A compact layout as torch tensors: built once a microbatch, shared by all layers and by recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.ir import CompactLayout
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets


@dataclass(frozen=True)
class LinearRound:
    """One packed linear-attention call."""

    gather: Tensor
    """Compact row of each packed row, replay rows first in each sequence, [T]."""
    own: Tensor
    """Packed index of the rows that this round owns, [own]."""
    own_rows: slice
    """Compact rows of this round: contiguous, in packed order."""
    cu_seqlens: Tensor
    """On the host, [N + 1]."""
    initial_state: list[int]
    """State each sequence starts from, -1 is zero, [N]."""
    states: list[int]
    """States that the call returns, [P]."""
    state_sequence: Tensor
    """On the host, [P]."""
    state_offset: Tensor
    """On the host, [P]."""


@dataclass(frozen=True)
class AttentionViews:
    """Branch i: queries are rows cu_q[i]:cu_q[i+1]; keys are rows key_row[cu_k[i]:cu_k[i+1]], ancestors first."""

    cu_q: list[int]
    cu_k: list[int]
    key_row: Tensor
    rows: int
    """R, padding included."""


@dataclass(frozen=True)
class PlanTensors:
    """Everything that the layers of one microbatch share."""

    rows: int
    """C, the rows that are tokens; rows past it are padding."""
    chunk_size: int
    input_ids: Tensor
    """int64, [R]."""
    position_ids: Tensor
    """int64, [R]."""
    multiplicity: Tensor
    """q_c in float32 or wider (bfloat16 would round counts), 0 on padding, [R]."""
    cu_rows: list[int]
    """Own rows of each sequence, [Q + 1]."""
    context_row: Tensor
    """Rows of the conv context, -1 is zero, [Q, w - 1]."""
    conv_row: Tensor
    """Row under each tap of the causal conv, oldest first; C stands for a zero row, [w, C]."""
    rounds: tuple[LinearRound, ...]
    num_states: int
    views: AttentionViews


def build_plan_tensors(layout: CompactLayout, device: str, dtype: torch.dtype) -> PlanTensors:
    """Expand the runs of a layout into index tensors on a device."""

    def put(array: Any) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=np.int64)).to(device)

    plan = layout.plan
    rounds = tuple(_round(layout, index, put) for index in range(plan.rounds))
    return PlanTensors(
        rows=layout.rows,
        chunk_size=plan.chunk_size,
        input_ids=put(layout.input_ids),
        position_ids=put(layout.position_ids),
        multiplicity=put(layout.multiplicity).to(dtype),
        cu_rows=layout.cu_rows.tolist(),
        context_row=put(layout.context_row),
        conv_row=put(_conv_rows(layout)),
        rounds=rounds,
        num_states=len(plan.state_sequence),
        views=_views(layout, put),
    )


def _round(layout: CompactLayout, index: int, put: Any) -> LinearRound:
    plan = layout.plan
    first, last = plan.round_offset[index], plan.round_offset[index + 1]
    replay, own = np.diff(layout.replay_offset)[first:last], np.diff(layout.cu_rows)[first:last]
    cu = offsets(replay + own)
    begin, end = layout.cu_rows[first], layout.cu_rows[last]
    gather = np.empty(cu[-1], dtype=np.int64)
    is_own = expand_runs(cu[:-1] + replay, own)
    gather[is_own] = np.arange(begin, end)
    gather[expand_runs(cu[:-1], replay)] = layout.replay_row[layout.replay_offset[first] : layout.replay_offset[last]]
    states = np.flatnonzero((plan.state_sequence >= first) & (plan.state_sequence < last))
    maker = plan.state_sequence[states]
    return LinearRound(
        gather=put(gather),
        own=put(is_own),
        own_rows=slice(int(begin), int(end)),
        cu_seqlens=torch.from_numpy(cu),
        initial_state=plan.initial_state[first:last].tolist(),
        states=states.tolist(),
        state_sequence=torch.from_numpy(maker.astype(np.int64) - first),
        state_offset=torch.from_numpy(plan.state_position[states] - plan.anchor[maker]),
    )


def _conv_rows(layout: CompactLayout) -> Int64:
    width = layout.context_row.shape[1] + 1
    begin = np.repeat(layout.cu_rows[:-1], np.diff(layout.cu_rows))
    sequence = np.repeat(np.arange(len(layout.context_row)), np.diff(layout.cu_rows))
    taps = np.arange(layout.rows) - np.arange(width)[::-1, None]
    before = taps - begin  # negative: in the context of the row's sequence
    tap, row = np.nonzero(before < 0)
    taps[tap, row] = layout.context_row[sequence[row], before[tap, row] + width - 1]
    return np.where(taps < 0, layout.rows, taps)


def _views(layout: CompactLayout, put: Any) -> AttentionViews:
    own = np.diff(layout.cu_rows)
    runs = np.diff(layout.ancestor_offset)
    count = len(own)
    # interleave: the ancestor runs of a branch, then its own rows as one more run
    place = np.arange(len(layout.ancestor_row)) + np.repeat(np.arange(count), runs)
    mine = layout.ancestor_offset[1:] + np.arange(count)
    start = np.empty(len(layout.ancestor_row) + count, dtype=np.int64)
    length = np.empty_like(start)
    start[place], length[place] = layout.ancestor_row, layout.ancestor_length
    start[mine], length[mine] = layout.cu_rows[:-1], own
    keys = own + layout.plan.tree.start[layout.plan.head]
    return AttentionViews(
        cu_q=layout.cu_rows.tolist(),
        cu_k=offsets(keys).tolist(),
        key_row=put(expand_runs(start, length)),
        rows=len(layout.input_ids),
    )
