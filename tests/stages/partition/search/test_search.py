"""The state that is searched, rebuilding, moves, and the search as a whole."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from harts.ir import CompactTrie
from harts.ir.prefix_tree import least_microbatches, prefix_tree
from harts.stages.partition.labels import renumbered
from harts.stages.partition.search.balance import UNEVEN, balance
from harts.stages.partition.search.destroy import MOST, Forks, chosen, forks
from harts.stages.partition.search.drive import Budget, promising, searched
from harts.stages.partition.search.peel import tools
from harts.stages.partition.search.problem import Problem
from harts.stages.partition.search.rebuild import rebuild
from harts.stages.partition.search.state import COUNT, SLOTS, TOTAL, State, begin, exchanged, members
from harts.work_models.compact import Compact
from tests.forests import trie_of
from tests.stages.partition.naive import assert_partition, compact_work, sorted_tokens, works_of
from tests.stages.partition.search.rig import costs_of, naive_value, partitions_of, problem_of, problems, some_tables


def alone(trie: CompactTrie, problem: Problem) -> State:
    """Each trajectory in a microbatch of its own."""
    count = len(trie.order)
    return begin(problem, np.arange(count), count)


def where_of(trie: CompactTrie, problem: Problem) -> Forks:
    tree = prefix_tree(trie.length, trie.lcp)
    return forks(tree, least_microbatches(tree, problem.capacity, 1)[0])


def check_state(name: str, trie: CompactTrie, problem: Problem, state: State) -> None:
    """All that a state says, counted naively."""
    tokens = sorted_tokens(trie)
    costs = costs_of(trie, state.label, problem)
    assert state.numbers[COUNT] == len(costs), name
    for k, cost in costs.items():
        held = np.flatnonzero(state.label == k).tolist()
        assert members(state, k).tolist() == held, name
        assert state.size[k] == len(held), name
        assert state.cost[k] == cost, name
        assert state.work[k] == compact_work(tokens[i] for i in held) <= problem.capacity, name
    ranked = sorted(costs.values(), reverse=True)
    assert state.ranked[: len(ranked)].tolist() == ranked, name
    assert state.numbers[TOTAL] == sum(ranked), name
    assert state.numbers[SLOTS] == problem.replicas * sum(ranked[:: problem.replicas]), name
    spare = state.spare[: len(state.label) - len(costs)].tolist()
    assert sorted([*costs, *spare]) == list(range(len(state.label))), name


def test_exchanged_costs_stay_ranked() -> None:
    rng = random.Random(1)
    for _ in range(300):
        held = sorted((rng.randint(1, 9) for _ in range(rng.randint(1, 9))), reverse=True)
        gone = sorted(rng.sample(held, rng.randint(0, len(held))), reverse=True)
        new = sorted((rng.randint(1, 9) for _ in range(rng.randint(0, 5))), reverse=True)
        left = held.copy()
        for cost in gone:
            left.remove(cost)
        out = np.zeros(20, dtype=np.int64)
        arrays = [np.array(each, dtype=np.int64) for each in (held, gone, new)]
        count = exchanged(*arrays, out)
        assert out[:count].tolist() == sorted([*left, *new], reverse=True)


def test_every_round_keeps_the_state_true_and_never_worsens_it() -> None:
    changed = 0
    for name, _, trie, problem in problems(range(8)):
        where = where_of(trie, problem)
        free, state, kit = problem._replace(multiple=1), alone(trie, problem), tools(3)
        before = naive_value(costs_of(trie, state.label, problem).values(), problem)
        for _ in range(12):
            changed += rebuild(free, where, state, kit, 1)
            check_state(name, trie, problem, state)
            after = naive_value(costs_of(trie, state.label, problem).values(), problem)
            assert after <= before, name
            before = after
    assert changed > 200


def test_rebuilding_keeps_a_legal_number_of_microbatches() -> None:
    for name, _, trie, problem in problems(range(12)):
        if len(trie.order) % problem.multiple:
            continue
        where = where_of(trie, problem)
        state = alone(trie, problem)
        for _ in range(10):
            rebuild(problem, where, state, tools(4), 5)
            assert state.numbers[COUNT] % problem.multiple == 0, name


def test_few_microbatches_are_taken_apart_each_once() -> None:
    trie = trie_of([[1] * 30 + [2 + i // 4] * 10 + [50 + i] * 5 for i in range(40)])
    problem = problem_of(trie, some_tables(random.Random(0), 45), 60)
    where = where_of(trie, problem)
    state, seen, kit = alone(trie, problem), np.zeros(41, dtype=np.int64), tools(1)
    sizes = set()
    for _ in range(300):
        found = chosen(where, state, seen, kit.rng).tolist()
        assert len(set(found)) == len(found) <= MOST + 1
        assert set(found) <= set(range(40))
        sizes.add(len(found))
    assert len(sizes) > 3


def uneven(costs: list[int], problem: Problem) -> float:
    """What moves lower, up to rounding."""
    ranked = sorted(costs, reverse=True)
    value: float = problem.total_weight * sum(ranked)
    for first in range(0, len(ranked), problem.replicas):
        slot = ranked[first : first + problem.replicas]
        waste = problem.replicas * slot[0] - sum(slot)
        value += problem.replicas * slot[0] + UNEVEN * waste**2 / sum(slot)
    return value


def test_moves_keep_the_state_true_and_even_out() -> None:
    made = 0
    for name, rng, trie, problem in problems(range(25)):
        count = len(trie.order) // problem.replicas * problem.replicas
        if rng.random() < 0.5:
            count = problem.replicas
        wide = problem._replace(capacity=trie.compact_tokens)
        label = np.array([*range(count), *(rng.randrange(count) for _ in range(len(trie.order) - count))])
        state = begin(wide, label, count)
        before = uneven(list(costs_of(trie, state.label, wide).values()), wide)
        moved = balance(wide, where_of(trie, wide), state, tools(2).rng, 60)
        check_state(name, trie, wide, state)
        assert state.numbers[COUNT] == count, name
        after = uneven(list(costs_of(trie, state.label, wide).values()), wide)
        assert after < before if moved else after == before, name
        made += moved
    assert made > 100


def test_moves_hold_the_capacity() -> None:
    for name, _, trie, problem in problems(range(25)):
        if len(trie.order) % problem.replicas:
            continue
        state = alone(trie, problem)
        balance(problem, where_of(trie, problem), state, tools(2).rng, 100)
        check_state(name, trie, problem, state)


def test_the_search_finds_the_best_of_all_partitions() -> None:
    found, tried = 0, 0
    for name, _, trie, problem in problems(range(6)):
        if len(trie.order) > 7:
            continue
        legal = [
            np.array(label)
            for label in partitions_of(len(trie.order))
            if (max(label) + 1) % problem.multiple == 0 and max(works_of(trie, np.array(label))) <= problem.capacity
        ]
        single = np.arange(len(trie.order))
        labels = searched(problem, trie.index, single, budget=Budget(200, None), seed=0, tokens=False)
        for label in labels:
            assert_partition(trie, label, problem.capacity, problem.multiple)
        if not legal:
            assert not labels, name
            continue
        tried += 1
        best, ours = (
            min((naive_value(costs_of(trie, each, problem).values(), problem) for each in some), default=1 << 60)
            for some in (legal, labels)
        )
        found += ours == best
    assert tried > 15
    assert found >= 0.9 * tried


def hard() -> tuple[CompactTrie, Problem]:
    """Groups that do not fit together."""
    trie = trie_of([[1] * 30 + [2 + i // 9] * (10 + i % 9) + [50 + i] * (5 + i % 7) for i in range(90)])
    return trie, problem_of(trie, some_tables(random.Random(0), 100), 120, replicas=2)


def test_the_same_seed_gives_the_same_partition_and_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    trie, problem = hard()

    def run(seed: int) -> list[list[int]]:
        found = searched(problem, trie.index, np.arange(90), budget=Budget(300, None), seed=seed, tokens=False)
        return [label.tolist() for label in found]

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    monkeypatch.setattr("harts.stages.partition.search.drive.STEP", 1000)
    assert run(1) == first


def test_promising_starts_are_the_best_and_the_fewest() -> None:
    _, problem = hard()
    single, pairs = np.arange(90), np.arange(90) // 2
    split = pairs.copy()
    split[[0, 2]] = 45  # the same number, more prefixes twice
    best, fewest = promising(problem, [single, split, pairs])
    assert best.tolist() == pairs.tolist() == fewest.tolist()
    dear = problem._replace(total_weight=0, replicas=90)  # only the heaviest counts, for 90
    assert promising(dear, [pairs, single])[0].tolist() == single.tolist()
    assert promising(dear, [single, pairs])[1].tolist() == pairs.tolist()


def test_a_proven_partition_ends_the_search_and_an_uneven_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens alone, when both sums are what the volume bound says."""
    rounds: list[int] = []
    monkeypatch.setattr("harts.stages.partition.search.drive.rebuild", lambda *given: rounds.append(given[-1]))
    tokens = Compact(Compact.Config()).tables(9)
    for lengths, expected in (([4, 4, 4, 4], 0), ([4, 4, 4, 3], 0), ([5, 3, 4, 4], 40)):
        trie = trie_of([[i + 1] * length for i, length in enumerate(lengths)])
        problem = problem_of(trie, tokens, 5, replicas=2)
        rounds.clear()
        searched(problem, trie.index, np.arange(4), budget=Budget(40, None), seed=0, tokens=True)
        assert sum(rounds) == expected, lengths
        rounds.clear()
        searched(problem, trie.index, np.arange(4), budget=Budget(40, None), seed=0, tokens=False)
        assert sum(rounds) == 40


def test_time_ends_the_search() -> None:
    trie, problem = hard()
    searched(problem, trie.index, np.arange(90), budget=Budget(1, None), seed=1, tokens=False)  # compiled
    began = time.perf_counter()
    budget = Budget(10**9, began + 0.3)
    labels = searched(problem, trie.index, np.arange(90), budget=budget, seed=1, tokens=False)
    assert 0.2 < time.perf_counter() - began < 2.0
    for label in labels:
        assert (renumbered(label) == label).all()
        assert_partition(trie, label, 120, 2)
    assert len(labels) == 2
