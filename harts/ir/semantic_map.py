"""m: S -> C, the map from semantic positions to compact rows, as runs of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from harts.ir.base import Dims, Int64, Invariant, Value
from harts.ir.runs import expand_runs


@dataclass(frozen=True, eq=False, repr=False)
class SemanticMap(Value):
    """The rows of N trajectories with S tokens in all, M runs."""

    kind = "semantic_map"

    run_offset: Annotated[Int64, Dims("N+1")]
    """Runs of trajectory i are run_offset[i]:run_offset[i+1]."""
    run_row: Annotated[Int64, Dims("M")]
    """First compact row of each run."""
    run_length: Annotated[Int64, Dims("M")]

    def rows(self) -> Int64:
        """Compact row of every semantic position, trajectory after trajectory, [S]."""
        return expand_runs(self.run_row, self.run_length)

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("run_offset", self.run_offset[:1] != 0, "offsets must start at 0")
        yield Invariant("run_offset", np.diff(self.run_offset) <= 0, "every trajectory must have a run")
        yield Invariant("run_offset", self.run_offset[-1] != len(self.run_row), "offsets must end at the run count")
        yield Invariant("run_length", self.run_length <= 0, "no run may be empty")
        yield Invariant("run_row", self.run_row < 0, "must be a row")
