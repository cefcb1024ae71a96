"""Other plans of the same tree: every segment by itself, without replay, without sharing."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from harts.ir import RoundPlan, SegmentTree
from harts.registry import names, resolve
from harts.stages.call_plan.min_call import plan_rounds
from harts.stages.schedule.segments import segment_tree
from tests.forests import random_trajectories, tree_of, trie_of
from tests.stages.call_plan.check import check_plan
from tests.stages.call_plan.trees import direct_tree

FIGURE_2 = ((-1, 63), (0, 2), (0, 10), (1, 10), (1, 10))


def run(name: str, tree: SegmentTree, chunk_size: int) -> RoundPlan:
    stage = resolve("call_plan", name)
    plan: RoundPlan = stage(stage.Config(chunk_size=chunk_size)).run(tree)
    return plan


def tokens_of(tree: SegmentTree) -> list[list[int]]:
    return [tree.tokens[a:b].tolist() for a, b in pairwise(tree.offset.tolist())]


def random_trees(count: int) -> list[tuple[SegmentTree, int]]:
    rng = random.Random(11)
    return [(tree_of(random_trajectories(rng, chunk)), chunk) for chunk in rng.choices(range(2, 9), k=count)]


@pytest.mark.parametrize("name", sorted(names("call_plan")))
def test_plans_of_random_forests_hold_every_invariant(name: str) -> None:
    for tree, chunk in random_trees(60):
        plan = run(name, tree, chunk)
        plan.tree.verify()
        plan.verify()
        assert plan.chunk_size == chunk


def test_min_call_by_name_is_the_minimum_call_plan() -> None:
    tree = direct_tree(FIGURE_2)
    assert run("min_call", tree, 64).digest() == plan_rounds(tree, 64).digest()


def test_per_segment_replays_every_segment_from_its_anchor_as_early_as_it_can() -> None:
    plan = run("per_segment", direct_tree(FIGURE_2), 64)
    assert plan.segment.tolist() == [0, 1, 2, 3, 4]
    assert plan.sequence_round.tolist() == [0, 0, 0, 1, 1]
    assert plan.replay.tolist() == [0, 63, 63, 1, 1]
    assert plan.initial_state.tolist() == [-1, -1, -1, 0, 0]
    assert (plan.state_sequence.tolist(), plan.state_position.tolist()) == ([1], [64])


def test_per_segment_never_needs_fewer_rounds_than_min_call() -> None:
    more = 0
    for tree, chunk in random_trees(100):
        plan = run("per_segment", tree, chunk)
        check_plan(plan)
        assert len(plan.anchor) == len(tree.parent)
        assert plan.rounds >= plan_rounds(tree, chunk).rounds
        more += plan.rounds > plan_rounds(tree, chunk).rounds
    assert more > 10


def test_no_replay_starts_every_segment_from_the_final_state_of_its_parent() -> None:
    for tree, chunk in random_trees(60):
        plan = run("no_replay", tree, chunk)
        assert int(plan.replay.sum()) == 0
        depth = np.array([len(tree.path(v)) - 1 for v in plan.head.tolist()])
        np.testing.assert_array_equal(plan.sequence_round, depth)
        child = np.flatnonzero(plan.initial_state >= 0)
        source = plan.initial_state[child]
        np.testing.assert_array_equal(plan.head[plan.state_sequence[source]], tree.parent[plan.head[child]])
        np.testing.assert_array_equal(plan.state_position[source], tree.start[plan.head[child]])
        assert len(np.unique(source)) == len(plan.state_position)


def test_flat_runs_every_trajectory_as_its_own_chain_in_one_round() -> None:
    rng = random.Random(12)
    for _ in range(40):
        trajectories = random_trajectories(rng, chunk=5)
        tree = tree_of(trajectories)
        plan = run("flat", tree, 5)
        assert plan.rounds == 1
        assert plan.initial_state.tolist() == [-1] * len(trajectories)
        assert plan.segment.tolist() == plan.tree.tail.tolist() == list(range(len(trajectories)))
        assert tokens_of(plan.tree) == trajectories
        assert plan.tree.key.tolist() == tree.key.tolist()
        assert plan.tree.columns.digest() == tree.columns.digest()


def test_flat_keeps_the_keys_of_a_microbatch_that_holds_a_part_of_the_batch() -> None:
    trajectories = [[1, 2, 3], [1, 2, 4], [1, 2], [1, 2, 3], [5]]
    trie = trie_of(trajectories)
    tree = segment_tree(trie, np.array([0, 2, 4]))
    plan = run("flat", tree, 2)
    assert plan.tree.key.tolist() == tree.key.tolist()
    assert tokens_of(plan.tree) == [trajectories[key] for key in tree.key.tolist()]
