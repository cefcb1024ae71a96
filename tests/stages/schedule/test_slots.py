"""The schedule stage: slots, replicas, score, choice and totals."""

import random
from itertools import pairwise

import numpy as np
import pytest

from harts.ir import CompactTrie, Partitions
from harts.stages.partition.paper import Paper
from harts.stages.schedule.slots import Slots, assign
from tests.forests import random_trajectories, trie_of


def test_slots_are_blocks_of_similar_work_and_heavier_ones_go_to_lighter_replicas() -> None:
    schedule = assign(np.array([5, 9, 2, 7, 1, 6]), replicas=2)
    # sorted 9 7 | 6 5 | 2 1; replica 0 has 9 after slot 0, so the 6 goes to replica 1: 14 and 13; then the 2 to it
    assert schedule.microbatch.tolist() == [[1, 3], [0, 5], [4, 2]]
    assert schedule.score == (30, 9 + 6 + 2, 15)


def test_equal_work_keeps_the_order_of_microbatches_and_replicas() -> None:
    assert assign(np.array([4, 4, 4, 4]), replicas=2).microbatch.tolist() == [[0, 1], [2, 3]]


def test_score_equals_a_naive_count() -> None:
    rng = random.Random(1)
    for _ in range(100):
        replicas, slots = rng.randint(1, 5), rng.randint(1, 6)
        work = np.array([rng.randint(1, 30) for _ in range(replicas * slots)])
        schedule = assign(work, replicas)
        rows = [[int(work[m]) for m in slot] for slot in schedule.microbatch]
        assert sorted(schedule.microbatch.reshape(-1).tolist()) == list(range(len(work)))
        assert schedule.score == (
            sum(map(sum, rows)),
            sum(map(max, rows)),
            max(sum(row[d] for row in rows) for d in range(replicas)),
        )
        assert all(min(a) >= max(b) for a, b in pairwise(rows))


def partitions(labels: list[list[int]], replicas: int) -> Partitions:
    return handed(trie_of([[1] * 4, [2] * 3, [3] * 2, [4] * 1]), labels, replicas)


def handed(
    trie: CompactTrie, labels: list[list[int]], replicas: int, capacity: int | None = None, objective: str = "paper"
) -> Partitions:
    """Candidates with these labels of sorted positions."""
    parts = [np.flatnonzero(np.array(row) == k) for row in labels for k in range(max(row) + 1)]
    return Partitions(
        trie,
        capacity=capacity,
        replicas=replicas,
        objective=objective,
        lower_bound=trie.compact_tokens,
        unit="compact tokens",
        names=tuple(f"c{i}" for i in range(len(labels))),
        microbatch=np.array(labels, dtype=np.int32),
        cost=np.array([trie.index.set_work(part) for part in parts], dtype=np.int64),
    )


@pytest.mark.parametrize(
    ("labels", "chosen"),
    [
        ([[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1]], 1),  # slots of 7 | 5, 5 | 5, and 4 | 6
        ([[0, 0, 1, 1], [1, 1, 0, 0]], 0),  # equal scores: the first
        ([[0, 1, 1, 0], [0, 1, 2, 3]], 0),  # slots 5 | 5 against 4 | 3 and 2 | 1
    ],
)
def test_the_least_score_is_chosen(labels: list[list[int]], chosen: int) -> None:
    step = Slots(Slots.Config()).run(partitions(labels, 2)).step
    assert step.chosen == chosen


def test_less_total_work_beats_better_balance() -> None:
    trie = trie_of([[1, 1, 1, 2], [1, 1, 1, 3], [4, 4]])
    step = Slots(Slots.Config()).run(handed(trie, [[0, 1, 1], [0, 0, 1]], 2)).step
    assert step.scores.tolist() == [[10, 6, 6], [7, 5, 5]]
    assert step.chosen == 1


def test_critical_weighs_what_lockstep_replicas_wait_for() -> None:
    trie = trie_of([[1] * 4, [2] * 3, [3] * 2, [4] * 1])
    labels = [[0, 1, 1, 2], [0, 1, 2, 2]]
    waits = [[0, 0, 0, 1], [0, 1, 1, 0]]  # 9 and 1, 5 and 5: the same total
    assert Slots(Slots.Config()).run(handed(trie, waits, 2, objective="critical")).step.chosen == 1
    shared = trie_of([[1, 1, 1, 2], [1, 1, 1, 3], [4, 4]])
    labels = [[0, 0, 1], [0, 1, 1]]  # 5 and 2, or 4 and 6: less in total, and waits less
    assert Slots(Slots.Config()).run(handed(shared, labels, 2, objective="critical")).step.chosen == 0


def test_microbatches_are_numbered_slot_by_slot_in_the_callers_order() -> None:
    trie = trie_of([[4], [3] * 3, [2] * 4, [1] * 2])  # sorted: the other way round
    found = Slots(Slots.Config()).run(handed(trie, [[0, 1, 2, 3]], 2, capacity=9))  # works 2 4 3 1
    found.verify()
    found.step.verify()
    assert found.step.work.tolist() == [4, 3, 1, 2]  # slot 1 gives its heavier one to replica 1
    assert found.step.microbatch.tolist() == [2, 1, 0, 3]
    assert [tree.key.tolist() for tree in found.items] == [[2], [1], [0], [3]]


def test_trees_hold_every_trajectory_once_and_have_the_planned_work() -> None:
    rng = random.Random(5)
    for seed in range(20):
        trie = trie_of(random_trajectories(random.Random(seed), chunk=4, roots=3, forks=8))
        found = Paper(Paper.Config(capacity=int(trie.length.max()) + rng.randint(0, 30), replicas=2)).run(trie)
        plan = Slots(Slots.Config()).run(found)
        plan.verify()
        plan.step.verify()
        assert np.sort(np.concatenate([tree.key for tree in plan.items])).tolist() == list(range(len(trie.order)))
        for number, tree in enumerate(plan.items):
            tree.verify()
            assert len(tree.tokens) == plan.step.work[number]
            assert (plan.step.microbatch[tree.key] == number).all()
        assert plan.step.semantic_tokens == trie.semantic_tokens
        assert plan.step.compact_tokens == trie.compact_tokens


def test_trained_totals_leave_out_first_tokens() -> None:
    mask = np.array([1, 1, 0, 1, 0, 0, 1, 0, 1, 1], dtype=np.bool_)
    trie = trie_of([[1, 2, 3], [1, 2], [4], [5, 6, 7, 8]], loss_mask=mask)
    step = Slots(Slots.Config()).run(handed(trie, [[0, 0, 0, 0]], 1)).step
    # trained: token 1 of the first; none of the second (only its first token is) and third; tokens 1, 2, 3 without 1
    assert step.trained_tokens == 3
    assert step.trained_trajectories == 2
