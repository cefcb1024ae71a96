"""The delta rule by chunks: batched matrix products, and a scan over chunk states. Any floating dtype, autograd.

Shape suffixes: T packed rows, N sequences, P requested states, H query and key heads, HV value heads, M chunks times
value heads, B rows of a chunk, K and V head dims, L gates of a head (K or 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from harts.backends.base import LinearAttention, Need, RoundOutput
from harts.backends.linear.checks import check_call, why_not
from harts.backends.linear.chunks import ChunkGrid, chunk_grid, to_cells, to_rows
from harts.backends.linear.dtypes import wide_dtype
from harts.backends.linear.scores import scores, sum_after, sum_up_to
from harts.backends.plan_tensors import PackedCall


class Naive(LinearAttention):
    """Chunkwise kda and gdn in plain torch: no pairwise decay tensor, work of all chunks of a call at once.

    Everything is computed in the widest input dtype, float32 at least; outputs come back in the dtype of v.
    """

    def why_not(self, need: Need) -> list[str]:
        """Every reason why this backend cannot serve `need`; empty if it can."""
        return why_not(need)

    def call(self, rows: dict[str, Tensor], packed: PackedCall, initial_state: Tensor, /) -> RoundOutput:
        """Run N independent sequences; see `LinearAttention.call`.

        Raises:
            ValueError: the call breaks the contract (shapes, an empty sequence, a state inside a chunk).
        """
        check_call(rows, packed, initial_state)
        dtype = wide_dtype(initial_state, *rows.values())
        device = rows["v"].device
        grid = packed.once(("chunk_grid", device), lambda: chunk_grid(packed, device))
        value_heads, _, value_dim = initial_state.shape[1:]
        chunks = _prepare({name: _cells(x.to(dtype), grid, value_heads) for name, x in rows.items()})
        start = initial_state.to(dtype).index_select(0, grid.order)
        before_MKV, errors_MBV, after = _scan(chunks, start.flatten(0, 1), [n * value_heads for n in grid.counts])
        output_MBV = torch.baddbmm(chunks.q @ before_MKV, chunks.mix, errors_MBV)
        output = output_MBV.view(-1, value_heads, grid.size, value_dim).transpose(1, 2).flatten(0, 1)
        states = torch.cat([*after, start.flatten(0, 1)]).view(-1, *start.shape[1:])
        return RoundOutput(to_rows(output, grid).to(rows["v"].dtype), states.index_select(0, grid.chunk_of_state))


class _Chunks(NamedTuple):
    """What does not depend on any state."""

    q: Tensor
    """Queries, scaled and decayed from the chunk's start, [M, B, K]."""
    k: Tensor
    """Keys, decayed to the chunk's end, [M, B, K]."""
    w: Tensor
    """What the errors subtract of the state before the chunk, [M, B, K]."""
    u: Tensor
    """Errors from a zero state, times beta, [M, B, V]."""
    mix: Tensor
    """Contribution of each error to each output, [M, B, B]."""
    decay: Tensor
    """Of the state over the whole chunk, [M, K or 1, 1]."""


def _cells(x: Tensor, grid: ChunkGrid, value_heads: int) -> Tensor:
    """Rows [T, heads, ...] as chunks of value heads [M, B, ...]; cells without a row are zero and change no state."""
    cells = to_cells(x, grid).view(-1, grid.size, *x.shape[1:]).transpose(1, 2)
    return cells.repeat_interleave(value_heads // x.shape[1], dim=1).flatten(0, 1)


def _prepare(cells: dict[str, Tensor]) -> _Chunks:
    k_MBK, v_MBV, beta_MB1 = cells["k"], cells["v"], cells["beta"][..., None]
    q_MBK = cells["q"] * k_MBK.shape[-1] ** -0.5
    gate_MBL = cells["g"] if cells["g"].dim() == 3 else cells["g"][..., None]
    of_q, of_k = scores(q_MBK, k_MBK, gate_MBL)
    since_start, to_end = sum_up_to(gate_MBL).exp(), sum_after(gate_MBL).exp()
    right = torch.cat([k_MBK * since_start, v_MBV], -1) * beta_MB1
    solved = torch.linalg.solve_triangular(of_k * beta_MB1, right, upper=False, unitriangular=True)
    w_MBK, u_MBV = solved.split([k_MBK.shape[-1], v_MBV.shape[-1]], -1)
    return _Chunks(
        q=q_MBK * since_start,
        k=k_MBK * to_end,
        w=w_MBK,
        u=u_MBV,
        mix=of_q + torch.diag_embed((q_MBK * k_MBK).sum(-1)),
        decay=since_start[:, -1:].mT,
    )


def _scan(chunks: _Chunks, state_NKV: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Walk the steps of a call; at each, all sequences that still have a chunk are one batch.

    Returns:
        The state before each chunk [M, K, V], the errors of its tokens [M, B, V], and the states after each step.
    """
    before, errors, after = [], [], []
    steps = zip(
        counts, *(x.split_with_sizes(counts) for x in (chunks.k, chunks.w, chunks.u, chunks.decay)), strict=True
    )
    for count, k_NBK, w_NBK, u_NBV, decay in steps:
        state_NKV = state_NKV[:count] if count < len(state_NKV) else state_NKV
        before.append(state_NKV)
        errors.append(torch.baddbmm(u_NBV, w_NBK, state_NKV, alpha=-1))
        state_NKV = torch.baddbmm(decay * state_NKV, k_NBK.mT, errors[-1])
        after.append(state_NKV)
    return torch.cat(before), torch.cat(errors), after
