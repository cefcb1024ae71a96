"""Partition one rollout tree by constraint programming, within a time limit."""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from harts.ir.base import Int64
from harts.ir.prefix_tree import PrefixTree, prefix_tree

Parts = list[list[int]]
"""Positions of each part, ascending."""


def partitioned(length: Int64, lcp: Int64, capacity: int, seconds: float) -> Parts:
    """Split trajectories into parts of at most `capacity` compact tokens with the least work found in time.

    The search starts from next-fit in depth-first order and may leave some of its parts empty; what it returns is
    never worse.

    Args:
        length: tokens of each trajectory in sorted order, [N]; none is above the capacity.
        lcp: tokens shared with the one before, [N]; lcp[0] is 0.
        capacity: compact tokens of a part.
        seconds: time limit of the solver, which uses one worker.
    """
    start = next_fit(length, lcp, capacity)
    if len(start) == 1:
        return start
    return _searched(prefix_tree(length, lcp), start, capacity, seconds)


def next_fit(length: Int64, lcp: Int64, capacity: int) -> Parts:
    """Fill parts one after another in sorted order, which is depth first."""
    parts: Parts = []
    work = capacity  # the first trajectory opens the first part
    for i, (tokens, shared) in enumerate(zip(length.tolist(), lcp.tolist(), strict=True)):
        work += tokens - shared
        if work > capacity:
            parts.append([])
            work = tokens
        parts[-1].append(i)
    return parts


def _searched(tree: PrefixTree, start: Parts, capacity: int, seconds: float) -> Parts:
    """`used[v][k]` says that part k computes node v; a node needs the one above it, and each leaf has one part."""
    model = cp_model.CpModel()
    used = [[model.new_bool_var("") for _ in start] for _ in tree.end]
    hint = _nodes_of(tree, start)
    for v, row in enumerate(used):
        above = int(tree.parent[v])
        for k, variable in enumerate(row):
            model.add_hint(variable, bool(hint[v, k]))
            if above >= 0:
                model.add_implication(variable, used[above][k])
        if tree.leaf[v] >= 0:
            model.add_exactly_one(row)
    paid = np.flatnonzero(tree.tokens)
    tokens = tree.tokens[paid].tolist()
    works = [cp_model.LinearExpr.weighted_sum([used[v][k] for v in paid], tokens) for k in range(len(start))]
    for work in works:
        model.add(work <= capacity)
    model.minimize(sum(works))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    leaves = np.flatnonzero(tree.leaf >= 0)
    parts: Parts = [[int(tree.leaf[v]) for v in leaves if solver.boolean_value(used[v][k])] for k in range(len(start))]
    return [part for part in parts if part]


def _nodes_of(tree: PrefixTree, parts: Parts) -> np.ndarray:
    """Whether each part needs each node, bool [M, K]."""
    part_of = np.concatenate([np.full(len(part), k) for k, part in enumerate(parts)])[np.argsort(np.concatenate(parts))]
    needed = np.zeros((len(tree.end), len(parts)), dtype=np.bool_)
    for v, above in enumerate(tree.parent.tolist()):
        if tree.leaf[v] >= 0:
            needed[v, part_of[tree.leaf[v]]] = True
        if above >= 0:
            needed[above] |= needed[v]
    return needed
