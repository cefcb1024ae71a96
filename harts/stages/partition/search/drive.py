"""The search from its first to its last step: rebuilt, brought to a legal number of microbatches, evened out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.ir.prefix_tree import least_microbatches, prefix_tree
from harts.stages.partition.greedy import aligned
from harts.stages.partition.labels import renumbered
from harts.stages.partition.search.balance import balance
from harts.stages.partition.search.destroy import CROWD, forks
from harts.stages.partition.search.peel import tools
from harts.stages.partition.search.problem import Problem
from harts.stages.partition.search.rebuild import rebuild
from harts.stages.partition.search.state import COUNT, SLOTS, TOTAL, State, begin

STEP = 100
"""Rounds between two looks at the clock and at the goal."""
MOVES = 12
"""Moves tried for each round of rebuilding, as long as microbatches have fewer than twice CROWD members."""
FREE, LEGAL, EVEN = 0.6, 0.5, 1.0
"""Parts of the time left for rebuilding into any number of microbatches, into a legal number, and for moves."""


@dataclass(frozen=True)
class Budget:
    """The search ends when either is spent."""

    rounds: int
    """Of rebuilding."""
    stop: float | None
    """Reading of `time.perf_counter`; None is no limit, and makes the result depend on nothing but the arguments."""

    def pieces(self, rounds: int, size: int, part: float) -> Iterator[int]:
        """Rounds in pieces of a size, while a part of the time that is left now is not spent."""
        now = time.perf_counter()
        for first in range(0, rounds, size):
            if self.stop is not None and time.perf_counter() - now > part * (self.stop - now):
                return
            yield min(size, rounds - first)


def searched(
    problem: Problem, index: LcpIndex, start: Int64, *, budget: Budget, seed: int, tokens: bool
) -> list[Int64]:
    """Improve a partition, whose number of microbatches may be any.

    Args:
        problem: what is searched, and in what measure.
        index: LCPs of sorted positions.
        start: labels of sorted positions from 0, [N].
        budget: when to end.
        seed: of the search.
        tokens: costs are compact tokens, so that what meets the volume bound in both sums ends the search, too.

    Returns:
        Labels of the rebuilt partition and, if there is something to even out, of the evened one, which may have a
        larger total, [N] each; none if no legal number of microbatches was reached.
    """
    kit = tools(seed)
    tree = prefix_tree(index.length, index.lcp)
    least, bound = least_microbatches(tree, problem.capacity, problem.multiple)
    where = forks(tree, least)

    def rebuilt(problem: Problem, state: State, rounds: int, part: float) -> Int64:
        for piece in budget.pieces(rounds, STEP, part):
            if tokens and _meets(problem, state, bound):
                break
            rebuild(problem, where, state, kit, piece)
        return renumbered(state.label)

    last = budget.rounds // 4
    label = aligned(
        index,
        rebuilt(problem._replace(multiple=1), _begin(problem, start), budget.rounds - last, FREE),
        problem.multiple,
    )
    if label is None:
        return []
    label = rebuilt(problem, _begin(problem, label), last, LEGAL)
    state = _begin(problem, label)
    if problem.replicas == 1 or (tokens and _meets(problem, state, bound)):
        return [label]
    tries = budget.rounds * MOVES // max(1, len(label) // (int(state.numbers[COUNT]) * CROWD))
    for piece in budget.pieces(tries, STEP * MOVES, EVEN):
        balance(problem, where, state, kit.rng, piece)
    return [label, renumbered(state.label)]


def promising(problem: Problem, labels: Iterable[Int64]) -> list[Int64]:
    """Where to start from: the best partition, and the one with the fewest microbatches, whose slots are the fewest."""
    states = [_begin(problem, label) for label in labels]
    return [min(states, key=rank).label for rank in (partial(_value, problem), partial(_fewest, problem))]


def _value(problem: Problem, state: State) -> int:
    """What the search lowers."""
    return int(problem.total_weight * state.numbers[TOTAL] + state.numbers[SLOTS])


def _fewest(problem: Problem, state: State) -> tuple[int, int]:
    return int(state.numbers[COUNT]), _value(problem, state)


def _begin(problem: Problem, label: Int64) -> State:
    return begin(problem, label.copy(), int(label.max()) + 1)


def _meets(problem: Problem, state: State, bound: int) -> bool:
    """Neither sum can be less."""
    total, slots = int(state.numbers[TOTAL]), int(state.numbers[SLOTS])
    ideal = -(-bound // problem.replicas) * problem.replicas
    return total == bound and slots == ideal and int(state.numbers[COUNT]) % problem.multiple == 0
