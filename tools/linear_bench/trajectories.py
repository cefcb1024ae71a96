"""A workload's trajectories one after the other: what trajectory-wise training computes, in groups that fit memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from linear_bench.forests import forest
from linear_bench.workloads import Workload, planned


class Group(NamedTuple):
    """Some whole trajectories with s tokens in all."""

    first: int
    """Number of the first of them."""
    length: list[int]
    """Tokens of each."""
    compact_row: Tensor
    """Compact row of each token, trajectory after trajectory, [s]."""
    new: Tensor
    """Tokens here whose compact row is in no group before and at no token before, in the order of their rows."""

    @property
    def cu_seqlens(self) -> Tensor:
        """On the host, [n + 1]."""
        return torch.tensor([0, *self.length]).cumsum(0)

    def plan(self, device: str) -> tuple[PlanTensors, Tensor]:
        """The plan without sharing, and where each of its rows is in this group's tokens, [s]."""
        layout = planned(forest([-1] * len(self.length), self.length))
        row = torch.from_numpy(layout.semantic_map.rows())
        return build_plan_tensors(layout, device, torch.float32), row.argsort().to(device)


def groups(workload: Workload, most_rows: int, device: str) -> Iterator[Group]:
    """Cut all trajectories into groups of at most `most_rows` tokens; a longer one is a group of its own."""
    layout = workload.layout
    rows = layout.semantic_map.rows()
    _, new = np.unique(rows, return_index=True)
    offset = layout.plan.tree.columns.offset
    first = 0
    while first < len(offset) - 1:
        stop = max(first + 1, int(np.searchsorted(offset, offset[first] + most_rows, side="right")) - 1)
        begin, end = int(offset[first]), int(offset[stop])
        mine = new[(new >= begin) & (new < end)] - begin
        yield Group(
            first,
            np.diff(offset[first : stop + 1]).tolist(),
            torch.from_numpy(rows[begin:end]).to(device),
            torch.from_numpy(mine).to(device),
        )
        first = stop
