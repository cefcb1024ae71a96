"""The planning baseline over OR-Tools (SPEC section 7): trees go to replicas first, each replica is planned alone.

    task trees -> first-fit decreasing to replicas -> CP-SAT for each tree -> first-fit decreasing packing of its parts
    within the replica -> cheapest extra splits until all replicas have equally many microbatches

A task tree is all trajectories of one group. Each replica runs its microbatches heaviest first, which is the best
that can be done for the slots after the trees were distributed.
"""

from __future__ import annotations

import numpy as np

from harts.errors import PlanError
from harts.ir import CompactTrie
from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.ir.prefix_tree import prefix_tree, volume_bound
from planner_bench.cp_sat import partitioned
from planner_bench.verify import Plan


def or_tools_plan(trie: CompactTrie, capacity: int, replicas: int, seconds: float) -> Plan:
    """Plan a step.

    Args:
        trie: the step's trajectories.
        capacity: compact tokens of a microbatch.
        replicas: D.
        seconds: time limit of the solver for each task tree that does not fit into one microbatch.

    Raises:
        PlanError: there are fewer trees than replicas, or a replica has too few trajectories to split further.
    """
    index = trie.index
    trees = _trees(trie)
    if len(trees) < replicas:
        raise PlanError(f"{trie.batch.source}: {len(trees)} task trees cannot go to {replicas} replicas")
    by_replica = [
        _packed(index, [part for tree in held for part in _parts(index, tree, capacity, seconds)], capacity)
        for held in _distributed(index, trees, capacity, replicas)
    ]
    slots = max(map(len, by_replica))
    microbatch = np.empty(len(index), dtype=np.int64)
    work = np.empty((slots, replicas), dtype=np.int64)
    for replica, held in enumerate(by_replica):
        full = _split(index, held, slots)
        for slot, members in enumerate(sorted(full, key=lambda members: -index.set_work(members))):
            microbatch[trie.order[members]] = slot * replicas + replica
            work[slot, replica] = index.set_work(members)
    return Plan(microbatch, work)


def _trees(trie: CompactTrie) -> list[Int64]:
    """Sorted positions of each group's trajectories, ascending."""
    group = trie.batch.columns.group[trie.order]
    return [np.flatnonzero(group == which) for which in np.unique(group)]


def _distributed(index: LcpIndex, trees: list[Int64], capacity: int, replicas: int) -> list[list[Int64]]:
    """First-fit decreasing into replicas that hold an equal share; what fits nowhere goes to the least loaded.

    The size of a tree is the least work that its microbatches have together, since deep trees grow when split. The
    last trees go to replicas that would have none.
    """
    works = [volume_bound(prefix_tree(*_shape(index, tree)), capacity, 1) for tree in trees]
    share = -(-sum(works) // replicas)
    load = np.zeros(replicas, dtype=np.int64)
    held: list[list[Int64]] = [[] for _ in range(replicas)]
    for placed, which in enumerate(sorted(range(len(trees)), key=lambda which: -works[which])):
        fits = np.flatnonzero(load + works[which] <= share)
        last = len(trees) - placed == held.count([])
        replica = int(fits[0]) if len(fits) and not last else int(load.argmin())
        held[replica].append(trees[which])
        load[replica] += works[which]
    return held


def _parts(index: LcpIndex, tree: Int64, capacity: int, seconds: float) -> list[Int64]:
    """One task tree, split by CP-SAT."""
    return [tree[part] for part in partitioned(*_shape(index, tree), capacity, seconds)]


def _shape(index: LcpIndex, members: Int64) -> tuple[Int64, Int64]:
    """Tokens of each member, and those that it shares with the one before it; [n] each."""
    return index.length[members], np.concatenate(([0], index.neighbours(members[:-1], members[1:])))


def _packed(index: LcpIndex, parts: list[Int64], capacity: int) -> list[Int64]:
    """First-fit decreasing of parts into microbatches, by their work alone; the sharing of parts counts afterwards."""
    works = [index.set_work(part) for part in parts]
    room: list[int] = []
    held: list[list[Int64]] = []
    for which in sorted(range(len(parts)), key=lambda which: -works[which]):
        fit = next((k for k, left in enumerate(room) if works[which] <= left), None)
        if fit is None:
            fit = len(room)
            room.append(capacity)
            held.append([])
        room[fit] -= works[which]
        held[fit].append(parts[which])
    return [np.sort(np.concatenate(inside)) for inside in held]


def _split(index: LcpIndex, microbatches: list[Int64], count: int) -> list[Int64]:
    """Cut at the least shared tokens, of equals where the halves are most even, until there are `count`."""
    held = list(microbatches)
    while len(held) < count:
        cuts = [(*_cheapest_cut(index, members), k) for k, members in enumerate(held) if len(members) > 1]
        if not cuts:
            raise PlanError(f"a replica's {len(held)} microbatches cannot be split into the {count} that others have")
        _, _, at, k = min(cuts)
        whole = held.pop(k)
        held += [whole[:at], whole[at:]]
    return held


def _cheapest_cut(index: LcpIndex, members: Int64) -> tuple[int, int, int]:
    """(tokens that both sides compute, the heavier side's work, members of the first side) of the best cut."""
    shared = index.neighbours(members[:-1], members[1:])
    before = np.cumsum(index.length[members] - np.concatenate(([0], shared)))
    heavier = np.maximum(before[:-1], before[-1] - before[:-1] + shared)
    best = int(np.lexsort((heavier, shared))[0])
    return int(shared[best]), int(heavier[best]), best + 1
