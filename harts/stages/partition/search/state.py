"""A partition that the search changes: microbatches with their work and cost, and the slots that they make."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64
from harts.stages.partition.search.problem import Problem, measure

COUNT, TOTAL, SLOTS = 0, 1, 2
"""Places in `State.numbers`."""


class State(NamedTuple):
    """K microbatches, whose numbers may have gaps; its arrays change in place."""

    label: Int64
    """Microbatch of each sorted position, [N]."""
    work: Int64
    """Compact tokens of each microbatch, [N]."""
    cost: Int64
    """Cost of each microbatch, [N]."""
    ranked: Int64
    """All costs, largest first; K of [N]."""
    spare: Int64
    """Numbers that no microbatch has; N - K of [N]."""
    numbers: Int64
    """K, the total cost, and `slots_cost`, [3]."""


@compiled
def begin(problem: Problem, label: Int64, count: int) -> State:
    """The state of a partition into microbatches 0..count-1, none of them empty."""
    total = len(label)
    size = np.zeros(count + 1, dtype=np.int64)
    for microbatch in label:
        size[microbatch + 1] += 1
    place = np.cumsum(size)
    members = np.empty(total, dtype=np.int64)
    for x in range(total):
        members[place[label[x]]] = x
        place[label[x]] += 1
    work = np.zeros(total, dtype=np.int64)
    cost = np.zeros(total, dtype=np.int64)
    for k in range(count):
        work[k], cost[k] = measure(problem, members[place[k] - size[k + 1] : place[k]])
    ranked = np.zeros(total, dtype=np.int64)
    ranked[:count] = np.sort(cost[:count])[::-1]
    spare = np.zeros(total, dtype=np.int64)
    for k in range(count, total):
        spare[k - count] = k
    numbers = np.array([count, cost.sum(), slots_cost(ranked, count, problem.replicas)])
    return State(label, work, cost, ranked, spare, numbers)


@compiled
def slots_cost(ranked: Int64, count: int, replicas: int) -> int:
    """D times the sum over slots of the heaviest: blocks of D of the ranked costs; a last slot may lack some."""
    heaviest = 0
    for k in range(0, count, replicas):
        heaviest += ranked[k]
    return heaviest * replicas


@compiled
def renumber(state: State, old: Int64, count: int) -> Int64:
    """Give back the numbers of old microbatches and take others for new ones, [count]."""
    spare = len(state.label) - state.numbers[COUNT]
    for k in old:
        state.spare[spare] = k
        spare += 1
    return state.spare[spare - count : spare].copy()


@compiled
def exchanged(ranked: Int64, gone: Int64, new: Int64, out: Int64) -> int:
    """Merge new costs into ranked ones and leave out those that are gone; all largest first. Returns how many."""
    used, lost, met = 0, 0, 0
    for value in ranked:
        if lost < len(gone) and gone[lost] == value:
            lost += 1
            continue
        while met < len(new) and new[met] >= value:
            out[used] = new[met]
            met += 1
            used += 1
        out[used] = value
        used += 1
    while met < len(new):
        out[used] = new[met]
        met += 1
        used += 1
    return used
