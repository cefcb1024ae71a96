"""One step: which microbatch runs where and when, and one value for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import numpy as np

from harts.ir.base import Dims, Int32, Int64, Invariant, Value
from harts.ir.partitions import COMPACT_TOKENS, OBJECTIVES
from harts.ir.segment_tree import SegmentTree

Item_co = TypeVar("Item_co", bound=Value, covariant=True)


@dataclass(frozen=True, eq=False, repr=False)
class StepPlan(Value):
    """The chosen partition with its slots and replicas, and the step's totals.

    K microbatches, N trajectories, Q candidates. Microbatches are numbered slot by slot, replica by replica:
    microbatch j * D + d is replica d's in slot j.
    """

    kind = "step_plan"
    version = 2

    source: str
    capacity: int | None
    replicas: int
    microbatch: Annotated[Int32, Dims("N")]
    """Microbatch of each trajectory of the caller's batch."""
    work: Annotated[Int64, Dims("K")]
    """Compact tokens of each microbatch."""
    cost: Annotated[Int64, Dims("K")]
    """What the work model says of each microbatch, in `unit`; slots and replicas are balanced in it."""
    unit: str
    """Of costs and scores: `compact tokens`, or what a calibrated work model predicts."""
    objective: str
    """What ranked the candidates first: `paper`, the total cost (4), or `critical`, the slots' heaviest."""
    lower_bound: int
    """Compact tokens that no partition within the capacity can be below, whatever its microbatches."""
    candidates: tuple[str, ...]
    scores: Annotated[Int64, Dims("Q", "3")]
    """Of each candidate: total cost, sum over slots of the heaviest microbatch, heaviest replica (4)."""
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

    @property
    def slot_critical_work(self) -> int:
        """Compact tokens of the heaviest microbatch of each slot, summed: what lockstep replicas wait for."""
        return int(self.by_slot().max(axis=1).sum())

    @property
    def slot_critical_bound(self) -> int:
        """What `slot_critical_work` cannot be below: a slot's heaviest is at least its mean."""
        return -(-self.lower_bound // self.replicas)

    @property
    def total_gap(self) -> float:
        """Excess of the total work over its lower bound; 0 is optimal."""
        return int(self.work.sum()) / self.lower_bound - 1

    @property
    def slot_critical_gap(self) -> float:
        """Excess of `slot_critical_work` over its bound; 0 is optimal."""
        return self.slot_critical_work / self.slot_critical_bound - 1

    @property
    def optimal(self) -> bool:
        """No plan has less total work; the bound proves it."""
        return int(self.work.sum()) == self.lower_bound

    def invariants(self) -> Iterator[Invariant]:  # noqa: D102
        yield Invariant("work", len(self.work) % self.replicas != 0, "D must divide the number of microbatches")
        yield Invariant("microbatch", (self.microbatch < 0) | (self.microbatch >= len(self.work)), "must exist")
        used = np.bincount(self.microbatch, minlength=len(self.work))
        yield Invariant("work", used == 0, "no microbatch may be empty")
        if self.capacity is not None:
            yield Invariant("work", self.work > self.capacity, "no microbatch may exceed the capacity")
        yield Invariant("chosen", not 0 <= self.chosen < len(self.candidates), "must be a candidate")
        yield Invariant("scores", self.scores[self.chosen, 0] != self.cost.sum(), "the total must be the costs' sum")
        yield Invariant("lower_bound", self.lower_bound > int(self.work.sum()), "the work cannot be below it")
        yield Invariant("lower_bound", self.lower_bound < self.compact_tokens, "each unique prefix is computed once")
        yield Invariant("objective", self.objective not in OBJECTIVES, f"must be {' or '.join(OBJECTIVES)}")
        differs = (self.cost != self.work) & (self.unit == COMPACT_TOKENS)
        yield Invariant("cost", differs, "must be the work, if the unit is compact tokens")


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
