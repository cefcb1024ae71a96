"""The volume bound is its formula, and no partition is below it."""

import random

from harts.ir import CompactTrie
from harts.ir.prefix_tree import prefix_tree, volume_bound
from tests.planner.instances import COUNT, Instance, instance
from tests.planner.proven import proven
from tests.stages.partition.naive import some_capacity, sorted_tokens, tries


def bound(trie: CompactTrie, capacity: int, multiple: int) -> int:
    return volume_bound(prefix_tree(trie.length, trie.lcp), capacity, multiple)


def bound_of(given: Instance) -> int:
    return bound(given.trie, given.capacity, given.multiple)


def naive_bound(trajectories: list[tuple[int, ...]], capacity: int, multiple: int) -> int:
    """The formula node by node of the uncompressed trie: each node is one token."""

    def work(depth: int, members: list[tuple[int, ...]]) -> tuple[int, int]:
        """(W, n) at and below the node that stands for the first `depth` tokens of all members."""
        children: dict[int, list[tuple[int, ...]]] = {}
        for path in members:
            if len(path) > depth:
                children.setdefault(path[depth], []).append(path)
        below = [work(depth + 1, inside) for inside in children.values()]
        volume = sum(part for part, _ in below)
        least = max([1, *(count for _, count in below)])
        if depth == 0:
            return volume, least
        if volume:
            least = max(least, -(-volume // (capacity - depth)))
        if len(members) == len(trajectories):
            least = -(-least // multiple) * multiple
        return volume + least, least

    return work(0, trajectories)[0]


def test_bound_equals_its_formula_on_every_token():
    for name, rng, trie in tries(range(40)):
        for _ in range(3):
            capacity, multiple = some_capacity(rng, trie), rng.randint(1, 4)
            expected = naive_bound(sorted_tokens(trie), capacity, multiple)
            assert bound(trie, capacity, multiple) == expected, (name, capacity, multiple)


def test_bound_is_never_above_a_proven_optimum():
    for seed in range(COUNT):
        given = instance(seed)
        assert bound_of(given) <= proven(seed).work, given.name


def test_bound_is_the_optimum_of_most_instances():
    tight = sum(bound_of(instance(seed)) == proven(seed).work for seed in range(COUNT))
    assert tight >= COUNT // 2


def test_bound_is_all_tokens_once_if_everything_fits():
    for name, _, trie in tries(range(10)):
        assert bound(trie, trie.compact_tokens, 1) == trie.compact_tokens, name


def test_bound_falls_with_capacity_and_rises_with_replicas():
    rng = random.Random(5)
    for seed in range(60):
        given = instance(seed)
        wider = given._replace(capacity=given.capacity + rng.randint(1, given.capacity))
        assert bound_of(wider) <= bound_of(given), given.name
        assert bound_of(given._replace(multiple=given.multiple * 2)) >= bound_of(given), given.name
