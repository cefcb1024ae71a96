"""One workload in one shape: the same inputs on compact rows and on the rows of all trajectories.

Shape suffixes: R compact rows, S rows of all trajectories, H query heads, G key/value heads, Dk and Dv head dims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from linear_bench.forests import CHUNK
from linear_bench.inputs import gathered
from linear_bench.workloads import Workload
from torch import Tensor

from harts.backends.base import Need
from harts.backends.plan_tensors import AttentionViews, attention_views
from harts.ir import CompactLayout
from harts.ir.base import Int64
from harts.registry import resolve


class Shape(NamedTuple):
    """Of one full-attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.key_dim**-0.5)

    def figures(self) -> dict[str, int]:
        """Heads and head dims."""
        return {name: getattr(self, name) for name in ("heads", "kv_heads", "key_dim", "value_dim")}

    def need(self) -> Need:
        """What a model of this shape would ask of full attention; what it says of linear attention is not read."""
        return Need(
            device=self.device,
            dtype=self.dtype,
            rule="kda",
            chunk_size=CHUNK,
            conv_width=4,
            linear_heads=(self.heads, self.heads),
            linear_head_dims=(self.key_dim, self.value_dim),
            full_heads=(self.heads, self.kv_heads),
            full_head_dims=(self.key_dim, self.value_dim),
        )


class Planned(NamedTuple):
    """A workload, and the same microbatch trajectory by trajectory."""

    workload: Workload
    flat: CompactLayout

    def compact_row(self) -> Int64:
        """Compact row of each row of the flat layout, [S]."""
        found = np.empty(len(self.flat.input_ids), dtype=np.int64)
        found[self.flat.semantic_map.rows()] = self.workload.layout.semantic_map.rows()
        return found


class Rows(NamedTuple):
    """What a backend is given."""

    views: AttentionViews
    leaves: dict[str, Tensor]
    """q [R, H, Dk], k [R, G, Dk], v [R, G, Dv]; each requires a gradient."""


class Problem(NamedTuple):
    """All that candidates are made from."""

    name: str
    shape: Shape
    compact: Rows
    flat: Rows
    compact_row: Tensor
    """Compact row of each flat row, [S]."""

    def figures(self) -> dict[str, int]:
        """What the views come to."""
        compact, flat = self.compact.views, self.flat.views
        return {
            "branches": len(compact.cu_q) - 1,
            "runs": len(compact.run_row),
            "compact_rows": int(compact.cu_q[-1]),
            "flat_rows": int(flat.cu_q[-1]),
            "expanded_rows": int(compact.cu_k[-1]),
            "pairs": compact.pairs,
            "flat_pairs": flat.pairs,
        }


def planned(workload: Workload) -> Planned:
    """Plan a workload's microbatch a second time, without sharing."""
    call_plan, layout = resolve("call_plan", "flat"), resolve("layout", "round_major")
    plan = call_plan(call_plan.Config(chunk_size=CHUNK)).run(workload.layout.plan.tree)
    laid_out: CompactLayout = layout(layout.Config(conv_width=4)).run(plan)
    return Planned(workload, laid_out)


def problem(given: Planned, shape: Shape, seed: int) -> Problem:
    """Draw inputs; those of a flat row are those of its compact row."""
    views = attention_views(given.workload.layout, shape.device)
    draw = torch.Generator(shape.device).manual_seed(seed)
    size = {
        "q": (shape.heads, shape.key_dim),
        "k": (shape.kv_heads, shape.key_dim),
        "v": (shape.kv_heads, shape.value_dim),
    }
    leaves = {
        name: torch.randn(views.rows, *each, generator=draw, device=shape.device).to(shape.dtype).requires_grad_()
        for name, each in size.items()
    }
    row = torch.from_numpy(given.compact_row()).to(shape.device)
    flat = Rows(attention_views(given.flat, shape.device), gathered(leaves, row))
    return Problem(given.workload.name, shape, Rows(views, leaves), flat, row)


def upstream(problem: Problem, seed: int) -> Tensor:
    """A gradient of the compact outputs, [R, H, Dv]; zeros on padding rows."""
    shape, views = problem.shape, problem.compact.views
    draw = torch.Generator(shape.device).manual_seed(seed)
    found = torch.randn(views.rows, shape.heads, shape.value_dim, generator=draw, device=shape.device).to(shape.dtype)
    found[int(views.cu_q[-1]) :] = 0
    return found


def attend(backend: Any, rows: Rows, shape: Shape) -> Tensor:
    """One layer's attention of a backend, [R, H, Dv]."""
    found: Tensor = backend.attend(*(rows.leaves[name] for name in ("q", "k", "v")), rows.views, shape.scale)
    return found
