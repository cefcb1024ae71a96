"""What is timed: our operator, one plain FLA call on as many rows, and what others do with a tree.

Shape suffixes: C compact rows, HV value heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.backends.base import LinearAttention
from harts.backends.plan_tensors import PlanTensors
from harts.ir.runs import expand_runs
from linear_bench.fla_call import FlaCall, packing
from linear_bench.inputs import Shape, gathered
from linear_bench.trajectories import Group
from linear_bench.workloads import Workload, depths

Run = Callable[[dict[str, Tensor]], Tensor | list[Tensor]]


class Part(NamedTuple):
    """One call with its own graph."""

    run: Run
    leaves: dict[str, Tensor]
    upstream: Tensor | list[Tensor]
    compact_row: Tensor | None = None
    """Compact row of each output, where outputs should be those of our operator."""


class Candidate(NamedTuple):
    """Its time is the sum over its parts, which is one unless its rows are too many for one call."""

    name: str
    parts: tuple[Part, ...]


class Problem(NamedTuple):
    """All that candidates are made from."""

    workload: Workload
    shape: Shape
    plan: PlanTensors
    leaves: dict[str, Tensor]
    """Of the compact rows."""
    upstream: Tensor
    """Gradient of their outputs, [C, HV, V]."""
    groups: list[Group]


def operator(problem: Problem, name: str, backend: LinearAttention) -> Candidate:
    """A backend of ours on the tree."""
    run = partial(_mix, backend, problem.plan)
    return Candidate(name, (Part(run, problem.leaves, problem.upstream),))


def _mix(backend: LinearAttention, plan: PlanTensors, leaves: dict[str, Tensor]) -> Tensor:
    return backend.mix(leaves, plan)


def plain(problem: Problem, name: str, call: FlaCall) -> Candidate:
    """One call on C rows without any sharing, cut into sequences in one of three ways."""
    rows = problem.workload.rows
    if name == "plain":  # own rows of the tree's input sequences
        bounds = torch.tensor(problem.plan.cu_rows)
    elif name == "plain_one":
        bounds = torch.tensor([0, rows])
    else:  # the mean length of a trajectory
        tree = problem.workload.layout.plan.tree
        step = -(-tree.semantic_tokens // len(tree.key))
        bounds = torch.tensor([*range(0, rows, step), rows])
    run = partial(_packed, call, bounds, problem.shape.device)
    return Candidate(name, (Part(_once(run), problem.leaves, problem.upstream),))


def flat(problem: Problem, call: FlaCall) -> Candidate:
    """All rows of all trajectories, gathered beforehand: trajectory-wise training."""
    return Candidate("flat", tuple(_flat_parts(problem, call)))


def _flat_parts(problem: Problem, call: FlaCall) -> Iterator[Part]:
    for group in problem.groups:
        row = group.compact_row
        run = partial(_packed, call, group.cu_seqlens, problem.shape.device)
        yield Part(_once(run), gathered(problem.leaves, row), problem.upstream.index_select(0, row), row)


def expand(problem: Problem, call: FlaCall) -> Candidate:
    """Compact rows are gathered for each trajectory, all are run, and the first output of each row is taken."""
    return Candidate("expand", tuple(_expand_parts(problem, call)))


def _expand_parts(problem: Problem, call: FlaCall) -> Iterator[Part]:
    for group in problem.groups:
        run = partial(_expanded, call, group, problem.shape.device)
        row = group.compact_row.index_select(0, group.new)
        yield Part(_once(run), problem.leaves, problem.upstream.index_select(0, row), row)


def depth(problem: Problem, call: FlaCall) -> Candidate:
    """One call for each depth of the tree; a segment starts from its parent's final state, wherever in a chunk it is.

    The rows are in the order of the calls, so that nothing is gathered but states.
    """
    layout = problem.workload.layout
    tree, level = layout.plan.tree, depths(layout.plan.tree)
    order = np.argsort(level, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.searchsorted(level[order], level[order])  # number within its level
    row = torch.from_numpy(expand_runs(layout.segment_row[order], tree.length[order])).to(problem.shape.device)
    levels = []
    for each in np.split(order, np.flatnonzero(np.diff(level[order])) + 1):
        cu = torch.from_numpy(np.concatenate(([0], np.cumsum(tree.length[each]))))
        levels.append((cu, place[tree.parent[each]]))
    run = partial(_by_depth, call, levels, problem.shape.device)
    part = Part(_once(run), gathered(problem.leaves, row), problem.upstream.index_select(0, row), row)
    return Candidate("depth", (part,))


def _once(make: Callable[[], Run]) -> Run:
    """Index tensors are made at the first call and kept: a plan is shared by all layers."""
    made: list[Run] = []

    def run(leaves: dict[str, Tensor]) -> Tensor | list[Tensor]:
        if not made:
            made.append(make())
        return made[0](leaves)

    return run


def _packed(call: FlaCall, bounds: Tensor, device: str) -> Run:
    packed = packing(bounds, device)
    return lambda leaves: call(leaves, packed)[0]


def _expanded(call: FlaCall, group: Group, device: str) -> Run:
    packed = packing(group.cu_seqlens, device)

    def run(leaves: dict[str, Tensor]) -> Tensor:
        rows = {name: x.index_select(0, group.compact_row) for name, x in leaves.items()}
        return call(rows, packed)[0].index_select(0, group.new)

    return run


def _by_depth(call: FlaCall, levels: list[tuple[Tensor, np.ndarray]], device: str) -> Run:
    packed = [packing(cu, device) for cu, _ in levels]
    parents = [torch.from_numpy(parent).to(device) for _, parent in levels]
    sizes = [int(cu[-1]) for cu, _ in levels]

    def run(leaves: dict[str, Tensor]) -> Tensor:
        rows = {name: x.split(sizes) for name, x in leaves.items()}
        outputs: list[Tensor] = []
        states: Tensor | None = None
        for i, (cu, parent) in enumerate(zip(packed, parents, strict=True)):
            start = None if states is None else states.index_select(0, parent)
            output, states = call({name: x[i] for name, x in rows.items()}, cu, start, i + 1 < len(packed))
            outputs.append(output)
        return torch.cat(outputs)

    return run
