"""The proven least work of a small step, by constraint programming, and by trying everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ortools.sat.python import cp_model

from tests.planner.instances import Instance
from tests.stages.partition.naive import compact_work


class Optimum(NamedTuple):
    """What a search found."""

    work: int
    """Least compact tokens of all microbatches together."""
    proven: bool
    label: tuple[int, ...]
    """A partition with that work: microbatch of each trajectory, in the order of the instance."""


def optimum(instance: Instance, seconds: float = 60.0) -> Optimum:
    """Search all partitions with CP-SAT; nothing of the package is used.

    A microbatch is named by its first trajectory: `member[i][k]` says that i is in the microbatch of k <= i, which is
    one if k is in it itself. So each partition is one assignment and the number of microbatches is free.

    Raises:
        ValueError: there is no partition, or none was found in time.
    """
    model = cp_model.CpModel()
    count = len(instance.tokens)
    member = [[model.new_bool_var(f"m{i},{k}") for k in range(i + 1)] for i in range(count)]
    for row in member:
        model.add_exactly_one(row)
        for k, inside in enumerate(row[:-1]):
            model.add_implication(inside, member[k][k])
    runs = _runs(instance.tokens)
    works = []
    for k in range(count):
        terms = []
        for inside, tokens in runs:
            later = [i for i in inside if i >= k]
            if not later:
                continue
            used = member[later[0]][k] if len(later) == 1 else model.new_bool_var("")
            if len(later) > 1:
                for i in later:
                    model.add_implication(member[i][k], used)
            terms.append(tokens * used)
        works.append(sum(terms))
        model.add(works[k] <= instance.capacity)
    opened = sum(row[-1] for row in member)
    model.add(opened == instance.multiple * model.new_int_var(1, count, "slots"))
    model.minimize(sum(works))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ValueError(f"{instance.name}: {solver.status_name(status)}")
    label = tuple(next(k for k, inside in enumerate(row) if solver.boolean_value(inside)) for row in member)
    return Optimum(round(solver.objective_value), status == cp_model.OPTIMAL, label)


def _runs(trajectories: list[list[int]]) -> list[tuple[tuple[int, ...], int]]:
    """The unique prefixes by who has them: (trajectories, number of prefixes that exactly these have)."""
    owners: dict[tuple[int, ...], list[int]] = {}
    for i, tokens in enumerate(trajectories):
        for end in range(1, len(tokens) + 1):
            owners.setdefault(tuple(tokens[:end]), []).append(i)
    found: dict[tuple[int, ...], int] = {}
    for inside in owners.values():
        found[tuple(inside)] = found.get(tuple(inside), 0) + 1
    return list(found.items())


def best_of_all(instance: Instance) -> Optimum:
    """Try every partition.

    Raises:
        ValueError: none is within the limits.
    """
    best: Optimum | None = None
    for label in set_partitions(len(instance.tokens)):
        works = works_of_label(instance, label)
        if max(works) > instance.capacity or len(works) % instance.multiple:
            continue
        if best is None or sum(works) < best.work:
            best = Optimum(sum(works), True, label)
    if best is None:
        raise ValueError(f"{instance.name}: no partition fits")
    return best


def works_of_label(instance: Instance, label: tuple[int, ...]) -> list[int]:
    """Compact tokens of each microbatch, counted prefix by prefix."""
    return [
        compact_work(tokens for tokens, k in zip(instance.tokens, label, strict=True) if k == microbatch)
        for microbatch in sorted(set(label))
    ]


def set_partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Every partition of 0..count-1 once, as labels numbered by first member."""
    if count == 0:
        yield ()
        return
    for label in set_partitions(count - 1):
        for k in range(max(label, default=-1) + 2):
            yield (*label, k)
