"""The work model `calibrated`: predicted time of a microbatch, from coefficients measured on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from harts.errors import PlanError
from harts.ir.base import Float64, Int64
from harts.schema import StageConfig
from harts.work_models.base import WorkModel, WorkTables
from harts.work_models.rounds import count_rounds
from harts.work_models.table import read_table

LARGEST = 1e15
"""Nanoseconds that a trajectory may cost: twelve days."""

ShippedName = Annotated[str, Field(pattern="^[A-Za-z0-9_]+$")]


class Calibrated(WorkModel):
    """Nanoseconds of forward and backward, after a table that `harts calibrate` wrote.

    A microbatch costs `fixed + row * rows + replay_row * replay rows + pair * attention pairs + state * input sequences
    that start from a requested state + round * rounds`. An attention pair is a query and a key that it sees; there are
    position + 1 of them for each compact row. Counts are those of the call plan `min_call`, and exact: rows, replay
    rows (15), pairs and such sequences are sums over the trie, whichever child continues; rounds are Algorithm 1's.

    Approximated: the search adds up tables, which lack `fixed` and `round`; finished candidates are ranked and balanced
    with both. A state that several side branches start from is counted once for each of them. Tables are rounded to
    integers at each depth: a cost is off by at most 1.5 ns a trajectory.
    """

    class Config(StageConfig):
        """Where the coefficients come from."""

        table: Annotated[ShippedName | Path, Field(union_mode="left_to_right")]
        """Name of a shipped table, or path of a file that `harts calibrate` wrote."""
        chunk_size: PositiveInt
        """Tokens of a linear-attention chunk; must be call_plan.chunk_size."""

    config: Config
    unit = "ns"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.table = read_table(config.table)

    def tables(self, longest: int) -> WorkTables:
        """Rows and pairs along a path; replay and the start from a state at a fork.

        Raises:
            PlanError: a cost is too large to be added up in 64 bits.
        """
        each, chunk_size = self.table.coefficients, self.config.chunk_size
        depth = np.arange(longest + 1, dtype=np.int64)
        along = each.row * depth + each.pair * (depth * (depth + 1) // 2)
        fork = each.replay_row * (depth % chunk_size) + each.state * (depth >= chunk_size)
        fork[0] = 0
        return WorkTables(self._whole(along), self._whole(fork))

    def costs(self, length: Int64, lcp: Int64, begins: Int64) -> Int64:
        """Cost of each microbatch of a finished partition, with `fixed` and `round`; see `WorkModel.costs`."""
        rounds = count_rounds(length, lcp, begins, self.config.chunk_size)
        each = self.table.coefficients
        return np.asarray(super().costs(length, lcp, begins) + round(each.fixed) + round(each.round) * rounds)

    def _whole(self, nanoseconds: Float64) -> Int64:
        most = float(nanoseconds.max())
        if most > LARGEST:
            raise PlanError(
                f"work_model.table: {self.config.table}: a trajectory costs {most:.3g} ns, at most {LARGEST:.3g}"
            )
        return np.rint(nanoseconds).astype(np.int64)
