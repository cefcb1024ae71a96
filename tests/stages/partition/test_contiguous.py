"""Natural, exact and evolved partitions."""

import numpy as np
import pytest

from harts.ir import CompactTrie
from harts.stages.partition.evolve import SAMPLES, evolved_cuts, sampled
from harts.stages.partition.exact import exact_cuts
from harts.stages.partition.natural import count_range, natural_cuts
from harts.stages.partition.spans import Spans, cuts_of_label, label_of_cuts
from tests.forests import trie_of
from tests.stages.partition.naive import (
    assert_partition,
    compact_work,
    contiguous_partitions,
    some_capacity,
    sorted_tokens,
    tries,
    works_of,
)


def work_matrix(trie: CompactTrie) -> dict[tuple[int, int], int]:
    tokens = sorted_tokens(trie)
    count = len(tokens)
    return {(a, b): compact_work(tokens[a:b]) for a in range(count) for b in range(a + 1, count + 1)}


def test_interval_work_counts_unique_prefixes() -> None:
    for name, _, trie in tries(range(5)):
        spans = Spans(trie.index)
        for (first, stop), work in work_matrix(trie).items():
            assert spans.work(first, stop) == work, name


def test_natural_splits_only_what_is_too_heavy_and_at_the_lowest_valley() -> None:
    for name, rng, trie in tries(range(20)):
        spans, capacity = Spans(trie.index), some_capacity(rng, trie)
        cuts = natural_cuts(spans, capacity).tolist()
        assert cuts == naturally_split(work_matrix(trie), trie.lcp.tolist(), 0, len(spans), capacity), name


def naturally_split(work: dict, lcp: list[int], first: int, stop: int, capacity: int) -> list[int]:
    """The rule of the specification, read literally."""
    if work[first, stop] <= capacity:
        return []

    def rank(t: int) -> tuple[int, int, int]:
        left, right = work[first, t], work[t, stop]
        return lcp[t], max(left, right), abs(left - right)

    cut = min(range(first + 1, stop), key=rank)
    left = naturally_split(work, lcp, first, cut, capacity)
    return [*left, cut, *naturally_split(work, lcp, cut, stop, capacity)]


def test_equal_valleys_split_where_the_sides_are_even() -> None:
    trie = trie_of([[1], [2, 2], [3, 3, 3], [4, 4, 4, 4], [5] * 5])  # works 1 2 3 4 5, no sharing
    assert natural_cuts(Spans(trie.index), 9).tolist() == [3]  # 6 + 9, not 10 + 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((100, 30, 1, 6, 50), [4, 5, 6]),
        ((100, 30, 4, 6, 50), [4, 8]),
        ((121, 30, 4, 9, 50), [8, 12]),
        ((100, 30, 4, 6, 7), [4]),  # 8 microbatches cannot be filled by 7 trajectories
        ((5, 30, 2, 1, 9), [2]),
    ],
)
def test_range_of_counts(arguments: tuple[int, int, int, int, int], expected: list[int]) -> None:
    assert list(count_range(*arguments)) == expected


def test_exact_equals_brute_force_for_every_count() -> None:
    for name, rng, trie in tries(range(12)):
        count, work, capacity = min(len(trie.order), 9), work_matrix(trie), some_capacity(rng, trie)
        tokens = sorted_tokens(trie)[:count]
        small = trie_of(tokens)
        found = exact_cuts(Spans(small.index), capacity, range(1, count + 2))
        for k in range(1, count + 2):
            scores = []
            for parts in contiguous_partitions(count, k):
                works = [work[part.start, part.stop] for part in parts]
                if max(works) <= capacity:
                    scores.append((sum(works), max(works)))
            assert (k in found) == bool(scores), (name, k)
            if scores:
                works = works_of(small, label_of_cuts(found[k], count))
                assert len(works) == k, name
                assert (sum(works), max(works)) == min(scores), (name, k)


def test_exact_steps_over_counts_that_replicas_do_not_divide() -> None:
    trie = trie_of([[i, i] for i in range(1, 9)])
    assert sorted(exact_cuts(Spans(trie.index), 6, range(3, 10, 3))) == [3, 6]


def test_few_counts_are_all_sampled_and_many_span_the_range() -> None:
    assert sampled(range(4, 4 + 2 * SAMPLES, 2)) == list(range(4, 4 + 2 * SAMPLES, 2))
    many = range(8, 4000, 4)
    found = sampled(many)
    assert len(found) <= SAMPLES
    assert set(found) <= set(many)
    assert (found[0], found[-1]) == (8, many[-1])
    assert found[:16] == list(many[:16])
    assert max(np.diff(found)) < len(many) * 4 / 10


def test_evolution_merges_the_largest_saving_and_splits_the_cheapest() -> None:
    for name, rng, trie in tries(range(20)):
        spans, capacity, count = Spans(trie.index), some_capacity(rng, trie), len(trie.order)
        natural = natural_cuts(spans, capacity)
        found = evolved_cuts(spans, capacity, natural, list(range(1, count + 2)))
        assert found[len(natural) + 1].tolist() == natural.tolist(), name
        assert max(found) == count, name
        for k, cuts in found.items():
            assert len(cuts) == k - 1, name
            assert_partition(trie, label_of_cuts(cuts, count), capacity, 1)
            if k > len(natural) + 1:
                new = set(cuts) - set(found[k - 1])
                rest = set(range(1, count)) - set(cuts)
                assert len(new) == 1, name
                assert spans.lcp[new.pop()] <= min((spans.lcp[t] for t in rest), default=1 << 60), name
            if k < len(natural) + 1:
                (gone,) = set(found[k + 1]) - set(cuts)
                assert spans.lcp[gone] == largest_legal_saving(spans, capacity, found[k + 1].tolist()), name
        least = found[min(found)].tolist()
        assert largest_legal_saving(spans, capacity, least) is None or min(found) > len(natural) + 1, name


def largest_legal_saving(spans: Spans, capacity: int, cuts: list[int]) -> int | None:
    edges = [0, *cuts, len(spans)]
    legal = [
        int(spans.lcp[edges[i]]) for i in range(1, len(edges) - 1) if spans.work(edges[i - 1], edges[i + 1]) <= capacity
    ]
    return max(legal, default=None)


def test_labels_and_cuts_are_inverse() -> None:
    cuts = np.array([2, 3, 7])
    label = label_of_cuts(cuts, 9)
    assert label.tolist() == [0, 0, 1, 2, 2, 2, 2, 3, 3]
    again = cuts_of_label(label)
    assert again is not None
    assert again.tolist() == [2, 3, 7]
    assert cuts_of_label(np.array([0, 1, 0])) is None
