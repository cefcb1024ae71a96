"""The solver that plans are held against finds what trying every partition finds."""

import random

import pytest

from tests.planner.instances import COUNT, SHAPES, Instance, instance, instances
from tests.planner.optimum import best_of_all, optimum, set_partitions, works_of_label
from tests.planner.proven import proven


def small(seed: int) -> Instance:
    """At most 7 trajectories, so that all partitions can be tried."""
    rng = random.Random(seed)
    name = sorted(SHAPES)[seed % len(SHAPES)]
    tokens = SHAPES[name](rng, rng.randint(3, 6))[:7]
    longest = max(map(len, tokens))
    return Instance(f"{name}, small seed {seed}", tokens, longest + rng.randint(0, longest), multiple=seed % 2 + 1)


@pytest.mark.parametrize("seed", range(36))
def test_solver_finds_the_best_of_all_partitions(seed):
    found = optimum(small(seed))
    assert found.proven
    assert found.work == best_of_all(small(seed)).work


def test_every_partition_is_tried_once():
    bell = [1, 1, 2, 5, 15, 52, 203, 877]
    for count, partitions in enumerate(bell):
        tried = list(set_partitions(count))
        assert len(tried) == len(set(tried)) == partitions


def test_a_capacity_below_the_longest_trajectory_has_no_optimum():
    with pytest.raises(ValueError, match="INFEASIBLE"):
        optimum(Instance("too long", [[1, 2, 3], [1, 2]], capacity=2, multiple=1))


@pytest.mark.parametrize("seed", range(3, COUNT, 10))
def test_kept_optima_are_proven_anew(seed):
    found = optimum(instance(seed))
    assert found.proven
    assert found.work == proven(seed).work


def test_kept_partitions_have_the_kept_work_and_keep_the_limits():
    for seed, given in enumerate(instances()):
        kept = proven(seed)
        works = works_of_label(given, kept.label)
        assert sum(works) == kept.work, given.name
        assert max(works) <= given.capacity, given.name
        assert len(works) % given.multiple == 0, given.name


def test_the_suite_needs_several_microbatches_and_has_no_instance_twice():
    assert len({given.digest() for given in instances()}) == COUNT
    assert {len(set(proven(seed).label)) for seed in range(COUNT)} == {2, 3, 4, 5, 6}
    assert {given.multiple for given in instances()} == {1, 2}
