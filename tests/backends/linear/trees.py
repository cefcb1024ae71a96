"""Layouts of small forests, and the trajectory-wise runs that tree execution must equal."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from harts.backends.base import LinearAttention
from harts.backends.plan_tensors import PlanTensors, build_plan_tensors
from harts.ir import CompactLayout
from harts.stages.call_plan.min_call import plan_rounds
from harts.stages.layout.round_major import RoundMajor
from tests.backends.linear.calls import HV, K, V, packed_call
from tests.forests import paths_of, random_trajectories, tree_of

CHUNK = 4

DEEP = paths_of([(-1, 6), (0, 9), (0, 10), (1, 8), (1, 5), (2, 7), (2, 6), (3, 1), (3, 4)])
"""States cross three rounds; forks inside chunks; a one-token segment."""


def layout_of(trajectories: list[list[int]], conv_width: int = 4, row_multiple: int = 1) -> CompactLayout:
    config = RoundMajor.Config(conv_width=conv_width, row_multiple=row_multiple)
    return RoundMajor(config).run(plan_rounds(tree_of(trajectories), CHUNK))


def random_layout(seed: int, conv_width: int = 4) -> CompactLayout:
    rng = random.Random(seed)
    return layout_of(random_trajectories(rng, CHUNK, rng.randint(1, 3), rng.randint(1, 6)), conv_width)


def plan_of(layout: CompactLayout) -> PlanTensors:
    return build_plan_tensors(layout, "cpu", torch.float64)


def without_context(layout: CompactLayout) -> CompactLayout:
    return replace(layout, context_row=np.full_like(layout.context_row, -1))


def semantic_rows(layout: CompactLayout) -> Tensor:
    return torch.from_numpy(layout.semantic_map.rows())


def trajectory_offsets(layout: CompactLayout) -> list[int]:
    found: list[int] = layout.plan.tree.columns.offset.tolist()
    return found


def trajectory_wise(backend: LinearAttention, inputs: dict[str, Tensor], layout: CompactLayout) -> Tensor:
    """Outputs of every semantic position: each trajectory is a sequence of its own, from a zero state."""
    cu, rows = trajectory_offsets(layout), semantic_rows(layout)
    zero = torch.zeros(len(cu) - 1, HV, K, V, dtype=torch.float64)
    return backend.call({name: x[rows] for name, x in inputs.items()}, packed_call(CHUNK, cu), zero).output
