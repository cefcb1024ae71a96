"""Even out slots: move or swap trajectories, one or all below a fork, where the microbatches of a slot differ most."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64
from harts.stages.partition.search.destroy import Forks
from harts.stages.partition.search.problem import Problem, measure
from harts.stages.partition.search.rng import Rng, below
from harts.stages.partition.search.state import COUNT, SLOTS, TOTAL, State, exchanged, members, relink, slots_cost

UNEVEN = 32
"""How much more a slot's waiting counts the larger it is, as a part of the slot's cost."""
LOOKS = 3
"""Slots drawn for each try, of which the most uneven is taken."""
CLIMB = 5
"""Levels that a fork may lie above a trajectory; half of the trajectories go alone."""

FILL, UNLOAD, SWAP = 0, 1, 2


class Part(NamedTuple):
    """Members of a microbatch at sorted positions first..last; none if last is less."""

    microbatch: int
    first: int
    last: int


@compiled
def balance(problem: Problem, forks: Forks, state: State, rng: Rng, tries: int) -> int:
    """Try some moves on a state whose number of microbatches D divides; returns how many were made.

    A move is made if it lowers `total_weight * total cost + sum of (D * heaviest + UNEVEN * waste^2 / cost)` over
    slots, with a slot's waste D * heaviest - cost. The number of microbatches stays.
    """
    count = int(state.numbers[COUNT])
    order = np.unique(state.label)
    order = order[np.argsort(-state.cost[order], kind="mergesort")]
    ranked = np.empty(count, dtype=np.int64)
    gone, new = np.empty(2, dtype=np.int64), np.empty(2, dtype=np.int64)
    value = _value(problem, state.ranked[:count], state.numbers[TOTAL])
    made = 0
    for _ in range(tries):
        ours, theirs = _drawn(problem, forks, state, order, rng)
        a, b = ours.microbatch, theirs.microbatch
        of_a, of_b = members(state, a), members(state, b)
        new_a, new_b = _after(of_a, ours, of_b, theirs), _after(of_b, theirs, of_a, ours)
        if a == b or len(new_a) == 0 or len(new_b) == 0:
            continue
        work_a, cost_a = measure(problem, new_a)
        work_b, cost_b = measure(problem, new_b)
        if max(work_a, work_b) > problem.capacity:
            continue
        _two(state.cost[a], state.cost[b], gone)
        _two(cost_a, cost_b, new)
        exchanged(state.ranked[:count], gone, new, ranked)
        total = state.numbers[TOTAL] + cost_a + cost_b - state.cost[a] - state.cost[b]
        after = _value(problem, ranked, total)
        if after >= value:
            continue
        made += 1
        value = after
        state.label[new_a], state.label[new_b] = a, b
        relink(state, new_a)
        relink(state, new_b)
        state.work[a], state.work[b] = work_a, work_b
        state.cost[a], state.cost[b] = cost_a, cost_b
        state.ranked[:count] = ranked
        state.numbers[TOTAL] = total
        order = order[np.argsort(-state.cost[order], kind="mergesort")]
    state.numbers[SLOTS] = slots_cost(state.ranked, count, problem.replicas)
    return made


@compiled
def _value(problem: Problem, ranked: Int64, total: int) -> int:
    value = problem.total_weight * total
    for first in range(0, len(ranked), problem.replicas):
        slot = 0
        for k in range(first, first + problem.replicas):
            slot += ranked[k]
        waste = ranked[first] * problem.replicas - slot
        value += slot + waste + 1024 * waste // max(1, slot) * waste * UNEVEN // 1024
    return int(value)


@compiled
def _two(a: int, b: int, out: Int64) -> None:
    out[0], out[1] = max(a, b), min(a, b)


@compiled
def _drawn(problem: Problem, forks: Forks, state: State, order: Int64, rng: Rng) -> tuple[Part, Part]:
    """Two parts to exchange: to fill a light microbatch of an uneven slot, to unload its heaviest, or to swap."""
    worst, place = -1, 0
    for _ in range(LOOKS):
        k = below(rng, len(order) // problem.replicas) * problem.replicas
        high, low = state.cost[order[k]], state.cost[order[k + problem.replicas - 1]]
        uneven = (high - low) * 1024 // max(1, high)
        if uneven > worst:
            worst, place = uneven, k
    kind = below(rng, 3)
    y = below(rng, len(state.label))
    other = _part(forks, state.label[y], y, rng)
    if kind == FILL:
        light = min(problem.replicas - 1, 1 + below(rng, max(1, problem.replicas - 1)))
        return Part(order[place + light], 0, -1), other
    own = order[place] if kind == UNLOAD else order[place + below(rng, problem.replicas)]
    held = members(state, own)
    part = _part(forks, own, held[below(rng, len(held))], rng)
    if kind == UNLOAD:
        return part, Part(order[below(rng, len(order))], 0, -1)
    return part, other


@compiled
def _part(forks: Forks, microbatch: int, x: int, rng: Rng) -> Part:
    """A member of a microbatch, or all of its members below a fork above that one."""
    v = forks.node[x]
    for _ in range(below(rng, 2) * (1 + below(rng, CLIMB))):
        if forks.parent[v] >= 0:
            v = forks.parent[v]
    return Part(microbatch, forks.first[v], forks.last[v])


@compiled
def _after(own: Int64, part: Part, other: Int64, comes: Part) -> Int64:
    """Members of a microbatch without a part, and with a part of another one, ascending."""
    stay = own[(own < part.first) | (own > part.last)]
    come = other[(other >= comes.first) & (other <= comes.last)]
    return np.sort(np.concatenate((stay, come)))
