"""Where everything of one execution lies: chunk grids, the table of sequences, slots of states, and row settlements.

Built on the host once a plan, then shared by all layers. A sequence that replays rows has a head: its replay rows and
the own rows that share their last chunk are gathered into a small buffer, and all chunks of that buffer are computed
beside those of the compact rows, which stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.linear.tree import table
from harts.backends.linear.tree.grid import CHUNK, Grid, chunk_grid
from harts.backends.linear.tree.order import Chains, backward_order, forward_order
from harts.backends.linear.tree.settlement import Settlement, settlement
from harts.backends.placing import place
from harts.ir.base import Int64
from harts.ir.runs import expand_runs, offsets

MAX_CHUNKS = 512
"""Chunks of a span: offsets within it are 32 bits wide in the kernels."""
Put = Callable[[np.ndarray], Tensor]
"""Copies an integer array to the device as int64."""


@dataclass(frozen=True)
class Sequences:
    """The input sequences of all rounds, producers before consumers, on the host. N sequences, P produced states."""

    cu_rows: Int64
    """Own rows of each sequence, [N + 1]."""
    replay: Int64
    """Replay rows of each sequence, [N]."""
    replay_row: Int64
    """Row of each replay row, sequences one after another."""
    source: Int64
    """Slot that each sequence starts from, -1 is the zero state, [N]."""
    given: int
    """Slots below it hold states from outside, one consumer each; produced states follow, by producer."""
    producer: Int64
    """Sequence that produces each state, rising, [P]."""
    produced_after: Int64
    """Rows of the producer after which it is taken, replay rows included: whole chunks or all, [P]."""


@dataclass(frozen=True)
class Heads:
    """The buffer of gathered rows. X head rows."""

    grid: Grid
    row: Tensor
    """Row that each head row is a copy of, [X]."""
    replayed: Tensor
    """Whether a head row is a replay row, whose outputs are dropped, [X, 1, 1]."""
    outputs: Settlement
    """Own rows of heads."""
    gradients: Settlement
    """Own rows of heads, and rows that heads replay."""


@dataclass(frozen=True)
class Schedule:
    """One execution; all tensors int64 on the device."""

    body: Grid
    heads: Heads | None
    forward_order: Tensor
    """Sequences as the forward pass starts them, see `table`, [N, SEQUENCE_COLUMNS]."""
    backward_order: Tensor
    """The same as the backward pass starts them."""
    spans: Tensor
    """See `table`, [spans, SPAN_COLUMNS]."""
    consumers: Tensor
    """Places of the sequences that start from each slot, [slots + 1]."""
    given: int
    slots: int
    places: int

    @property
    def grids(self) -> list[Grid]:
        """That of the body, then that of the heads, if there are any."""
        return [self.body] if self.heads is None else [self.body, self.heads.grid]


class _Pieces(NamedTuple):
    """Where the rows and chunks of each sequence are, [N] each."""

    head: Int64
    """Rows of the head: replay rows, then own rows up to the next chunk boundary."""
    skipped: Int64
    """Own rows that are in the head."""
    head_chunks: Int64
    body_chunks: Int64


def build_schedule(sequences: Sequences, device: torch.device) -> Schedule:
    """Lay out one execution."""
    own = np.diff(sequences.cu_rows)
    head_chunks = -(-sequences.replay // CHUNK)
    head = np.minimum(sequences.replay + own, head_chunks * CHUNK)
    skipped = head - sequences.replay
    pieces = _Pieces(head, skipped, head_chunks, -(-(own - skipped) // CHUNK))
    slots = sequences.given + len(sequences.producer)
    starts = np.flatnonzero(sequences.source >= 0)
    consumers = np.bincount(sequences.source[starts], minlength=slots)
    spans, spans_of = _spans(sequences, pieces)
    rows = np.empty((len(own), table.SEQUENCE_COLUMNS), dtype=np.int64)
    rows[:, table.SPANS_BEGIN], rows[:, table.SPANS_END] = spans_of[:-1], spans_of[1:]
    rows[:, table.SOURCE], rows[:, table.PLACE] = sequences.source, -1
    rows[starts[np.argsort(sequences.source[starts], kind="stable")], table.PLACE] = np.arange(len(starts))
    chains = _chains(sequences, pieces.head_chunks + pieces.body_chunks)

    def put(array: Int64) -> Tensor:
        return place(array.astype(np.int64), device)

    runs, chunked = np.stack([skipped, own - skipped], axis=1).ravel(), np.tile([False, True], len(own))
    return Schedule(
        body=chunk_grid(runs[runs > 0], chunked[runs > 0], device),
        heads=_heads(sequences, head, skipped, device, put) if head.any() else None,
        forward_order=put(rows[forward_order(chains)]),
        backward_order=put(rows[backward_order(chains)]),
        spans=put(spans),
        consumers=put(offsets(consumers)),
        given=sequences.given,
        slots=slots,
        places=len(starts),
    )


def _chains(sequences: Sequences, chunks: Int64) -> Chains:
    producer, after = np.full((2, len(chunks)), -1, dtype=np.int64)
    waits = sequences.source >= sequences.given
    slot = sequences.source[waits] - sequences.given
    producer[waits], after[waits] = sequences.producer[slot], -(-sequences.produced_after[slot] // CHUNK)
    return Chains(chunks, producer, after)


def _spans(sequences: Sequences, pieces: _Pieces) -> tuple[Int64, Int64]:
    """The table of spans, and where those of each sequence begin, [N + 1]."""
    head_chunks, chunks = pieces.head_chunks, pieces.head_chunks + pieces.body_chunks
    number = np.arange(len(chunks))
    every = -(-pieces.body_chunks // MAX_CHUNKS)
    produced = -(-sequences.produced_after // CHUNK)
    sequence = np.concatenate([number, number, np.repeat(number, every), sequences.producer])
    step = np.arange(every.sum()) - np.repeat(offsets(every)[:-1], every)
    bound = np.concatenate([head_chunks * 0, chunks, np.repeat(head_chunks, every) + step * MAX_CHUNKS, produced])
    sequence, bound = np.unique(np.stack([sequence, bound]), axis=1)
    inside = sequence[1:] == sequence[:-1]
    of, begin, end = sequence[1:][inside], bound[:-1][inside], bound[1:][inside]
    in_head = begin < head_chunks[of]
    body = sequences.cu_rows[:-1] + pieces.skipped - head_chunks * CHUNK
    start = np.where(in_head, offsets(pieces.head)[of], body[of])
    stop = np.where(in_head, offsets(pieces.head)[of + 1], sequences.cu_rows[of + 1])
    first = np.where(in_head, offsets(head_chunks)[of], (offsets(pieces.body_chunks)[:-1] - head_chunks)[of])
    spans = np.empty((len(of), table.SPAN_COLUMNS), dtype=np.int64)
    spans[:, table.IN_HEAD] = in_head
    spans[:, table.ROW] = start + begin * CHUNK
    spans[:, table.END] = np.minimum(start + end * CHUNK, stop)
    spans[:, table.CHUNK] = first + begin
    spans[:, table.SLOT] = -1
    spans_of = np.searchsorted(of, np.arange(len(chunks) + 1))
    # ends are rising within a sequence: a produced state is the end of exactly one of its spans
    key = of * (chunks.max() + 1) + end
    at = np.searchsorted(key, sequences.producer * (chunks.max() + 1) + produced)
    spans[at, table.SLOT] = sequences.given + np.arange(len(produced))
    return spans, spans_of


def _heads(sequences: Sequences, head: Int64, skipped: Int64, device: torch.device, put: Put) -> Heads:
    start = offsets(head)[:-1]
    row = np.empty(head.sum(), dtype=np.int64)
    replayed = expand_runs(start, sequences.replay)
    owned = expand_runs(start + sequences.replay, skipped)
    row[replayed] = sequences.replay_row
    row[owned] = expand_runs(sequences.cu_rows[:-1], skipped)
    mask = np.zeros(len(row), dtype=np.bool_)
    mask[replayed] = True
    none = np.zeros(0, dtype=np.int64)
    return Heads(
        grid=chunk_grid(head[head > 0], np.ones(np.count_nonzero(head), dtype=np.bool_), device),
        row=put(row),
        replayed=place(mask, device)[:, None, None],
        outputs=settlement(row, owned, none, device),
        gradients=settlement(row, owned, replayed, device),
    )
