"""Partition stages on steps whose best partition is proven."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from harts.registry import names, resolve
from harts.stages.schedule.slots import Slots, ranked
from tests.planner.instances import COUNT, instance
from tests.planner.proven import proven
from tests.stages.partition.naive import assert_partition, works_of

STAGES = sorted(name for name, (_, package) in names("partition").items() if package == "harts")
SEARCHES = ("lns",)
"""Stages that promise near-optimal plans."""

VALUES = {"lns": {"rounds": 1000}}
"""The default is for steps a hundred times as large."""


@cache
def score(stage: str, seed: int, objective: str) -> tuple[int, int, int]:
    """Of the plan that a stage leads to: total work, slots' heaviest, heaviest replica."""
    given = instance(seed)
    kind = resolve("partition", stage)
    limits = {"capacity": given.capacity, "replicas": given.multiple, "objective": objective}
    made = kind(kind.Config(**limits, **VALUES.get(stage, {}))).run(given.trie)
    for label in made.microbatch:
        assert_partition(made.trie, label, given.capacity, given.multiple)
    step = Slots(Slots.Config()).run(made).step
    assert sorted(step.work.tolist()) == sorted(works_of(made.trie, made.microbatch[step.chosen])), given.name
    total, critical, replica = step.scores[step.chosen].tolist()
    return total, critical, replica


@pytest.mark.parametrize("stage", STAGES)
def test_no_plan_is_below_the_proven_optimum(stage):
    for seed in range(COUNT):
        assert score(stage, seed, "paper")[0] >= proven(seed).work, instance(seed).name


@pytest.mark.parametrize("stage", SEARCHES)
def test_95_of_100_plans_are_optimal(stage):
    excess = {instance(seed).name: score(stage, seed, "paper")[0] - proven(seed).work for seed in range(COUNT)}
    missed = {name: tokens for name, tokens in excess.items() if tokens}
    assert len(missed) <= 0.05 * COUNT, missed


@pytest.mark.parametrize("objective", ["paper", "critical"])
@pytest.mark.parametrize("stage", SEARCHES)
def test_no_plan_is_worse_than_the_papers(stage, objective):
    for seed in range(COUNT):
        ours, papers = (ranked(score(name, seed, objective), objective) for name in (stage, "paper"))
        assert ours <= papers, instance(seed).name


def test_the_papers_plan_leaves_room_for_improvement():
    """Else the tests above would hold of any stage."""
    gaps = np.array([score("paper", seed, "paper")[0] / proven(seed).work - 1 for seed in range(COUNT)])
    assert np.count_nonzero(gaps) > 0.05 * COUNT
    assert gaps.max() > 0.01
