"""The contract of a work model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from harts.ir.base import Int64
from harts.schema import StageConfig


class WorkTables(NamedTuple):
    """A cost that is a sum over the trie of a microbatch, so that one more trajectory changes it by a known amount.

    The cost of trajectories in sorted order is `sum(along[length] - along[lcp] + fork[lcp])`, the fork's part only
    where the one before does not end there: a fork with k children counts k - 1 times. Both tables are non-negative,
    and `along` never falls, so that more trajectories never cost less.
    """

    along: Int64
    """Cost of the first p positions of a path, [L+1], with L the longest trajectory's tokens."""
    fork: Int64
    """Cost of each child after the first at a fork of depth p, [L+1]; 0 at depth 0, where trees are apart."""


class WorkModel(ABC):
    """A registered choice, built from its own strict `Config`. Pure."""

    Config: ClassVar[type[StageConfig]] = StageConfig
    unit: ClassVar[str]
    """Of the costs."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def tables(self, longest: int) -> WorkTables:
        """What the search adds up, for trajectories of at most `longest` tokens."""

    def costs(self, length: Int64, lcp: Int64, begins: Int64) -> Int64:
        """Cost of each microbatch of a finished partition, which may hold more than the tables say.

        Args:
            length: tokens of each trajectory, microbatch by microbatch, sorted within, [N].
            lcp: tokens shared with the one before in the same microbatch, 0 for its first, [N].
            begins: where each microbatch begins, [K].

        Returns:
            [K], in `unit`.
        """
        tables = self.tables(int(length.max()))
        forks = lcp < np.concatenate(([0], length[:-1]))
        added = tables.along[length] - tables.along[lcp] + np.where(forks, tables.fork[lcp], 0)
        return np.asarray(np.add.reduceat(added, begins), dtype=np.int64)
