"""One step: which microbatch runs where and when, and one value for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import numpy as np

from harts.ir.base import Dims, Int32, Int64, Invariant, Value
from harts.ir.segment_tree import SegmentTree

Item_co = TypeVar("Item_co", bound=Value, covariant=True)


@dataclass(frozen=True, eq=False, repr=False)
class StepPlan(Value):
    """The chosen partition with its slots and replicas, and the step's totals.

    K microbatches, N trajectories, Q candidates. Microbatches are numbered slot by slot, replica by replica:
    microbatch j * D + d is replica d's in slot j.
    """

    kind = "step_plan"

    source: str
    capacity: int | None
    replicas: int
    microbatch: Annotated[Int32, Dims("N")]
    """Microbatch of each trajectory of the caller's batch."""
    work: Annotated[Int64, Dims("K")]
    """Compact tokens of each microbatch."""
    candidates: tuple[str, ...]
    scores: Annotated[Int64, Dims("Q", "3")]
    """Objective (4) of each candidate: total work, sum over slots of the heaviest, heaviest replica."""
    chosen: int
    """Index of the candidate that this plan is."""
    semantic_tokens: int
    """S of the step."""
    compact_tokens: int
    """C of the step before it was split into microbatches."""
    trained_tokens: int
    """Tokens with a loss term over the whole step; a trajectory's first token never has one."""
    trained_trajectories: int
    """Trajectories with at least one such token."""

    @property
    def slots(self) -> int:
        """Microbatches of each replica."""
        return len(self.work) // self.replicas

    def by_slot(self) -> Int64:
        """Work as [slots, D]."""
        return self.work.reshape(-1, self.replicas)

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("work", len(self.work) % self.replicas != 0, "D must divide the number of microbatches")
        yield Invariant("microbatch", (self.microbatch < 0) | (self.microbatch >= len(self.work)), "must exist")
        used = np.bincount(self.microbatch, minlength=len(self.work))
        yield Invariant("work", used == 0, "no microbatch may be empty")
        if self.capacity is not None:
            yield Invariant("work", self.work > self.capacity, "no microbatch may exceed the capacity")
        yield Invariant("chosen", not 0 <= self.chosen < len(self.candidates), "must be a candidate")
        yield Invariant("scores", self.scores[self.chosen, 0] != self.work.sum(), "the total must be the work's sum")


@dataclass(frozen=True, eq=False, repr=False)
class PerMicrobatch(Value, Generic[Item_co]):
    """One value for each microbatch of a step, in the order of the plan."""

    kind = "per_microbatch"

    step: StepPlan
    items: tuple[Item_co, ...]

    def __len__(self) -> int:
        return len(self.items)

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("items", len(self.items) != len(self.step.work), "there must be one item a microbatch")
        kinds = {type(item) for item in self.items}
        yield Invariant("items", len(kinds) != 1, "all items must be of one kind")
        strangers = [not self._holds(index, item) for index, item in enumerate(self.items)]
        yield Invariant("items", np.array(strangers), "must hold the trajectories that the step puts there")

    def _holds(self, index: int, item: Any) -> bool:
        for name in ("outputs", "layout", "plan", "tree"):  # down to the segment tree that the item was made from
            item = getattr(item, name, item)
        if not isinstance(item, SegmentTree):  # a kind of somebody else's
            return True
        return np.array_equal(item.key, np.flatnonzero(self.step.microbatch == index))
