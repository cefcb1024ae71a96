"""Candidate partitions of the trajectories into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from harts.ir.base import Dims, Int32, Int64, Invariant, Value
from harts.ir.compact_trie import CompactTrie

OBJECTIVES = ("paper", "critical")
COMPACT_TOKENS = "compact tokens"


@dataclass(frozen=True, eq=False, repr=False)
class Partitions(Value):
    """Q candidates; each puts every trajectory into exactly one microbatch."""

    kind = "partitions"
    version = 2

    trie: CompactTrie
    capacity: int | None
    """Compact tokens that a microbatch may hold; None is no limit."""
    replicas: int
    """Data-parallel replicas D."""
    objective: str
    """What ranks candidates first: `paper`, the total cost (4), or `critical`, the sum of the heaviest of each slot."""
    lower_bound: int
    """Compact tokens that no partition within the capacity and into such a number of microbatches can be below."""
    unit: str
    """Of `cost`: `compact tokens`, or what a calibrated work model predicts."""
    names: tuple[str, ...]
    """How each candidate was made, for a reader."""
    microbatch: Annotated[Int32, Dims("Q", "N")]
    """Microbatch of the trajectory at each sorted position."""
    cost: Annotated[Int64, Dims("Z")]
    """Of each microbatch, candidate by candidate, after the work model; Z is the number of all microbatches."""

    def counts(self) -> Int64:
        """Microbatches of each candidate, [Q]."""
        return np.asarray(self.microbatch.max(axis=1), dtype=np.int64) + 1

    def members(self, candidate: int) -> list[Int64]:
        """Sorted positions of each microbatch of a candidate, ascending."""
        row = self.microbatch[candidate]
        by_microbatch = np.argsort(row, kind="stable")
        ends = np.cumsum(np.bincount(row))
        return [np.asarray(part, dtype=np.int64) for part in np.split(by_microbatch, ends[:-1])]

    def work(self, candidate: int) -> Int64:
        """Compact tokens of each microbatch of a candidate, [K]."""
        index = self.trie.index
        return np.array([index.set_work(part) for part in self.members(candidate)], dtype=np.int64)

    def costs(self, candidate: int) -> Int64:
        """Cost of each microbatch of a candidate, [K]."""
        counts = self.counts()
        first = int(counts[:candidate].sum())
        return self.cost[first : first + int(counts[candidate])]

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("names", len(self.names) != len(self.microbatch), "there must be one name a candidate")
        yield Invariant("replicas", self.replicas < 1, "must be at least 1")
        yield Invariant("microbatch", len(self.microbatch) == 0, "there must be a candidate")
        yield Invariant("microbatch", (self.microbatch < 0).any(axis=1), "every trajectory must be in a microbatch")
        empty = [len(np.unique(row)) != int(row.max()) + 1 for row in self.microbatch]
        yield Invariant("microbatch", np.array(empty), "no microbatch may be empty")
        yield Invariant("microbatch", self.counts() % self.replicas != 0, "D must divide the number of microbatches")
        yield Invariant("objective", self.objective not in OBJECTIVES, f"must be {' or '.join(OBJECTIVES)}")
        yield Invariant("cost", len(self.cost) != int(self.counts().sum()), "there must be one a microbatch")
        works = [self.work(i) for i in range(len(self.names))]
        if self.capacity is not None:
            over = [int(work.max()) > self.capacity for work in works]
            yield Invariant("microbatch", np.array(over), "no microbatch may exceed the capacity")
        below = [int(work.sum()) < self.lower_bound for work in works]
        yield Invariant("lower_bound", np.array(below), "no candidate may need fewer compact tokens")
        if self.unit == COMPACT_TOKENS:
            wrong = self.cost != np.concatenate(works)
            yield Invariant("cost", wrong, "must be the work, if the unit is compact tokens")
