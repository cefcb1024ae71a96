"""Query rows that are compared with float64: all keys of some rows, since all keys of all rows are too many."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.plan_tensors import AttentionViews
from harts.ir.base import Int64
from harts.ir.runs import expand_runs

TILE = 128
"""Rows of a kernel's tile: what lies at its edges goes wrong first."""


class Exact(NamedTuple):
    """Attention in float64 of n sampled rows, and gradients of all rows."""

    out: Tensor
    """[n, H, Dv]."""
    dq: Tensor
    """[R, H, Dk]; zeros on rows that were not sampled."""
    dk: Tensor
    """[R, G, Dk]."""
    dv: Tensor
    """[R, G, Dv]."""


def sampled_rows(views: AttentionViews, count: int, seed: int) -> Int64:
    """Some rows, ascending: ends and insides of branches all over the tree, edges of tiles, and any.

    Args:
        views: of the compact rows.
        count: about how many; fewer if the rows are few.
        seed: of what is drawn.
    """
    rng = np.random.default_rng([seed, 3])
    rows, quarter = int(views.cu_q[-1]), max(1, count // 4)
    branch = np.unique(np.linspace(0, len(views.cu_q) - 2, quarter).astype(np.int64))
    first, last = views.cu_q[branch], views.cu_q[branch + 1] - 1
    edge = TILE * rng.integers(0, rows // TILE + 1, quarter) + rng.integers(-1, 2, quarter)
    chosen = np.concatenate((first[::2], last, rng.integers(first, last + 1), edge))
    chosen = np.unique(chosen[(chosen >= 0) & (chosen < rows)])
    return np.unique(np.concatenate((chosen, rng.integers(0, rows, max(0, count - len(chosen))))))


def seen_rows(views: AttentionViews, rows: Int64) -> Tensor:
    """Which rows each of n rows sees, by the definition of the views, on their device, [n, R]."""
    seen = np.zeros((len(rows), views.rows), dtype=np.bool_)
    branch = np.searchsorted(views.cu_q, rows, side="right") - 1
    for index, (row, mine) in enumerate(zip(rows.tolist(), branch.tolist(), strict=True)):
        runs = slice(int(views.run_offset[mine]), int(views.run_offset[mine + 1]))
        length = views.run_length[runs].copy()
        length[-1] = row + 1 - views.cu_q[mine]
        seen[index, expand_runs(views.run_row[runs], length)] = True
    return torch.from_numpy(seen).to(views.device)


def exact(leaves: dict[str, Tensor], rows: Tensor, seen: Tensor, grad: Tensor, scale: float) -> Exact:
    """Softmax attention of sampled rows and its gradients, written out head by head (equation 22).

    Args:
        leaves: q, k and v of all rows, any dtype.
        rows: the sampled rows, int64 [n].
        seen: what they see, [n, R].
        grad: gradient of their outputs, [n, H, Dv].
        scale: factor on the scores.
    """
    q, k, v = (leaves[name].detach() for name in ("q", "k", "v"))
    wide = {"dtype": torch.float64, "device": q.device}
    group = q.shape[1] // k.shape[1]
    found = Exact(
        torch.empty(len(rows), q.shape[1], v.shape[2], **wide),
        *(torch.zeros(each.shape, **wide) for each in (q, k, v)),
    )
    for head in range(q.shape[1]):
        q_n, k_r, v_r = q[rows, head].double(), k[:, head // group].double(), v[:, head // group].double()
        do = grad[:, head].double()
        p = (scale * q_n @ k_r.T).masked_fill_(~seen, -torch.inf).softmax(-1)
        dp = do @ v_r.T
        ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
        found.out[:, head] = p @ v_r
        found.dq[rows, head] = ds @ k_r
        found.dk[:, head // group] += ds.T @ q_n
        found.dv[:, head // group] += p.T @ do
    return found
