"""A compact layout as torch tensors: built once a microbatch, shared by all layers and by recomputation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from harts.backends.placing import place
from harts.ir import CompactLayout
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Memo:
    """Keeps what is derived from a value as long as the value itself lives; a copy by `replace` starts anew."""

    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave when it was first called under this key.

        Args:
            key: names the thing and all that it depends on beside this object (device, dtype, a backend's settings).
            make: called on first use. If it raises, nothing is kept.
        """
        if key not in self._made:
            with torch.inference_mode(False):  # what is kept may serve a backward pass later
                self._made[key] = make()
        made: T = self._made[key]
        return made


@dataclass(frozen=True, eq=False)
class PackedCall(Memo):
    """What one packed call runs, apart from its rows and states: made once a plan, shared by all layers.

    Sequence i is packed rows cu_seqlens[i]:cu_seqlens[i + 1] and starts on a chunk boundary. All tensors are int64 on
    the host.
    """

    chunk_size: int
    """Tokens a chunk."""
    cu_seqlens: Tensor
    """[N + 1]."""
    state_sequence: Tensor
    """Sequence of each requested state, [P]."""
    state_offset: Tensor
    """Tokens of that sequence after which the state is taken: a multiple of chunk_size, or all of them, [P]."""


@dataclass(frozen=True)
class LinearRound:
    """One packed linear-attention call."""

    gather: Tensor
    """Compact row of each packed row, replay rows first in each sequence, int64 on the host, [T]."""
    own: Tensor
    """Packed index of the rows that this round owns, int64 on the host, [own]."""
    own_rows: slice
    """Compact rows of this round: contiguous, in packed order."""
    call: PackedCall
    """N sequences, P requested states."""
    initial_state: list[int]
    """State each sequence starts from, -1 is zero, [N]."""
    states: list[int]
    """States that the call returns, [P]."""

    def replayed(self) -> Int64:
        """Packed index of the replay rows, on the host, [T - own]."""
        replay = np.ones(len(self.gather), dtype=np.bool_)
        replay[self.own.numpy()] = False
        return np.flatnonzero(replay)


@dataclass(frozen=True, eq=False)
class AttentionViews(Memo):
    """Which rows see which, as runs: made once a microbatch, shared by all layers; B branches, all arrays on the host.

    Queries of branch i are rows cu_q[i]:cu_q[i + 1]. Its keys are the rows of its runs, of number run_offset[i] up to
    run_offset[i + 1], in the order of its path: ancestors, which every query sees, then its own rows, causally.
    """

    cu_q: Int64
    """[B + 1]."""
    run_offset: Int64
    """[B + 1]."""
    run_row: Int64
    """First row of each run."""
    run_length: Int64
    """Rows of each run; the last run of a branch is its own."""
    rows: int
    """R, padding included."""
    device: torch.device

    @property
    def cu_k(self) -> Int64:
        """Keys of branch i, listed branch after branch, are cu_k[i]:cu_k[i + 1], [B + 1]."""
        return offsets(self.run_length)[self.run_offset]

    @property
    def key_row(self) -> Tensor:
        """Row of every key of every branch, int64 on the device, [sum of keys]; listed on first use."""
        return self.once("key_row", lambda: place(expand_runs(self.run_row, self.run_length), self.device))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        queries, keys = np.diff(self.cu_q), np.diff(self.cu_k)
        return int((queries * keys - queries * (queries - 1) // 2).sum())


@dataclass(frozen=True, eq=False)
class PlanTensors(Memo):
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
    window: Tensor
    """Row under each tap of the causal conv, oldest first; C stands for a zero row, int64 on the host, [w, C]."""
    rounds: tuple[LinearRound, ...]
    num_states: int
    views: AttentionViews
    largest_token: tuple[int, int]
    """A row that holds the largest token id, and that id."""

    @property
    def device(self) -> torch.device:
        """Where the layers run."""
        return self.input_ids.device

    @property
    def conv_row(self) -> Tensor:
        """`window` on the device; placed on first use."""
        return self.once("conv_row", lambda: place(self.window, self.device))


def build_plan_tensors(layout: CompactLayout, device: str, dtype: torch.dtype) -> PlanTensors:
    """Expand the runs of a layout into index tensors on a device."""

    def put(array: Any) -> Tensor:
        return place(np.asarray(array, dtype=np.int64), device)

    plan, largest = layout.plan, int(layout.input_ids.argmax())
    return PlanTensors(
        rows=layout.rows,
        chunk_size=plan.chunk_size,
        input_ids=put(layout.input_ids),
        position_ids=put(layout.position_ids),
        multiplicity=put(layout.multiplicity).to(dtype),
        cu_rows=layout.cu_rows.tolist(),
        context_row=put(layout.context_row),
        window=torch.from_numpy(_conv_rows(layout)),
        rounds=tuple(_round(layout, index) for index in range(plan.rounds)),
        num_states=len(plan.state_sequence),
        views=attention_views(layout, device),
        largest_token=(largest, int(layout.input_ids[largest])),
    )


def _round(layout: CompactLayout, index: int) -> LinearRound:
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
        gather=torch.from_numpy(gather),
        own=torch.from_numpy(is_own),
        own_rows=slice(int(begin), int(end)),
        call=PackedCall(
            chunk_size=plan.chunk_size,
            cu_seqlens=torch.from_numpy(cu),
            state_sequence=torch.from_numpy(maker.astype(np.int64) - first),
            state_offset=torch.from_numpy(plan.state_position[states] - plan.anchor[maker]),
        ),
        initial_state=plan.initial_state[first:last].tolist(),
        states=states.tolist(),
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


def attention_views(layout: CompactLayout, device: str | torch.device) -> AttentionViews:
    """The views that full attention takes of a layout's rows."""
    branches = np.arange(len(layout.cu_rows) - 1)
    # the ancestor runs of a branch, then its own rows as one more run
    place = np.arange(len(layout.ancestor_row)) + np.repeat(branches, np.diff(layout.ancestor_offset))
    own = layout.ancestor_offset[1:] + branches
    row = np.empty(len(place) + len(own), dtype=np.int64)
    length = np.empty_like(row)
    row[place], length[place] = layout.ancestor_row, layout.ancestor_length
    row[own], length[own] = layout.cu_rows[:-1], np.diff(layout.cu_rows)
    return AttentionViews(
        cu_q=layout.cu_rows,
        run_offset=layout.ancestor_offset + np.arange(len(layout.cu_rows)),
        run_row=row,
        run_length=length,
        rows=len(layout.input_ids),
        device=torch.device(device),
    )
