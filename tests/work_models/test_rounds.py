"""Rounds counted from lengths and LCPs are those that the minimum-call plan takes."""

import random

import numpy as np
import pytest

from harts.stages.call_plan.min_call import plan_rounds
from harts.stages.schedule.segments import segment_tree
from harts.work_models.rounds import count_rounds
from tests.forests import paths_of, random_trajectories, trie_of


def counted(trie, members, chunk):
    length = trie.length[members]
    lcp = np.concatenate(([0], trie.index.neighbours(members[:-1], members[1:])))
    return int(count_rounds(length, lcp, np.array([0]), chunk)[0])


@pytest.mark.parametrize("seed", range(300))
def test_rounds_of_random_forests_with_prefixes_and_duplicates(seed):
    rng = random.Random(seed)
    chunk = rng.choice((1, 2, 4, 16))
    trie = trie_of(random_trajectories(rng, chunk, roots=rng.randint(1, 3), forks=rng.randint(0, 12)))
    for size in (len(trie.order), rng.randint(1, len(trie.order))):
        members = np.array(sorted(rng.sample(range(len(trie.order)), size)))
        assert counted(trie, members, chunk) == plan_rounds(segment_tree(trie, members), chunk).rounds


@pytest.mark.parametrize("seed", range(30))
def test_microbatches_are_counted_apart(seed):
    rng = random.Random(seed)
    trie = trie_of(random_trajectories(rng, 8, roots=2, forks=9))
    label = np.array([rng.randrange(3) for _ in trie.order])
    groups = [np.flatnonzero(label == k) for k in range(3) if (label == k).any()]
    lcp = [np.concatenate(([0], trie.index.neighbours(each[:-1], each[1:]))) for each in groups]
    begins = np.cumsum([0, *map(len, groups)])[:-1]
    found = count_rounds(trie.length[np.concatenate(groups)], np.concatenate(lcp), begins, 8)
    assert found.tolist() == [plan_rounds(segment_tree(trie, each), 8).rounds for each in groups]


@pytest.mark.parametrize(("levels", "tokens", "rounds"), [(1, 9, 1), (2, 9, 2), (5, 9, 5), (4, 1, 2)])
def test_binary_tree_needs_a_round_a_level_unless_segments_are_short(levels, tokens, rounds):
    spec = [((i - 1) // 2 if i else -1, tokens) for i in range(2**levels - 1)]
    trie = trie_of(paths_of(spec))
    assert counted(trie, np.arange(len(trie.order)), 8) == (rounds if tokens > 8 else 1)


def test_trajectory_that_ends_inside_a_segment_does_not_move_its_anchor():
    # the fork at 10 is past the boundary at 8 for a segment from 0, but not for one from the end at 9
    paths = [[1] * 10 + [2], [1] * 10 + [3]]
    for more in ([], [[1] * 9]):
        trie = trie_of([*paths, *more])
        assert counted(trie, np.arange(len(trie.order)), 8) == 2
