"""Sharing follows token ids alone; every trajectory is kept."""

import numpy as np
import pytest

from harts.ir import CompactTrie
from harts.stages.ingest.records import rollout_batch
from harts.stages.ingest.trie import build_trie
from harts.stages.schedule.segments import segment_tree
from tests.stages.ingest.files import record


def trie_of(*records):
    trie = build_trie(rollout_batch(records, "test"))
    trie.batch.columns.verify()
    trie.batch.verify()
    trie.verify()
    return trie


def multiplicity(trie: CompactTrie) -> list[int]:
    """q of every token of the one-microbatch tree, segment after segment, counted through the trajectories."""
    tree = segment_tree(trie, np.arange(len(trie.order)))
    counts = np.zeros(len(tree.tokens), dtype=int)
    for tail, length in zip(tree.tail, tree.columns.length, strict=True):
        for segment in tree.path(int(tail)):
            used = min(int(tree.length[segment]), int(length - tree.start[segment]))
            counts[tree.offset[segment] : tree.offset[segment] + used] += 1
    return counts.tolist()


def test_rendered_again_history_forks_where_its_tokens_differ():
    trie = trie_of(
        record("t1", [10, 11, 12, 99], text="same"),
        record("t2", [10, 11, 12, 99, 7, 20, 21], text="same", turn=1),
        record("t3", [10, 11, 5, 6, 99, 7, 20], text="same", turn=1),
    )
    index = {int(key): position for position, key in enumerate(trie.order)}
    assert trie.index.pair(index[0], index[1]) == 4
    assert trie.index.pair(index[0], index[2]) == 2
    assert trie.compact_tokens == 4 + 3 + 5


def test_group_does_not_limit_sharing():
    trie = trie_of(record("a", [1, 2, 3], group="g"), record("b", [1, 2, 4], group="h"))
    assert trie.compact_tokens == 4
    assert trie.batch.columns.groups == ("g", "h")


def test_prefix_and_duplicate_are_kept_apart_and_share_rows():
    trie = trie_of(
        record("x", [1, 2, 3], advantage=1.0),
        record("y", [1, 2, 3, 4, 5], advantage=-1.0, loss_mask=[0, 0, 0, 1, 1]),
        record("z", [1, 2, 3], advantage=0.5, loss_mask=[0, 1, 0]),
    )
    assert (trie.compact_tokens, trie.semantic_tokens) == (5, 11)
    assert trie.index.work(0, 2) == 5
    assert multiplicity(trie) == [3, 3, 3, 1, 1]
    tree = segment_tree(trie, np.arange(3))
    tree.verify()
    assert tree.length.tolist() == [5]
    assert tree.columns.names == ("x", "y", "z")
    assert tree.columns.advantage.tolist() == [1.0, -1.0, 0.5]
    assert tree.columns.loss_mask.tolist() == [False, True, True, False, False, False, True, True, False, True, False]
    assert sum(tree.columns.length - 1) == 8


def test_equal_trajectories_stay_in_the_callers_order():
    trie = trie_of(*(record(name, [5, 6]) for name in "dacb"), record("e", [5]))
    assert trie.order.tolist() == [4, 0, 1, 2, 3]
    assert trie.lcp.tolist() == [0, 1, 2, 2, 2]


@pytest.mark.parametrize(("low", "high"), [(255, 256), (65535, 65536), (2**24 - 1, 2**24), (2**31 - 2, 2**31 - 1)])
def test_order_is_of_ids_not_of_their_bytes(low, high):
    trie = trie_of(record("high", [high]), record("low", [low]))
    assert trie.order.tolist() == [1, 0]


def test_groups_of_any_size_in_one_batch():
    sizes = {"one": 1, "three": 3, "eight": 8}
    trie = trie_of(*(record(f"{g}{i}", [1, i], group=g) for g, size in sizes.items() for i in range(size)))
    columns = trie.batch.columns
    assert np.bincount(columns.group).tolist() == [1, 3, 8]
    assert columns.groups == ("one", "three", "eight")
