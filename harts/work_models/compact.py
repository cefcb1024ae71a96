"""The work model `compact`: the paper's, one for each compact token."""

from __future__ import annotations

import numpy as np

from harts.ir.partitions import COMPACT_TOKENS
from harts.work_models.base import WorkModel, WorkTables


class Compact(WorkModel):
    """Compact tokens, whatever their depth; replay, attention and launches are not counted."""

    unit = COMPACT_TOKENS

    def tables(self, longest: int) -> WorkTables:
        """Each position costs 1, forks cost nothing."""
        return WorkTables(np.arange(longest + 1, dtype=np.int64), np.zeros(longest + 1, dtype=np.int64))
