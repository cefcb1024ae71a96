"""What chunks of a delta rule hold, in plain float64: the formulas that kernels are checked against, one by one.

Gates are natural logarithms, cumulative over their chunk. Shape suffixes: T rows, C chunks, HV value heads, K and V
head dims, L gates of a head (K or 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from harts.backends.linear.scores import scores
from harts.backends.linear.tree.grid import CHUNK

LN2 = math.log(2.0)


class Chunks:
    """The chunks of one launch: from rows to chunks of `CHUNK` cells and back. Differentiable."""

    def __init__(self, cu_seqlens: Tensor, chunk_indices: Tensor | None) -> None:
        """Bounds of the runs of rows [runs + 1]; (run, chunk of the run) [C, 2], none: all chunks of all runs."""
        if chunk_indices is None:
            chunk_indices = _every_chunk(cu_seqlens)
        run, chunk = chunk_indices.unbind(1)
        begin, end = cu_seqlens[run] + chunk * CHUNK, cu_seqlens[run + 1]
        row = begin[:, None] + torch.arange(CHUNK, device=begin.device)
        self.inside = row < end[:, None]
        """Whether a cell has a row, [C, CHUNK]."""
        self.row = torch.minimum(row, end[:, None] - 1)
        """Row of each cell; past the end the last row of the run, [C, CHUNK]."""
        self.covered = self.row[self.inside]
        """Rows that are in a chunk."""

    def cells(self, rows: Tensor) -> Tensor:
        """Rows [T, HV, ...] in chunks [C, HV, CHUNK, ...]; zero where a chunk has no row."""
        picked = rows[self.row]
        inside = self.inside.view(*self.inside.shape, *[1] * (picked.dim() - 2))
        return torch.where(inside, picked, 0.0).movedim(2, 1)

    def gates(self, rows: Tensor) -> Tensor:
        """Gates [T, HV, L] in chunks [C, HV, CHUNK, L]; past the end of a chunk its last one holds on."""
        return rows[self.row].movedim(2, 1)

    def rows(self, cells: Tensor) -> Tensor:
        """Values [C, HV, CHUNK, ...] of the covered rows [rows, HV, ...]."""
        return cells.movedim(1, 2)[self.inside]


def _every_chunk(cu_seqlens: Tensor) -> Tensor:
    counts = -(-cu_seqlens.diff() // CHUNK)
    run = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.stack([run, torch.arange(len(run), device=run.device) - first], 1)


def wide(rows: Tensor, value_heads: int) -> Tensor:
    """Rows [T, H, ...] in float64, those of a head repeated for each of its value heads."""
    return rows.double().repeat_interleave(value_heads // rows.shape[1], 1)


def natural(gates: Tensor) -> Tensor:
    """Gates in log2, [T, HV, K] or [T, HV], as natural logarithms [T, HV, L]."""
    return (gates.double() * LN2).view(*gates.shape[:2], -1)


def cumulative(gates: Tensor, *, reverse: bool) -> Tensor:
    """Sum of the gates [C, HV, CHUNK, ...] of a chunk up to each cell, or from each cell on; both ends included."""
    return gates.flip(2).cumsum(2).flip(2) if reverse else gates.cumsum(2)


def chunk_scores(q: Tensor, k: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """sum_k a_ik k_jk exp(g_ik - g_jk) for a = q and j <= i, and for a = k and j < i; else 0. [C, HV, CHUNK, CHUNK]."""
    steps = torch.cat([gates[..., :1, :], gates.diff(dim=-2)], -2)
    of_q, of_k = scores(q.flatten(0, 1), k.flatten(0, 1), steps.flatten(0, 1))
    shape = *q.shape[:3], CHUNK
    return of_q.view(shape) + torch.diag_embed((q * k).sum(-1)), of_k.view(shape)


def unit_inverse(lower: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower triangular A [..., N, N]."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    found: Tensor = torch.linalg.solve_triangular(lower + eye, eye.expand_as(lower), upper=False, unitriangular=True)
    return found


def w_and_u(solve: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """What the errors subtract of the state before the chunk, and errors from a zero state: e = u - w S."""
    return solve @ (k * gates.exp() * beta[..., None]), solve @ (v * beta[..., None])


def to_end(k: Tensor, gates: Tensor) -> Tensor:
    """Keys decayed to the end of their chunk."""
    return k * (gates[..., -1:, :] - gates).exp()


def from_state(q: Tensor, gates: Tensor, states: Tensor) -> Tensor:
    """What the state before the chunk [C, HV, K, V] gives the outputs, without their scale."""
    return (q * gates.exp()) @ states


def state_after(states: Tensor, k: Tensor, gates: Tensor, errors: Tensor) -> Tensor:
    """The state after each chunk from the state before it and the errors of its rows, [C, HV, K, V]."""
    return states * gates[..., -1, :, None].exp() + to_end(k, gates).mT @ errors


def gradients(loss: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a scalar function of tensors; of those that it does not depend on they are zero."""
    with torch.enable_grad():
        given = [leaf.detach().requires_grad_() for leaf in leaves]
        return torch.autograd.grad(loss(*given), given, materialize_grads=True)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Distance in the Frobenius norm over the norm of what is wanted; infinite if anything found is not finite."""
    found, wanted = found.detach().double(), wanted.detach().double().to(found.device)
    if not bool(torch.isfinite(found).all()):
        return math.inf
    distance, norm = float((found - wanted).norm()), float(wanted.norm())
    if norm == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / norm
