"""Attention views of small forests, and dense attention over their visibility matrix, written independently."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from harts.backends.plan_tensors import AttentionViews

Branches = Sequence[tuple[int, int]]
"""(row that the branch follows, or -1; rows) of each branch; rows are numbered branch after branch."""

THREE_LEVELS = [(-1, 3 + 2 + 4), (2, 3 + 2), (4, 3), (11, 2)]
"""P (rows 0:3) -> A (3:5) -> R0 (5:9) and R1 (14:17); P -> B (9:12) -> R2 (12:14) and R3 (17:19)."""


def parents(branches: Branches) -> list[int]:
    """The row before each row, -1 for a root's first."""
    found: list[int] = []
    for follows, rows in branches:
        found += [follows, *range(len(found), len(found) + rows - 1)]
    return found


def visibility(branches: Branches, rows: int) -> Tensor:
    """Row i sees row j: [rows, rows]."""
    seen = torch.zeros(rows, rows, dtype=torch.bool)
    for row, parent in enumerate(parents(branches)):
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, row] = True
    return seen


def views_of(branches: Branches, padding: int = 0, device: str = "cpu") -> AttentionViews:
    before = parents(branches)
    cu_q, run_offset, runs = [0], [0], []
    for follows, rows in branches:
        chain, ancestor = [], follows
        while ancestor >= 0:
            chain.append(ancestor)
            ancestor = before[ancestor]
        for row in reversed(chain):
            if len(runs) > run_offset[-1] and sum(runs[-1]) == row:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((row, 1))
        runs.append((cu_q[-1], rows))
        cu_q.append(cu_q[-1] + rows)
        run_offset.append(len(runs))
    arrays = (np.array(each, dtype=np.int64) for each in (cu_q, run_offset, *zip(*runs, strict=True)))
    return AttentionViews(*arrays, cu_q[-1] + padding, torch.device(device))


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Masked softmax over all pairs of rows."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, dim=1)) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, dim=1))


def random_branches(rng: random.Random) -> list[tuple[int, int]]:
    """One-token branches, roots without ancestors, forks anywhere."""
    branches, total = [], 0
    for index in range(rng.randint(2, 9)):
        follows = -1 if index == 0 or rng.random() < 0.2 else rng.randrange(total)
        rows = rng.choice((1, 1, 2, 5, 9))
        branches.append((follows, rows))
        total += rows
    return branches
