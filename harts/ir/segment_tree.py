"""The segments of one microbatch: maximal fork-free runs of tokens, as a forest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np

from harts.ir.base import Bool, Dims, Int32, Int64, Invariant, Value
from harts.ir.rollout_batch import Columns
from harts.ir.runs import offsets


@dataclass(frozen=True, eq=False, repr=False)
class SegmentTree(Value):
    """V segments with C compact tokens in all; parents come before their children; -1 is no parent.

    A trajectory may end inside a segment (it is a strict prefix of another); that makes no fork.
    """

    kind = "segment_tree"

    parent: Annotated[Int32, Dims("V")]
    start: Annotated[Int64, Dims("V")]
    """Position of the segment's first token from the start of its trajectories."""
    offset: Annotated[Int64, Dims("V+1")]
    """Tokens of segment v are tokens[offset[v]:offset[v+1]]."""
    tokens: Annotated[Int32, Dims("C")]
    key: Annotated[Int64, Dims("N")]
    """Row of each trajectory in the caller's batch, ascending."""
    tail: Annotated[Int32, Dims("N")]
    """Segment in which each trajectory ends."""
    columns: Columns
    """RL columns of the N trajectories; `loss_mask` after the `shared_trained_token` rule."""

    @property
    def length(self) -> Int64:
        """Tokens of each segment, [V]."""
        return np.diff(self.offset)

    @property
    def end(self) -> Int64:
        """Position just past each segment, [V]."""
        return self.start + self.length

    @property
    def semantic_tokens(self) -> int:
        """S of this microbatch."""
        return int(self.columns.offset[-1])

    @cached_property
    def children(self) -> tuple[Int64, Int64]:
        """(offset [V+1], child [number of edges]): children of v are child[offset[v]:offset[v+1]], ascending."""
        inner = np.flatnonzero(self.parent >= 0)
        order = np.argsort(self.parent[inner], kind="stable")
        counts = np.bincount(self.parent[inner], minlength=len(self.parent))
        return offsets(counts.astype(np.int64)), inner[order].astype(np.int64)

    @property
    def roots(self) -> Int64:
        """Segments without a parent, ascending."""
        return np.flatnonzero(self.parent < 0).astype(np.int64)

    def path(self, segment: int) -> list[int]:
        """Segments from the root to this one, both included."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = int(self.parent[segment])
        return found[::-1]

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        ids = np.arange(len(self.parent))
        yield Invariant("parent", (self.parent >= ids) | (self.parent < -1), "a parent must come before its children")
        yield Invariant("offset", self.offset[:1] != 0, "offsets must start at 0")
        yield Invariant("offset", self.length <= 0, "a segment must have at least one token")
        yield Invariant("offset", self.offset[-1] != len(self.tokens), "offsets must end at the token count")
        begin = np.where(self.parent < 0, 0, self.end[self.parent])
        yield Invariant("start", self.start != begin, "a segment must start where its parent ends")
        forks = np.bincount(self.parent[self.parent >= 0], minlength=len(self.parent))
        yield Invariant("parent", forks == 1, "a segment with one child must be one segment with it")
        yield Invariant("tokens", self._alike(), "siblings must differ in their first token")
        yield Invariant("key", np.diff(self.key) <= 0, "rows of the caller's batch must ascend")
        yield Invariant("tail", (self.tail < 0) | (self.tail >= len(self.parent)), "must be a segment")
        length = self.columns.length
        outside = (length <= self.start[self.tail]) | (length > self.end[self.tail])
        yield Invariant("tail", outside, "a trajectory must end inside its last segment")
        ends = np.zeros(len(self.parent), dtype=np.int64)
        np.maximum.at(ends, self.tail, length)
        yield Invariant("tail", (forks == 0) & (ends != self.end), "a leaf must end where a trajectory ends")

    def _alike(self) -> Bool:
        """Which tokens begin a segment like an earlier sibling's; roots may, where sharing is switched off, [C]."""
        first = self.offset[:-1]
        order = np.lexsort((self.tokens[first], self.parent))
        same = np.diff(self.parent[order]) == 0
        same &= (np.diff(self.tokens[first[order]]) == 0) & (self.parent[order[1:]] >= 0)
        alike = np.zeros(len(self.tokens), dtype=np.bool_)
        alike[first[order[1:][same]]] = True
        return alike
