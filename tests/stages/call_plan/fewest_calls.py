"""The fewest calls that the execution model allows, by exhaustive search; knows nothing of equations (12) to (14).

One call runs a set of segments. A segment of it either starts an input sequence, for which the state at the chunk
boundary before its fork must exist before the call, or directly follows its parent, which runs in the same call and
which no other segment may follow. A boundary state exists once the segment that holds the token before it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations, product

from harts.ir import SegmentTree

Calls = Callable[[frozenset[int]], Iterator[frozenset[int]]]


class Model:
    """What one call may run after some segments have run."""

    def __init__(self, tree: SegmentTree, chunk_size: int) -> None:
        self.parent = tree.parent.tolist()
        self.all = frozenset(range(len(self.parent)))
        start = tree.start.tolist()
        self.maker = [self._maker(tree, v, start[v] // chunk_size * chunk_size) for v in self.all]

    @staticmethod
    def _maker(tree: SegmentTree, segment: int, boundary: int) -> int:
        """The segment that holds the token before a boundary on the path to a segment; -1 at position 0."""
        if boundary == 0:
            return -1
        return next(u for u in tree.path(segment) if tree.start[u] < boundary <= tree.end[u])

    def can_start(self, segment: int, done: frozenset[int]) -> bool:
        return self.maker[segment] < 0 or self.maker[segment] in done

    def is_call(self, run: frozenset[int], done: frozenset[int]) -> bool:
        followers = [self.parent[v] for v in run if not self.can_start(v, done)]
        return all(up in run for up in followers) and len(set(followers)) == len(followers)

    def every_call(self, done: frozenset[int]) -> Iterator[frozenset[int]]:
        """All sets that one call may run."""
        rest = sorted(self.all - done)
        subsets = chain.from_iterable(combinations(rest, size) for size in range(1, len(rest) + 1))
        return (run for run in map(frozenset, subsets) if self.is_call(run, done))

    def greatest_calls(self, done: frozenset[int]) -> Iterator[frozenset[int]]:
        """Only the sets that cannot be enlarged: one more segment done never takes a later call away."""
        free = {v for v in self.all - done if self.can_start(v, done)}
        bound = [
            [v for v in self.all - done - free if self.parent[v] == up] or [-1]
            for up in self.all - done  # a segment whose parent has run can start: boundaries before its fork exist
        ]
        for followers in product(*bound):
            run = set(free)
            for v in sorted(followers):
                if v >= 0 and self.parent[v] in run:
                    run.add(v)
            yield frozenset(run)


def fewest(model: Model, calls: Calls) -> int:
    """Breadth-first search over sets of segments that have run."""
    reached, count = {frozenset[int]()}, 0
    seen = set(reached)
    while model.all not in reached:
        reached = {done | run for done in reached for run in calls(done)} - seen
        seen |= reached
        count += 1
    return count
