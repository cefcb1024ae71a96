"""Greedy placement: costs, capacity, removal of small microbatches, alignment."""

import numpy as np

from harts.stages.partition.bins import Bins, Policy, dissolve, empty_bins, place
from harts.stages.partition.greedy import aligned, best_placement, orders, placed, policies
from harts.stages.partition.labels import renumbered, sets_of
from tests.forests import trie_of
from tests.stages.partition.naive import assert_partition, compact_work, some_capacity, sorted_tokens, tries, works_of


def members_of(bins: Bins) -> list[list[int]]:
    return [np.flatnonzero(bins.label == k).tolist() for k in range(int(bins.opened[0]))]


def test_work_of_bins_equals_a_naive_count_after_every_insertion() -> None:
    for name, rng, trie in tries(range(15)):
        tokens, capacity = sorted_tokens(trie), some_capacity(rng, trie)
        for policy in (Policy(10**6, 1), Policy(1, 10**6)):
            bins = empty_bins(trie.length, trie.lcp, capacity)
            for x in rng.sample(range(len(tokens)), len(tokens)):
                place(bins, policy, x)
                naive = [compact_work(tokens[i] for i in members) for members in members_of(bins)]
                assert bins.work[: len(naive)].tolist() == naive, name
                assert max(naive) <= capacity, name


def test_best_fit_takes_the_fullest_and_max_shared_the_nearest() -> None:
    index = trie_of([[1, 1, 1], [1, 1, 1, 2], [4, 4, 4, 4, 4]]).index
    chosen = {}
    for name, policy in policies(index, 8).items():
        bins = empty_bins(index.length, index.lcp, 8)
        for x in (1, 2, 0):  # 4 and 5 do not fit together; the last makes 4 (sharing all 3) or 8
            place(bins, policy, x)
        chosen[name] = bins.label.tolist()
    assert chosen == {"best_fit": [1, 0, 1], "max_shared": [0, 0, 1]}


def test_a_failed_dissolution_leaves_no_trace() -> None:
    outcomes = set()
    for name, rng, trie in tries(range(15)):
        policy = Policy(10**6, 1)
        bins = empty_bins(trie.length, trie.lcp, some_capacity(rng, trie))
        tokens = sorted_tokens(trie)
        for x in rng.sample(range(len(tokens)), len(tokens)):
            place(bins, policy, x)
        for microbatch in range(int(bins.opened[0])):
            before = bins.label.copy(), bins.work.copy()
            done = dissolve(bins, policy, microbatch)
            outcomes.add(done)
            if done:
                assert members_of(bins)[microbatch] == [], name
                continue
            assert (bins.label == before[0]).all(), name
            assert (bins.work == before[1]).all(), name
        for members, work in zip(members_of(bins), bins.work.tolist(), strict=False):
            assert not members or compact_work(tokens[i] for i in members) == work <= bins.capacity, name
    assert outcomes == {True, False}


def test_small_microbatches_are_removed_if_all_their_members_fit_elsewhere() -> None:
    in_order, policy = np.arange(4), Policy(1, 9)
    trie = trie_of([[1] * 2, [2] * 2, [3] * 6, [4] * 6])  # placed as 2 + 2, 6, 6
    assert works_of(trie, placed(trie.index, 8, in_order, policy)) == [8, 8]
    trie = trie_of([[1] * 2, [2] * 2, [3] * 6, [4] * 7])  # placed as 2 + 2, 6, 7: one of 2 fits nowhere
    assert works_of(trie, placed(trie.index, 8, in_order, policy)) == [4, 6, 7]


def test_alignment_takes_the_cheapest_singletons() -> None:
    for name, rng, trie in tries(range(15)):
        count = len(trie.order)
        label = renumbered(np.array([rng.randrange(3) for _ in range(count)]))
        before = works_of(trie, label)
        found = aligned(trie.index, label, len(before) + 1)
        if count == len(before):
            assert found is None, name
            continue
        assert found is not None, name
        options = []
        for x in range(count):
            if (label == label[x]).sum() > 1:
                moved = label.copy()
                moved[x] = len(before)
                options.append(sum(works_of(trie, moved)))
        assert sum(works_of(trie, found)) == min(options), name
        assert len(works_of(trie, found)) == len(before) + 1, name


def test_alignment_takes_the_longest_of_equally_cheap_singletons() -> None:
    trie = trie_of([[1], [2, 2, 2], [3, 3], [4, 4, 4]])  # no sharing: every singleton adds nothing
    assert aligned(trie.index, np.array([0, 0, 0, 0]), 2).tolist() == [0, 1, 0, 0]  # type: ignore[union-attr]
    assert aligned(trie.index, np.array([0, 0, 0, 0]), 3).tolist() == [0, 1, 0, 2]  # type: ignore[union-attr]


def test_orders() -> None:
    trie = trie_of([[1, 1, 1, 1, 2], [1, 1, 1, 1, 3, 3], [2, 2, 2], [2, 2]])  # sorted: 0, 1, [2 2], [2 2 2]
    found = {name: order.tolist() for name, order in orders(trie.index).items()}
    assert found == {
        "ascending": [0, 1, 2, 3],
        "descending": [3, 2, 1, 0],
        "longest_first": [1, 0, 3, 2],
        "rarest_first": [1, 0, 3, 2],  # unique suffixes 1 2 0 1
    }


def test_best_placement_is_a_partition_even_with_the_tightest_capacity() -> None:
    for name, rng, trie in tries(range(15)):
        for capacity in (int(trie.length.max()), some_capacity(rng, trie)):
            replicas = rng.randint(1, 3)
            found = best_placement(trie.index, capacity, replicas)
            if found is None:
                assert len(trie.order) % replicas, name  # only as many microbatches as trajectories fail
                continue
            assert_partition(trie, found.label, capacity, replicas)
            assert found.work == sum(works_of(trie, found.label)), name


def test_best_placement_has_the_fewest_microbatches_then_the_least_work() -> None:
    trie = trie_of([[1], [1, 1, 1, 2, 1], [1, 1, 2], [1, 2, 1, 2], [2, 2, 1, 1, 2]])
    made = {
        (len(works), sum(works))
        for order in orders(trie.index).values()
        for policy in policies(trie.index, 8).values()
        for works in [works_of(trie, placed(trie.index, 8, order, policy))]
    }
    assert (3, 15) in made  # less work in more microbatches
    found = best_placement(trie.index, 8, 1)
    assert found is not None
    assert (found.count, found.work) == (2, 16)


def test_sets_measure_any_partition() -> None:
    for name, rng, trie in tries(range(10)):
        tokens = sorted_tokens(trie)
        label = renumbered(np.array([rng.randrange(4) for _ in tokens]))
        sets = sets_of(trie.index, label)
        assert sets.work.tolist() == works_of(trie, label), name
        for x, own in enumerate(tokens):
            rest = [tokens[i] for i in np.flatnonzero(label == label[x]) if i != x]
            saved = compact_work(rest) + len(own) - compact_work([*rest, own])
            assert sets.shared[x] == saved, name
