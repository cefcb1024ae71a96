"""Totals of trained tokens against a count token by token."""

import random
import tracemalloc

import numpy as np

from harts.stages.schedule.slots import trained_counts
from tests.forests import random_trajectories, trie_of


def test_equals_a_count_token_by_token() -> None:
    rng = random.Random(6)
    for _ in range(100):
        paths = random_trajectories(rng, 4)
        share = rng.choice((0.0, 0.1, 0.9, 1.0))
        masks = [[rng.random() < share for _ in path] for path in paths]
        trie = trie_of(paths, loss_mask=np.array([trained for mask in masks for trained in mask], dtype=np.bool_))
        counts = [sum(mask[1:]) for mask in masks]
        assert trained_counts(trie) == (sum(counts), sum(count > 0 for count in counts))


def test_memory_does_not_grow_with_the_tokens() -> None:
    trie = trie_of([[first] * 100_000 for first in range(4)])
    tracemalloc.start()
    assert trained_counts(trie) == (4 * 99_999, 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000
