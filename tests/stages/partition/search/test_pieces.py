"""Measures, random numbers, intervals, the knapsack and peeling."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from harts.ir.prefix_tree import prefix_tree
from harts.stages.partition.search.intervals import best_intervals
from harts.stages.partition.search.knapsack import CELLS, TAKE, Choice, fill
from harts.stages.partition.search.peel import Rule, peeled, tools
from harts.stages.partition.search.problem import lcp_among, measure, shared
from harts.stages.partition.search.rng import below, seeded
from tests.forests import trie_of
from tests.stages.partition.naive import (
    assert_partition,
    compact_work,
    contiguous_partitions,
    some_capacity,
    sorted_tokens,
    tries,
)
from tests.stages.partition.search.rig import naive_cost, problem_of, problems


def test_random_numbers_are_the_same_everywhere_and_spread() -> None:
    rng = seeded(0)
    assert [below(rng, 1000) for _ in range(6)] == [657, 572, 140, 65, 865, 887]
    counts = np.bincount([below(rng, 7) for _ in range(70_000)], minlength=7)
    assert abs(counts - 10_000).max() < 500
    firsts = {below(seeded(seed), 1 << 50) for seed in range(1000)}
    assert len(firsts) == 1000


def test_work_and_cost_equal_naive_counts() -> None:
    for name, rng, trie, problem in problems(range(10)):
        tokens = sorted_tokens(trie)
        for _ in range(5):
            members = sorted(rng.sample(range(len(tokens)), rng.randint(1, len(tokens))))
            some = [tokens[i] for i in members]
            work, cost = measure(problem, np.array(members))
            assert work == compact_work(some), name
            assert cost == naive_cost(some, problem), name
            lcp = lcp_among(problem, np.array(members))
            assert lcp[0] == 0
            for j in range(1, len(members)):
                assert lcp[j] == shared(problem.minima, members[j - 1], members[j]) == common(some[j - 1], some[j]), (
                    name
                )


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_best_intervals_equal_brute_force() -> None:
    for name, _, trie, problem in problems(range(8)):
        tokens = sorted_tokens(trie)[:9]
        small = trie_of(tokens)
        given = problem_of(small, problem, max(problem.capacity, int(small.length.max())))  # type: ignore[arg-type]
        label, count = best_intervals(given, np.arange(len(tokens)), small.lcp)
        assert sorted(set(label.tolist())) == list(range(count)), name
        assert (np.diff(label) >= 0).all(), name
        costs = []
        for k in range(1, len(tokens) + 1):
            for parts in contiguous_partitions(len(tokens), k):
                held = [[tokens[i] for i in part] for part in parts]
                if all(compact_work(each) <= given.capacity for each in held):
                    costs.append(sum(naive_cost(each, given) for each in held))
        found = sum(naive_cost([tokens[i] for i in np.flatnonzero(label == k)], given) for k in range(count))
        assert found == min(costs), name


def choice_of(trie: object) -> tuple[Choice, list[int]]:
    """All nodes below the root, and the position of each leaf."""
    tree = prefix_tree(trie.length, trie.lcp)  # type: ignore[attr-defined]
    rows = slice(0, len(tree.end) - 1)
    size, leaf = tree.size[rows].astype(np.int64), tree.leaf[rows]
    profit = tree.tokens[rows] * 4 + (leaf >= 0)
    choice = Choice(np.arange(len(size)), size, tree.end[rows], tree.tokens[rows], profit, leaf >= 0)
    return choice, leaf.tolist()


def exclusive(trie: object, members: tuple[int, ...]) -> int:
    """Tokens that only these trajectories hold."""
    tokens = sorted_tokens(trie)  # type: ignore[arg-type]
    rest = [x for i, x in enumerate(tokens) if i not in members]
    return compact_work(tokens) - compact_work(rest)


def test_a_filled_microbatch_leaves_the_least() -> None:
    """With fewer tokens than cells nothing is rounded, and the choice is the best of all subsets."""
    best = np.empty((200, CELLS), dtype=np.int32)
    for name, rng, trie in tries(range(12)):
        choice, leaf = choice_of(trie)
        if len(trie.order) > 10:
            continue
        room = rng.randint(int(trie.length.min()), min(trie.compact_tokens, CELLS - 5))
        taken = fill(choice, 0, room, 0, best)
        members: set[int] = set()
        for j in np.flatnonzero(taken == TAKE):
            members |= {leaf[i] for i in range(j - int(choice.size[j]) + 1, j + 1) if leaf[i] >= 0}
        tokens = sorted_tokens(trie)
        assert compact_work(tokens[i] for i in members) <= room, name
        value = 4 * exclusive(trie, tuple(members)) + len(members)
        for size in range(1, len(tokens) + 1):
            for other in combinations(range(len(tokens)), size):
                if compact_work(tokens[i] for i in other) <= room:
                    assert value >= 4 * exclusive(trie, other) + size, name


def test_rounding_never_overfills() -> None:
    rng = random.Random(3)
    best = np.empty((400, CELLS), dtype=np.int32)
    for _ in range(30):
        trie = trie_of([[1] * rng.randint(1, 40) + [i + 2] * rng.randint(1, 3000) for i in range(30)])
        choice, leaf = choice_of(trie)
        room = rng.randint(3100, 20_000)
        taken = fill(choice, 0, room, rng.choice((0, 32)), best)
        members: list[int] = []
        for j in np.flatnonzero(taken == TAKE):
            members += [leaf[i] for i in range(j - int(choice.size[j]) + 1, j + 1) if leaf[i] >= 0]
        work = trie.index.set_work(np.array(sorted(members), dtype=np.int64))
        assert 0.9 * min(room, trie.compact_tokens) < work <= room


@pytest.mark.parametrize(("noise", "penalty"), [(0, 0), (256, 0), (64, 48)])
def test_peeling_makes_partitions(noise: int, penalty: int) -> None:
    kit = tools(5)
    for name, rng, trie in tries(range(25)):
        capacity = some_capacity(rng, trie)
        label, count = peeled(prefix_tree(trie.length, trie.lcp), Rule(capacity, noise, penalty), kit)
        assert label.max() + 1 == count, name
        assert_partition(trie, label, capacity, 1)


def test_peeling_keeps_together_what_shares_most() -> None:
    trunk = [[k + 1] * 20 for k in range(4)]
    trie = trie_of([trunk[k] + [10 + i] * 3 for k in range(4) for i in range(4)])  # four groups of 20 + 4 * 3
    label, count = peeled(prefix_tree(trie.length, trie.lcp), Rule(32, 0, 0), tools(0))
    assert count == 4
    assert [len(set(label[4 * k : 4 * k + 4].tolist())) for k in range(4)] == [1, 1, 1, 1]
