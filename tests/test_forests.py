"""The test forests are what they claim to be."""

import random

from tests.forests import paths_of, random_spec, random_trajectories, tree_of, tree_of_spec


def test_spec_gives_its_own_segments():
    tree = tree_of_spec([(-1, 15), (0, 2), (0, 20), (1, 20), (1, 21)])
    tree.verify()
    assert sorted(zip(tree.start.tolist(), tree.length.tolist(), strict=True)) == [
        (0, 15),
        (15, 2),
        (15, 20),
        (17, 20),
        (17, 21),
    ]


def test_random_forests_are_valid_and_compact():
    rng = random.Random(0)
    for _ in range(200):
        spec = random_spec(rng, 8, roots=rng.randint(1, 3), forks=rng.randint(0, 8))
        tree = tree_of_spec(spec)
        tree.verify()
        assert len(tree.tokens) == sum(length for _, length in spec)
        assert len(tree.parent) == len(spec)
        assert len(paths_of(spec)) == len(tree.key)


def test_random_trajectories_make_a_trie_of_their_distinct_prefixes():
    rng = random.Random(1)
    for _ in range(100):
        paths = random_trajectories(rng, 8, roots=rng.randint(1, 2), forks=rng.randint(0, 6))
        tree = tree_of(paths)
        tree.verify()
        prefixes = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
        assert len(tree.tokens) == len(prefixes)
