"""Large-neighbourhood search: take a few microbatches apart, build them anew, keep what is not worse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64
from harts.ir.prefix_tree import prefix_tree
from harts.stages.partition.bins import Policy, empty_bins, place
from harts.stages.partition.search.destroy import Forks, chosen
from harts.stages.partition.search.intervals import best_intervals
from harts.stages.partition.search.peel import Rule, Tools, peeled
from harts.stages.partition.search.problem import Problem, lcp_among, measure
from harts.stages.partition.search.rng import Rng, below
from harts.stages.partition.search.state import (
    COUNT,
    SLOTS,
    TOTAL,
    State,
    exchanged,
    members,
    relink,
    renumber,
    slots_cost,
)

INTERVALS, GREEDY = 14, 14
"""Percent of the rebuilds that are exact intervals, and that place one trajectory after the other; the others peel."""
NOISE = 9
"""Noise is up to 2**(NOISE - 1) 256ths of a token's profit."""
PENALTY = 64
"""Penalties of the peelings are less than this."""
SQUEEZE = 8
"""Half of the peelings fill up to this part less than the capacity."""


class Proposal(NamedTuple):
    """A new partition of some trajectories."""

    members: Int64
    """Sorted positions, ascending, [n]."""
    label: Int64
    """New microbatch of each, from 0, [n]."""
    pieces: int
    """New microbatches."""


@compiled
def rebuild(problem: Problem, forks: Forks, state: State, tools: Tools, rounds: int) -> int:
    """Run some rounds on a state; returns how many of them changed it."""
    seen = np.zeros(len(state.label) + 1, dtype=np.int64)
    ranked = np.empty(len(state.label), dtype=np.int64)
    kept = 0
    for _ in range(rounds):
        old = chosen(forks, state, seen, tools.rng)
        if len(old) > 0:
            proposal = proposed(problem, _members_of(state, old), tools)
            kept += _keep(problem, state, old, proposal, ranked)
    return kept


@compiled
def _members_of(state: State, microbatches: Int64) -> Int64:
    """Sorted positions of some microbatches, ascending, [n]."""
    found = members(state, microbatches[0])
    for k in microbatches[1:]:
        found = np.concatenate((found, members(state, k)))
    return np.sort(found)


@compiled
def proposed(problem: Problem, members: Int64, tools: Tools) -> Proposal:
    """A new partition of some sorted positions, ascending."""
    lcp = lcp_among(problem, members)
    length = problem.length[members]
    kind = below(tools.rng, 100)
    if kind < INTERVALS:
        label, count = best_intervals(problem, members, lcp)
        return Proposal(members, label, count)
    if kind < INTERVALS + GREEDY:
        label, count = _placed(length, lcp, problem.capacity, tools.rng)
        return Proposal(members, label, count)
    capacity = problem.capacity
    if below(tools.rng, 2) == 0:
        capacity = max(length.max(), capacity - below(tools.rng, capacity // SQUEEZE + 1))
    rule = Rule(capacity, 1 << below(tools.rng, NOISE), below(tools.rng, PENALTY))
    label, count = peeled(prefix_tree(length, lcp), rule, tools)
    return Proposal(members, label, count)


@compiled
def _placed(length: Int64, lcp: Int64, capacity: int, rng: Rng) -> tuple[Int64, int]:
    """Place trajectories in a random order, now and then the longest first, where they fit best or share most."""
    bins = empty_bins(length, lcp, capacity)
    key = np.empty(len(length), dtype=np.int64)
    longest = below(rng, 2) * 2
    for i in range(len(length)):
        key[i] = -longest * length[i] - below(rng, capacity)
    policy = Policy(capacity + 1, 1) if below(rng, 2) == 0 else Policy(1, capacity + 1)
    for x in np.argsort(key, kind="mergesort"):
        place(bins, policy, x)
    return bins.label, bins.opened[0]


@compiled
def _keep(problem: Problem, state: State, old: Int64, new: Proposal, ranked: Int64) -> bool:
    """Replace microbatches by new ones if the objective does not rise."""
    work = np.empty(new.pieces, dtype=np.int64)
    cost = np.empty(new.pieces, dtype=np.int64)
    for k in range(new.pieces):
        work[k], cost[k] = measure(problem, new.members[new.label == k])
    total = state.numbers[TOTAL] + cost.sum() - state.cost[old].sum()
    before = problem.total_weight * state.numbers[TOTAL] + state.numbers[SLOTS]
    if problem.total_weight * total + total > before:  # a slot's heaviest is at least its mean
        return False
    gone = np.sort(state.cost[old])[::-1]
    count = exchanged(state.ranked[: state.numbers[COUNT]], gone, np.sort(cost)[::-1], ranked)
    slots = slots_cost(ranked, count, problem.replicas)
    if problem.total_weight * total + slots > before or count % problem.multiple:
        return False
    number = renumber(state, old, new.pieces)
    for k in range(new.pieces):
        state.work[number[k]], state.cost[number[k]] = work[k], cost[k]
    state.label[new.members] = number[new.label]
    relink(state, new.members)
    state.ranked[:count] = ranked[:count]
    state.numbers[COUNT], state.numbers[TOTAL], state.numbers[SLOTS] = count, total, slots
    return True
