"""What a calibrated cost is a sum over, counted in a laid-out microbatch."""

from __future__ import annotations

import numpy as np

from harts.ir import CompactLayout
from harts.ir.base import Float64

TERMS = ("fixed", "row", "replay_row", "pair", "state", "round")
"""Coefficients of a table, in the order of the counts."""


def counts(layout: CompactLayout) -> Float64:
    """How often each of `TERMS` occurs in one microbatch, [6]; `fixed` occurs once."""
    positions = layout.position_ids[: layout.rows]
    pairs = int(positions.sum()) + layout.rows
    states = int((layout.plan.initial_state >= 0).sum())
    return np.array([1, layout.rows, len(layout.replay_row), pairs, states, layout.plan.rounds], dtype=np.float64)
