"""The OR-Tools baseline makes valid plans, tree by tree and replica by replica."""

from __future__ import annotations

import random

import numpy as np
import pytest
from planner_bench.cp_sat import next_fit, partitioned
from planner_bench.or_tools import or_tools_plan

from harts.errors import PlanError
from harts.ir import CompactTrie
from tests.forests import trie_of
from tests.planner.instances import SHAPES, instance
from tests.planner.proven import proven
from tests.stages.partition.naive import assert_partition, compact_work, works_of

LIMIT = 0.5  # seconds of the solver


def tasks(seed: int) -> CompactTrie:
    """6 to 9 task trees under one first token, shuffled."""
    rng = random.Random(seed)
    paths: list[list[int]] = []
    group: list[int] = []
    for task in range(rng.randint(6, 9)):
        tree = SHAPES[rng.choice(sorted(SHAPES))](rng, rng.randint(4, 9))
        paths += [[1, 100 + task, *path] for path in tree]
        group += [task] * len(tree)
    order = rng.sample(range(len(paths)), len(paths))
    names = tuple(f"g{task}" for task in range(max(group) + 1))
    return trie_of([paths[i] for i in order], groups=names, group=np.array([group[i] for i in order], dtype=np.int32))


def label_of(parts: list[list[int]]) -> np.ndarray:
    label = np.full(sum(map(len, parts)), -1)
    for k, part in enumerate(parts):
        label[part] = k
    return label


@pytest.mark.parametrize("seed", range(20))
def test_solver_parts_are_valid_and_at_best_the_optimum(seed):
    given = instance(seed)
    trie = given.trie
    label, start = (
        label_of(make(trie.length, trie.lcp, given.capacity, *limit))
        for make, limit in ((partitioned, (LIMIT,)), (next_fit, ()))
    )
    assert_partition(trie, label, given.capacity, 1)
    assert_partition(trie, start, given.capacity, 1)
    found = sum(works_of(trie, label))
    assert found <= sum(works_of(trie, start))
    if given.multiple == 1:
        assert found >= proven(seed).work


def test_solver_finds_most_optima_that_next_fit_misses():
    seeds = [seed for seed in range(60) if instance(seed).multiple == 1]
    missed = {"next fit": 0, "solver": 0}
    for seed in seeds:
        given = instance(seed)
        trie = given.trie
        made = {
            "next fit": next_fit(trie.length, trie.lcp, given.capacity),
            "solver": partitioned(trie.length, trie.lcp, given.capacity, LIMIT),
        }
        for how, parts in made.items():
            missed[how] += sum(works_of(trie, label_of(parts))) > proven(seed).work
    assert missed["next fit"] > len(seeds) // 3
    assert missed["solver"] < missed["next fit"] // 3


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_plans_are_valid_and_each_task_tree_stays_on_one_replica(seed, replicas):
    trie = tasks(seed)
    capacity = int(trie.length.max()) + seed
    plan = or_tools_plan(trie, capacity, replicas, seconds=0.05)
    assert_partition(trie, plan.microbatch[trie.order], capacity, replicas)
    assert works_of(trie, plan.microbatch[trie.order]) == plan.work.reshape(-1).tolist()
    on = plan.microbatch % replicas
    for task in range(len(trie.batch.columns.groups)):
        assert len(set(on[trie.batch.columns.group == task].tolist())) == 1
    assert (np.diff(plan.work, axis=0) <= 0).all()


def test_everything_in_one_microbatch_if_it_fits():
    trie = tasks(3)
    plan = or_tools_plan(trie, 10**6, 1, seconds=0.05)
    assert plan.work.tolist() == [[compact_work(map(tuple, token_lists(trie)))]]


def token_lists(trie: CompactTrie) -> list[list[int]]:
    offset = trie.batch.columns.offset
    return [trie.batch.tokens[offset[i] : offset[i + 1]].tolist() for i in range(len(offset) - 1)]


def test_extra_splits_are_the_cheapest():
    """The second replica has one tree and needs two microbatches; it parts where 2 tokens are shared, not 3."""
    big = [[1, *[10 + i] * 9] for i in range(2)]
    small = [[2, 2, 2, 3], [2, 2, 2, 4], [2, 2, 5, 6]]
    trie = trie_of(big + small, groups=("big", "small"), group=np.array([0, 0, 1, 1, 1], dtype=np.int32))
    plan = or_tools_plan(trie, 10, 2, seconds=0.05)
    assert plan.work.tolist() == [[10, 5], [10, 4]]


def test_fewer_trees_than_replicas_are_refused():
    with pytest.raises(PlanError, match="1 task trees cannot go to 2 replicas"):
        or_tools_plan(trie_of([[1, 2], [1, 3]]), 10, 2, seconds=0.05)


def test_a_replica_without_enough_trajectories_is_refused():
    big = [[1, *[10 + i] * 9] for i in range(3)]
    trie = trie_of([*big, [2], [2, 3]], groups=("big", "small"), group=np.array([0, 0, 0, 1, 1], dtype=np.int32))
    with pytest.raises(PlanError, match="2 microbatches cannot be split into the 3"):
        or_tools_plan(trie, 10, 2, seconds=0.05)
