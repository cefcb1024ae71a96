"""Even out slots: move one trajectory, or swap two, where the microbatches of a slot differ most."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64
from harts.stages.partition.search.problem import Problem, cost_after, shared
from harts.stages.partition.search.rng import Rng, below
from harts.stages.partition.search.state import COUNT, SLOTS, TOTAL, State, exchanged, relink, slots_cost

UNEVEN = 32
"""How much more a slot's waiting counts the larger it is, as a part of the slot's cost."""
LOOKS = 3
"""Slots drawn for each try, of which the most uneven is taken."""

FILL, UNLOAD, SWAP = 0, 1, 2


class Move(NamedTuple):
    """Trajectory x goes from microbatch a to b, and y from b to a unless it is -1."""

    x: int
    a: int
    y: int
    b: int


class Change(NamedTuple):
    """What a microbatch gains."""

    work: int
    cost: int


@compiled
def balance(problem: Problem, state: State, rng: Rng, tries: int) -> int:
    """Try some moves on a state whose number of microbatches D divides; returns how many were made.

    A move is made if it lowers `total_weight * total cost + sum of (D * heaviest + UNEVEN * waste^2 / cost)` over
    slots, with a slot's waste D * heaviest - cost. The number of microbatches stays.
    """
    count = int(state.numbers[COUNT])
    order = np.argsort(-state.cost[_used(state)])
    order = _used(state)[order]
    ranked = np.empty(count, dtype=np.int64)
    gone, new = np.empty(2, dtype=np.int64), np.empty(2, dtype=np.int64)
    value = _value(problem, state.ranked[:count], state.numbers[TOTAL])
    made = 0
    for _ in range(tries):
        move = _drawn(problem, state, order, rng)
        if move.x < 0 or move.a == move.b or (state.size[move.a] == 1 and move.y < 0):
            continue
        of_a = _exchange(problem, state.label, move.x, move.y, move.a)
        of_b = _exchange(problem, state.label, move.y, move.x, move.b)
        if max(state.work[move.a] + of_a.work, state.work[move.b] + of_b.work) > problem.capacity:
            continue
        _two(state.cost[move.a], state.cost[move.b], gone)
        _two(state.cost[move.a] + of_a.cost, state.cost[move.b] + of_b.cost, new)
        exchanged(state.ranked[:count], gone, new, ranked)
        total = state.numbers[TOTAL] + of_a.cost + of_b.cost
        after = _value(problem, ranked, total)
        if after >= value:
            continue
        made += 1
        value = after
        state.label[move.x] = move.b
        state.size[move.a] -= 1
        state.size[move.b] += 1
        if move.y >= 0:
            state.label[move.y] = move.a
            state.size[move.a] += 1
            state.size[move.b] -= 1
        for k, change in ((move.a, of_a), (move.b, of_b)):
            state.work[k] += change.work
            state.cost[k] += change.cost
        state.ranked[:count] = ranked
        state.numbers[TOTAL] = total
        order = order[np.argsort(-state.cost[order])]
    relink(state, np.arange(len(state.label)))
    state.numbers[SLOTS] = slots_cost(state.ranked, count, problem.replicas)
    return made


@compiled
def _used(state: State) -> Int64:
    """Numbers of the microbatches, [K]."""
    return np.unique(state.label).astype(np.int64)


@compiled
def _value(problem: Problem, ranked: Int64, total: int) -> int:
    value = problem.total_weight * total
    for first in range(0, len(ranked), problem.replicas):
        slot = 0
        for k in range(first, first + problem.replicas):
            slot += ranked[k]
        waste = ranked[first] * problem.replicas - slot
        value += slot + waste + 1024 * waste // slot * waste * UNEVEN // 1024
    return value


@compiled
def _two(a: int, b: int, out: Int64) -> None:
    out[0], out[1] = max(a, b), min(a, b)


@compiled
def _drawn(problem: Problem, state: State, order: Int64, rng: Rng) -> Move:
    """Something to do about an uneven slot: fill a light microbatch, unload the heaviest, or swap with any other."""
    worst, first = -1, 0
    for _ in range(LOOKS):
        k = below(rng, len(order) // problem.replicas) * problem.replicas
        high, low = state.cost[order[k]], state.cost[order[k + problem.replicas - 1]]
        uneven = (high - low) * 1024 // high
        if uneven > worst:
            worst, first = uneven, k
    x = below(rng, len(state.label))
    kind = below(rng, 3)
    if kind == FILL:
        light = order[first + min(problem.replicas - 1, 1 + below(rng, max(1, problem.replicas - 1)))]
        return Move(x, state.label[x], -1, light)
    a = order[first] if kind == UNLOAD else order[first + below(rng, problem.replicas)]
    while state.label[x] != a:  # any member, found from a random place on
        x = x + 1 if x + 1 < len(state.label) else 0
    if kind == UNLOAD:
        return Move(x, a, -1, order[below(rng, len(order))])
    y = below(rng, len(state.label))
    return Move(x, a, y, state.label[y])


@compiled
def _exchange(problem: Problem, label: Int64, leaves: int, enters: int, k: int) -> Change:
    """What microbatch k gains if one member leaves and another trajectory enters; -1 is none."""
    work, cost = 0, 0
    if leaves >= 0:
        alone = _added(problem, label, leaves, k, -1)
        work, cost = -alone.work, -alone.cost
    if enters >= 0:
        more = _added(problem, label, enters, k, leaves)
        work, cost = work + more.work, cost + more.cost
    return Change(work, cost)


@compiled
def _added(problem: Problem, label: Int64, x: int, k: int, without: int) -> Change:
    """What x adds to the other members of microbatch k, one of them left out."""
    left = x - 1
    while left >= 0 and (label[left] != k or left == without):
        left -= 1
    right = x + 1
    while right < len(label) and (label[right] != k or right == without):
        right += 1
    to_left = shared(problem.minima, left, x) if left >= 0 else 0
    work = problem.length[x] - to_left
    cost = cost_after(problem, left, x, to_left)
    if right < len(label):
        to_right = shared(problem.minima, x, right)
        across = min(to_left, to_right) if left >= 0 else 0
        work += across - to_right
        cost += cost_after(problem, x, right, to_right) - cost_after(problem, left, right, across)
    return Change(work, cost)
