"""Candidate partitions of the trajectories into microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from harts.ir.base import Dims, Int32, Int64, Invariant, Value
from harts.ir.compact_trie import CompactTrie


@dataclass(frozen=True, eq=False, repr=False)
class Partitions(Value):
    """Q candidates; each puts every trajectory into exactly one microbatch."""

    kind = "partitions"

    trie: CompactTrie
    capacity: int | None
    """Compact tokens that a microbatch may hold; None is no limit."""
    replicas: int
    """Data-parallel replicas D."""
    names: tuple[str, ...]
    """How each candidate was made, for a reader."""
    microbatch: Annotated[Int32, Dims("Q", "N")]
    """Microbatch of the trajectory at each sorted position."""

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

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("names", len(self.names) != len(self.microbatch), "there must be one name a candidate")
        yield Invariant("replicas", self.replicas < 1, "must be at least 1")
        yield Invariant("microbatch", len(self.microbatch) == 0, "there must be a candidate")
        yield Invariant("microbatch", (self.microbatch < 0).any(axis=1), "every trajectory must be in a microbatch")
        empty = [len(np.unique(row)) != int(row.max()) + 1 for row in self.microbatch]
        yield Invariant("microbatch", np.array(empty), "no microbatch may be empty")
        yield Invariant("microbatch", self.counts() % self.replicas != 0, "D must divide the number of microbatches")
        if self.capacity is not None:
            over = [int(self.work(i).max()) > self.capacity for i in range(len(self.names))]
            yield Invariant("microbatch", np.array(over), "no microbatch may exceed the capacity")
