"""Refinement: never more work, the same K, and the best single update."""

import random
from collections.abc import Iterator

import numpy as np

from harts.ir import CompactTrie
from harts.stages.partition.labels import renumbered
from harts.stages.partition.refine import moved_cuts, refined
from harts.stages.partition.repair import repaired
from harts.stages.partition.spans import Spans, label_of_cuts
from tests.forests import trie_of
from tests.stages.partition.naive import assert_partition, tries, works_of


def random_partition(rng: random.Random, trie: CompactTrie) -> tuple[np.ndarray, int]:
    """Contiguous or not, and a capacity that it holds."""
    count = len(trie.order)
    if rng.random() < 0.5:
        cuts = sorted(rng.sample(range(1, count), rng.randrange(min(count, 4))))
        label = label_of_cuts(np.array(cuts, dtype=np.int64), count)
    else:
        label = renumbered(np.array([rng.randrange(3) for _ in range(count)]))
    return label, max(works_of(trie, label)) + rng.choice((0, 0, 1, 9))


def test_refinement_keeps_count_and_capacity_and_never_adds_work() -> None:
    lower = 0
    for name, rng, trie in tries(range(40)):
        label, capacity = random_partition(rng, trie)
        found = refined(trie.index, capacity, label)
        before, after = works_of(trie, label), works_of(trie, found)
        assert_partition(trie, found, capacity, len(before))
        assert len(after) == len(before), name
        assert sum(after) <= sum(before), name
        lower += sum(after) < sum(before)
    assert lower > 50


def test_one_repair_is_the_best_move() -> None:
    kinds = [one_repair(name, rng, trie, *random_partition(rng, trie)) for name, rng, trie in tries(range(40))]
    assert min(kinds.count("move"), kinds.count("none")) > 100


def test_one_repair_is_the_best_swap_where_no_move_fits() -> None:
    kinds = []
    for seed in range(150):
        rng = random.Random(seed)
        trie = trie_of([[rng.randint(1, 2) for _ in range(6)] for _ in range(8)])
        label = np.array(rng.sample([0, 0, 0, 0, 1, 1, 1, 1], 8))
        kinds.append(one_repair(f"seed {seed}", rng, trie, label, max(works_of(trie, label))))
    assert kinds.count("swap") > 20


def one_repair(name: str, rng: random.Random, trie: CompactTrie, label: np.ndarray, capacity: int) -> str:
    """Compare one update with all that there are; which kind it was."""
    reach = rng.choice((1, 2, 8))
    before = sum(works_of(trie, label))
    found = repaired(trie.index, capacity, label, reach, updates=1)
    best_move = min(totals(trie, capacity, moves(label, reach)), default=before)
    best_swap = min(totals(trie, capacity, swaps(label, reach)), default=before)
    kind = "move" if best_move < before else "swap" if best_swap < before else "none"
    assert sum(works_of(trie, found)) == {"move": best_move, "swap": best_swap, "none": before}[kind], name
    assert max(works_of(trie, found)) <= capacity, name
    return kind


def moves(label: np.ndarray, reach: int) -> Iterator[np.ndarray]:
    for x in range(len(label)):
        for target in set(label[max(0, x - reach) : x + reach + 1].tolist()) - {label[x]}:
            if (label == label[x]).sum() > 1:
                moved = label.copy()
                moved[x] = target
                yield moved


def swaps(label: np.ndarray, reach: int) -> Iterator[np.ndarray]:
    for x in range(len(label)):
        for y in range(x + 1, min(x + reach + 1, len(label))):
            swapped = label.copy()
            swapped[[x, y]] = label[[y, x]]
            yield swapped


def totals(trie: CompactTrie, capacity: int, labels: Iterator[np.ndarray]) -> Iterator[int]:
    for label in labels:
        works = works_of(trie, label)
        if max(works) <= capacity:
            yield sum(works)


def test_cuts_move_into_the_valley_then_to_even_sides() -> None:
    shared = trie_of([[1, 1, 1, i] for i in range(1, 5)] + [[2, 2, 2, i] for i in range(1, 5)])
    assert moved_cuts(Spans(shared.index), 100, np.array([2])).tolist() == [4]
    unrelated = trie_of([[i] * 3 for i in range(1, 9)])
    assert moved_cuts(Spans(unrelated.index), 100, np.array([1])).tolist() == [4]
    assert moved_cuts(Spans(unrelated.index), 100, np.array([3, 4])).tolist() == [2, 5]


def test_cuts_move_eight_positions_a_sweep_at_most() -> None:
    trie = trie_of([[1, 1, 1, i] for i in range(1, 31)] + [[2, 2]])
    spans = Spans(trie.index)
    assert moved_cuts(spans, 100, np.array([22])).tolist() == [30]
    assert 5 < moved_cuts(spans, 100, np.array([5]))[0] < 5 + 2 * 8 + 1  # out of reach of the valley at 30


def test_cuts_hold_the_capacity() -> None:
    trie = trie_of([[1, 1, 1, i] for i in range(1, 5)] + [[2, 2, 2, i] for i in range(1, 5)])
    assert moved_cuts(Spans(trie.index), 11, np.array([4])).tolist() == [4]
    assert moved_cuts(Spans(trie.index), 12, np.array([3])).tolist() == [4]


def test_cuts_are_swept_twice() -> None:
    trie = trie_of([[1, 1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 2], [1, 2, 2], [2, 2, 2, 1, 2]])
    spans = Spans(trie.index)
    found = moved_cuts(spans, 8, np.array([1, 2, 3]))
    assert found.tolist() == [1, 3, 4]  # [1, 2, 4] after the first sweep
    assert moved_cuts(spans, 8, found).tolist() == [2, 3, 4]  # a third one would save more
    assert spans.lcp[[2, 3, 4]].sum() < spans.lcp[found].sum()


def test_four_memberships_are_repaired() -> None:
    trie = trie_of([[1], [1, 2], [1, 2, 1], [1, 2, 1, 1], [2], [2, 1], [2, 1, 2, 1]])
    found = refined(trie.index, 7, np.array([0, 1, 2, 0, 0, 0, 1]))
    assert found.tolist() == [0, 0, 0, 0, 1, 1, 2]  # [0, 1, 1, 1, 0, 0, 2] after three
    again = repaired(trie.index, 7, found, reach=8, updates=1)
    assert again.tolist() == [0, 0, 0, 0, 1, 2, 2]  # a fifth one would save more
    assert sum(works_of(trie, again)) < sum(works_of(trie, found))
