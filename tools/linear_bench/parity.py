"""Parity before speed: bits against the operator run trajectory by trajectory, errors against float64.

The float64 oracle is the backend `naive` on every trajectory by itself, on a few heads: heads do not meet in the
operator. Each trajectory's tokens have gradients of their own; those of the tree are their sums, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from harts.backends.base import LinearAttention
from harts.backends.linear.naive import Naive
from harts.backends.plan_tensors import PlanTensors
from linear_bench.candidates import Problem
from linear_bench.inputs import gathered, upstream
from linear_bench.trajectories import Group

NAMES = ("o", "q", "k", "v", "g", "beta")
"""Of errors: the output, and the gradient of each input."""
SLACK = 1.1
"""Largest error of the tree, run at once or round by round, over that of trajectory-wise runs."""

Results = dict[str, Tensor]
"""By `NAMES`."""


class Limits(NamedTuple):
    """What counts as equal, and what is compared."""

    tolerance: float
    """Largest relative difference of outputs that are to be equal, and of errors; 0 asks for equal bits."""
    heads: int
    """Query heads that go through the float64 oracle."""


class Parity(NamedTuple):
    """What was found; it holds if there are no faults."""

    faults: list[str]
    errors: dict[str, dict[str, float]]
    """Relative errors to float64 of `tree`, `flat` and, if it was run, `rounds`."""


def with_sums(problem: Problem, seed: int) -> tuple[Problem, list[Tensor]]:
    """Gradients of each group's outputs [s, HV, V], and the problem with their sums as gradient of its own."""
    shape = problem.shape
    each = [upstream(shape, len(group.compact_row), seed + i) for i, group in enumerate(problem.groups)]
    total = torch.zeros(shape.output(problem.workload.rows), dtype=torch.float64, device=shape.device)
    for group, mine in zip(problem.groups, each, strict=True):
        total.index_add_(0, group.compact_row, mine.double())
    return problem._replace(upstream=total.to(shape.dtype)), each


class Operators(NamedTuple):
    """The operator, and other ways in which it can run."""

    fused: LinearAttention
    rounds: LinearAttention | None = None
    """The plan's rounds one by one."""
    recomputed: LinearAttention | None = None
    """With the forward pass's states computed again."""


def check(problem: Problem, operators: Operators, limits: Limits, seed: int) -> Parity:
    """Everything that must hold before a time is worth telling.

    Args:
        problem: its gradient of the outputs is replaced by one that is a sum over trajectories.
        operators: what is checked.
        limits: tolerance, and size of the float64 comparison.
        seed: of the gradients.
    """
    fused, rounds, recomputed = operators
    problem, each = with_sums(problem, seed)
    tree = results(fused, problem.leaves, problem.plan, problem.upstream)
    faults = [f"{name}: not finite" for name in NAMES if not bool(tree[name].isfinite().all())]
    for which, backend in (("the second run", fused), ("the run that computes states again", recomputed)):
        if backend is None:
            continue
        again = results(backend, problem.leaves, problem.plan, problem.upstream)
        faults += [
            f"{name}: {which} differs from the first"
            for name in NAMES
            if not _alike(tree[name], again[name], limits.tolerance)
        ]
        del again
    sums = _Sums(problem, limits)
    for group, mine in zip(problem.groups, each, strict=True):
        faults += sums.add(group, mine, fused, tree["o"])
    errors = {"tree": sums.errors(tree, sums.target), "flat": sums.errors(sums.flat, sums.flat_target)}
    faults += _above(errors, "tree", SLACK, limits.tolerance)
    if rounds is not None:
        other = results(rounds, problem.leaves, problem.plan, problem.upstream)
        if not _alike(other["o"], tree["o"], limits.tolerance):
            faults.append("o: rounds run one by one differ")
        errors["rounds"] = sums.errors(other, sums.target)
        faults += _above(errors, "rounds", SLACK, limits.tolerance)
    return Parity(faults, errors)


def results(backend: LinearAttention, leaves: dict[str, Tensor], plan: PlanTensors, grad: Tensor) -> Results:
    """Output and the gradients of all inputs."""
    output = backend.mix(leaves, plan)
    found = torch.autograd.grad(output, list(leaves.values()), grad)
    return {"o": output.detach(), **dict(zip(leaves, found, strict=True))}


class _Sums:
    """Trajectory-wise results, added up over the groups for each compact row, on the heads that are compared."""

    def __init__(self, problem: Problem, limits: Limits) -> None:
        self.problem, self.limits = problem, limits
        self.multiplicity = torch.zeros(problem.workload.rows, dtype=torch.float64, device=problem.shape.device)
        for group in problem.groups:
            self.multiplicity.index_add_(0, group.compact_row, torch.ones_like(group.compact_row, dtype=torch.float64))
        self.flat, self.flat_target, self.target = self._zeros(), self._zeros(), self._zeros()

    def add(self, group: Group, grad: Tensor, fused: LinearAttention, tree_output: Tensor) -> list[str]:
        """Run a group's trajectories by themselves, in our operator and in float64; faults in bits."""
        problem, row = self.problem, group.compact_row
        plan, token = group.plan(problem.shape.device)
        own = row.index_select(0, token)
        grad = grad.index_select(0, token)
        found = results(fused, gathered(problem.leaves, own), plan, grad)
        self._take(self.flat, own, {name: self._cut(name, x) for name, x in found.items()})
        wide = {name: self._cut(name, x.detach()).double() for name, x in problem.leaves.items()}
        leaves = gathered(wide, own)
        output = Naive(Naive.Config()).mix(leaves, plan)
        shared = problem.upstream.double() / self.multiplicity[:, None, None]
        wanted = (self.flat_target, self._cut("o", grad).double()), (self.target, self._cut("o", shared)[own])
        for target, of_output in wanted:
            gradients = torch.autograd.grad(output, list(leaves.values()), of_output, retain_graph=True)
            self._take(target, own, {"o": output.detach(), **dict(zip(leaves, gradients, strict=True))})
        return list(self._differing(group, found["o"], tree_output.index_select(0, own), token))

    def errors(self, found: Results, wanted: Results) -> dict[str, float]:
        """Relative, in the Euclidean norm, by name."""
        cut = {name: x if x.dtype == torch.float64 else self._cut(name, x).double() for name, x in found.items()}
        return {name: _relative(cut[name], wanted[name]) for name in NAMES}

    def _differing(self, group: Group, flat: Tensor, tree: Tensor, token: Tensor) -> Iterator[str]:
        if _alike(tree, flat, self.limits.tolerance):
            return
        wrong = token[(_bits(tree) != _bits(flat)).flatten(1).any(1)].sort().values.cpu()
        start = group.cu_seqlens
        trajectory = torch.searchsorted(start, wrong, right=True) - 1
        first = int(trajectory[0])
        yield (
            f"o: {len(trajectory.unique())} of {len(group.length)} trajectories differ from the operator run on each "
            f"by itself; first is trajectory {group.first + first} at position {int(wrong[0] - start[first])}; "
            f"relative difference {_relative(tree.double(), flat.double()):.2e}"
        )

    def _take(self, sums: Results, row: Tensor, found: Results) -> None:
        sums["o"][row] = found["o"].double()  # equal wherever a row occurs
        for name in NAMES[1:]:
            sums[name].index_add_(0, row, found[name].double())

    def _cut(self, name: str, x: Tensor) -> Tensor:
        heads = self.limits.heads
        if name not in {"q", "k"}:
            heads *= self.problem.shape.value_heads // self.problem.shape.heads
        return x[:, :heads]

    def _zeros(self) -> Results:
        rows = self.problem.leaves
        like = {"o": rows["v"], **rows}
        return {name: torch.zeros_like(self._cut(name, x.detach()), dtype=torch.float64) for name, x in like.items()}


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.equal(_bits(a), _bits(b)) if tolerance == 0 else _relative(a.double(), b.double()) <= tolerance


def _bits(x: Tensor) -> Tensor:
    """Its bytes: unlike numbers, they tell the two zeros apart."""
    return x.contiguous().view(torch.uint8)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _above(errors: dict[str, dict[str, float]], which: str, slack: float, tolerance: float) -> Iterator[str]:
    for name in NAMES:
        ours, theirs = errors[which][name], errors["flat"][name]
        if not ours <= slack * theirs + tolerance:
            text = f"error of {which} {ours:.2e} is above {slack} times that of trajectory-wise runs, {theirs:.2e}"
            yield f"{name}: {text}"
