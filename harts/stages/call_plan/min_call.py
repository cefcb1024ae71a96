"""The minimum-call plan (SPEC section 3, Algorithm 1): as few dependent rounds as the execution model allows."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from harts.ir import RoundPlan, SegmentTree
from harts.ir.subtrees import subtree_sums
from harts.stages.base import Stage
from harts.stages.call_plan.chunk import ChunkConfig
from harts.stages.call_plan.sequences import ZERO_STATE, Sequences

Children = Literal["heaviest_first", "as_listed"]


class MinCallConfig(ChunkConfig):
    """Chunk size, and which of the best plans is taken."""

    children: Children = "heaviest_first"
    """The order in which the children of a segment are tried, of which the first that fits continues its sequence: by
    falling rows of their subtrees, so that attention sees as many tiles as it can whole; or by their numbers, as in the
    paper's published plans. Rounds and replay are the same."""


class MinCall(Stage[SegmentTree, RoundPlan]):
    """Minimise the number of rounds; total replay is fixed by the chunk size alone (15)."""

    Config = MinCallConfig

    def run(self, tree: SegmentTree, /) -> RoundPlan:
        """Plan one microbatch."""
        return plan_rounds(tree, self.config.chunk_size, self.config.children)


def total_replay(tree: SegmentTree, chunk_size: int) -> int:
    """R = sum over forks of (children - 1) * (e_v mod B), whichever child continues (15)."""
    children = np.diff(tree.children[0])
    return int((np.maximum(children - 1, 0) * (tree.end % chunk_size)).sum())


class Forest(NamedTuple):
    """A segment tree as plain lists, which loops over single segments read fastest."""

    children: list[list[int]]
    end: list[int]
    inside: list[bool]
    """e_v < a_v + B: the segment ends before the first boundary past its start."""


class CallCounts(NamedTuple):
    """Least calls for the subtree of each segment."""

    ready: list[int]
    """T_pre: the state at the segment's anchor exists before the call."""
    entered: list[int]
    """T_in: the segment continues its parent inside the call."""


def plan_rounds(tree: SegmentTree, chunk_size: int, children: Children = "heaviest_first") -> RoundPlan:
    """Plan every rollout tree of a microbatch by itself and merge rounds by number. No recursion."""
    forest = _forest(tree, chunk_size, children)
    counts = count_calls(forest)
    sequences = Sequences(tree, chunk_size)
    for root in tree.roots.tolist():
        _recover(forest, counts, sequences, root)
    return sequences.plan()


def _forest(tree: SegmentTree, chunk_size: int, order: Children) -> Forest:
    offset, child = tree.children
    if order == "heaviest_first":
        rows = subtree_sums(tree.parent, tree.length)
        child = child[np.lexsort((-rows[child], tree.parent[child]))]
    bounds, children = offset.tolist(), child.tolist()
    pieces = [children[a:b] for a, b in pairwise(bounds)]
    inside = tree.end < tree.start // chunk_size * chunk_size + chunk_size
    return Forest(pieces, tree.end.tolist(), inside.tolist())


def count_calls(forest: Forest) -> CallCounts:
    """Equations (12) to (14), children before parents."""
    total = len(forest.end)
    ready, entered = [1] * total, [1] * total
    for v in reversed(range(total)):
        children = forest.children[v]
        if not children:
            continue
        most, second = _two_largest([ready[u] for u in children])
        entered[v] = min(max(entered[o], 1 + (second if ready[o] == most else most)) for o in children)
        ready[v] = most if forest.inside[v] else entered[v]
    return CallCounts(ready, entered)


def _two_largest(values: list[int]) -> tuple[int, int]:
    most = second = 0
    for value in values:
        if value > most:
            most, second = value, most
        elif value > second:
            second = value
    return most, second


class _Visit(NamedTuple):
    """A segment to place. `sequence` is the one that it continues; a side branch has None and opens its own."""

    segment: int
    ready: bool
    budget: int
    round: int
    sequence: int | None
    anchor: int = 0
    source: int = ZERO_STATE


def _recover(forest: Forest, counts: CallCounts, sequences: Sequences, root: int) -> None:
    """Hand the root's budget of rounds down its tree (second half of Algorithm 1)."""
    chunk = sequences.chunk_size
    stack = [_Visit(root, True, counts.ready[root], 0, None)]
    while stack:
        visit = stack.pop()
        v, mine = visit.segment, visit.sequence
        if mine is None:
            mine = sequences.start(visit.round, visit.anchor, visit.source)
        sequences.made[mine].segments.append(v)
        children = forest.children[v]
        if not children:
            continue
        same = visit.ready and forest.inside[v]
        delay = 0 if same else 1
        budget = visit.budget - delay
        continuation = _direct_continuation(children, counts, visit.budget, budget, same)
        anchor = forest.end[v] // chunk * chunk
        source = sequences.state(mine, anchor)
        side = _Visit(v, True, budget, visit.round + delay, None, anchor, source)
        stack.extend(side._replace(segment=u) for u in reversed(children) if u != continuation)
        stack.append(_Visit(continuation, same, visit.budget, visit.round, mine))


def _direct_continuation(children: list[int], counts: CallCounts, budget: int, side_budget: int, same: bool) -> int:
    """The first child that fits the budget and leaves no other child above that of side branches."""
    needs = counts.ready if same else counts.entered
    late = sum(counts.ready[u] > side_budget for u in children)
    return next(o for o in children if needs[o] <= budget and late == (counts.ready[o] > side_budget))
