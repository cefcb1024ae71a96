"""Problems of every shape, with costs that are no plain tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np

from harts.ir import CompactTrie
from harts.stages.partition.search.problem import Problem
from harts.work_models.base import WorkTables
from tests.stages.partition.naive import some_capacity, sorted_tokens, tries

Trajectory = tuple[int, ...]


def some_tables(rng: random.Random, longest: int) -> WorkTables:
    """Any cost of a position and of a further child."""
    along = np.cumsum([0] + [rng.randint(1, 9) for _ in range(longest)])
    fork = np.array([0] + [rng.randint(0, 5) for _ in range(longest)])
    return WorkTables(along.astype(np.int64), fork.astype(np.int64))


def problem_of(trie: CompactTrie, tables: WorkTables, capacity: int, replicas: int = 1, weight: int = 1) -> Problem:
    return Problem(
        length=trie.length,
        lcp=trie.lcp,
        minima=trie.index.table,
        along=tables.along,
        fork=tables.fork,
        capacity=capacity,
        replicas=replicas,
        multiple=replicas,
        total_weight=weight,
    )


def problems(seeds: Iterable[int]) -> Iterator[tuple[str, random.Random, CompactTrie, Problem]]:
    """Every shape for every seed."""
    for name, rng, trie in tries(seeds):
        replicas = rng.randint(1, min(3, len(trie.order)))
        tables = some_tables(rng, int(trie.length.max()))
        yield name, rng, trie, problem_of(trie, tables, some_capacity(rng, trie), replicas, rng.choice((1, 64)))


def naive_cost(tokens: Iterable[Trajectory], tables: WorkTables | Problem) -> int:
    """Each position of each unique prefix, and each child after the first of each prefix."""
    tokens = list(tokens)
    step = np.diff(tables.along)
    prefixes = {x[:n] for x in tokens for n in range(1, len(x) + 1)}
    cost = sum(int(step[len(prefix) - 1]) for prefix in prefixes)
    for prefix in prefixes:
        children = sum(len(other) == len(prefix) + 1 and other[: len(prefix)] == prefix for other in prefixes)
        cost += max(children - 1, 0) * int(tables.fork[len(prefix)])
    return cost


def naive_value(costs: Iterable[int], problem: Problem) -> int:
    """What rebuilding lowers."""
    ranked = sorted(costs, reverse=True)
    return problem.total_weight * sum(ranked) + problem.replicas * sum(ranked[:: problem.replicas])


def partitions_of(count: int) -> Iterator[tuple[int, ...]]:
    """Every partition of 0..count-1, as labels numbered by first member."""
    for label in product(range(count), repeat=count):
        if all(label[i] <= max(label[:i], default=-1) + 1 for i in range(count)):
            yield label


def costs_of(trie: CompactTrie, label: np.ndarray, problem: Problem) -> dict[int, int]:
    """Cost of each microbatch, counted naively."""
    tokens = sorted_tokens(trie)
    return {int(k): naive_cost([tokens[i] for i in np.flatnonzero(label == k)], problem) for k in np.unique(label)}
