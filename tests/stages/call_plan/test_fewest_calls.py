"""The minimum-call plan against exhaustive search."""

from __future__ import annotations

import random

import pytest

from harts.ir import SegmentTree
from harts.stages.call_plan.min_call import plan_rounds, total_replay
from tests.forests import random_spec
from tests.stages.call_plan.check import check_plan
from tests.stages.call_plan.fewest_calls import Model, fewest
from tests.stages.call_plan.trees import direct_tree


def trees(seed: int, count: int, forks: int, segments: int) -> list[tuple[SegmentTree, int]]:
    """Random (tree, chunk size) with one root, at most so many segments."""
    rng, made = random.Random(seed), []
    while len(made) < count:
        chunk = rng.randint(2, 8)
        spec = random_spec(rng, chunk, roots=1, forks=rng.randint(1, forks))
        if len(spec) <= segments:
            made.append((direct_tree(spec), chunk))
    return made


def test_no_schedule_of_a_small_tree_has_fewer_calls() -> None:
    depths = set()
    for tree, chunk in trees(seed=1, count=1000, forks=3, segments=7):
        model = Model(tree, chunk)
        plan = plan_rounds(tree, chunk)
        check_plan(plan)
        assert plan.rounds == fewest(model, model.every_call)
        assert int(plan.replay.sum()) == total_replay(tree, chunk)
        depths.add(plan.rounds)
    assert depths >= {1, 2, 3}


def test_no_schedule_of_a_larger_tree_has_fewer_calls() -> None:
    depths = set()
    for tree, chunk in trees(seed=2, count=2000, forks=7, segments=17):
        model = Model(tree, chunk)
        plan = plan_rounds(tree, chunk)
        check_plan(plan)
        assert plan.rounds == fewest(model, model.greatest_calls)
        assert int(plan.replay.sum()) == total_replay(tree, chunk)
        depths.add(plan.rounds)
    assert depths >= {1, 2, 3}


def test_each_level_of_a_full_binary_tree_costs_a_call_where_it_passes_a_boundary() -> None:
    spec = [(-1, 5)] + [((v - 1) // 2, 5) for v in range(1, 15)]
    tree = direct_tree(spec)
    model = Model(tree, 4)
    assert plan_rounds(tree, 4).rounds == fewest(model, model.greatest_calls) == 4
    assert plan_rounds(tree, 32).rounds == 1


@pytest.mark.parametrize("seed", range(20))
def test_greatest_calls_lose_nothing(seed: int) -> None:
    for tree, chunk in trees(seed=100 + seed, count=5, forks=4, segments=8):
        model = Model(tree, chunk)
        assert fewest(model, model.greatest_calls) == fewest(model, model.every_call)


def test_a_forest_needs_the_calls_of_its_slowest_tree() -> None:
    rng = random.Random(3)
    for _ in range(300):
        chunk = rng.randint(2, 8)
        parts = [random_spec(rng, chunk, roots=1, forks=rng.randint(0, 5)) for _ in range(rng.randint(2, 4))]
        spec = []
        for part in parts:
            shift = len(spec)
            spec += [(up + shift if up >= 0 else -1, tokens) for up, tokens in part]
        plan = plan_rounds(direct_tree(spec), chunk)
        alone = [plan_rounds(direct_tree(part), chunk) for part in parts]
        check_plan(plan)
        assert plan.rounds == max(each.rounds for each in alone)
        assert len(plan.anchor) == sum(len(each.anchor) for each in alone)
