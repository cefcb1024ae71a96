"""`once`: a shared trained token belongs to the first trajectory of the batch that trains it."""

import random

import numpy as np
import pytest

from harts.ir import CompactTrie
from harts.stages.ingest.records import rollout_batch
from harts.stages.ingest.trie import build_trie
from harts.stages.schedule.segments import segment_tree
from tests.forests import random_trajectories
from tests.stages.ingest.files import record


def brute(paths: list[list[int]], masks: list[list[int]]) -> list[bool]:
    taken: set[tuple[int, ...]] = set()
    found = []
    for path, mask in zip(paths, masks, strict=True):
        for t, trained in enumerate(mask):
            prefix = tuple(path[: t + 1])
            found.append(bool(trained) and prefix not in taken)
            taken |= {prefix} if trained else set()
    return found


def once(paths: list[list[int]], masks: list[list[int]]) -> CompactTrie:
    records = [record(f"t{i}", path, loss_mask=mask) for i, (path, mask) in enumerate(zip(paths, masks, strict=True))]
    return build_trie(rollout_batch(records, "test"), "once")


def test_matches_brute_force_on_random_forests():
    rng = random.Random(4)
    for _ in range(200):
        paths = random_trajectories(rng, 8, roots=rng.randint(1, 3), forks=rng.randint(0, 6))
        masks = [[rng.randint(0, 1) for _ in path] for path in paths]
        trie = once(paths, masks)
        trie.verify()
        assert trie.loss_mask.tolist() == brute(paths, masks)


def test_owner_is_the_first_that_trains_it_not_the_first_that_holds_it():
    trie = once([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]], [[0, 0, 1], [0, 1, 1, 1], [0, 1, 1]])
    assert trie.loss_mask.tolist() == [False, False, True, False, True, False, True, False, False, False]


def test_sum_leaves_the_mask_alone():
    batch = rollout_batch([record("a"), record("b")], "test")
    np.testing.assert_array_equal(build_trie(batch, "sum").loss_mask, batch.columns.loss_mask)


@pytest.mark.parametrize("seed", range(5))
def test_ownership_does_not_depend_on_the_partition(seed):
    rng = random.Random(seed)
    paths = random_trajectories(rng, 8)
    trie = once(paths, [[1] * len(path) for path in paths])
    microbatch = np.array([rng.randrange(3) for _ in paths])
    found = np.zeros(len(trie.loss_mask), dtype=np.bool_)
    for k in np.unique(microbatch):
        tree = segment_tree(trie, np.flatnonzero(microbatch == k))
        for i, key in enumerate(tree.key):
            offset = trie.batch.columns.offset
            span = slice(tree.columns.offset[i], tree.columns.offset[i + 1])
            found[offset[key] : offset[key + 1]] = tree.columns.loss_mask[span]
    np.testing.assert_array_equal(found, trie.loss_mask)
    assert trie.loss_mask.sum() == trie.compact_tokens
