"""The partition stage: guarantees, capacity cases, candidates, determinism."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harts.errors import PlanError
from harts.ir import Partitions
from harts.stages.ingest.jsonl import Jsonl
from harts.stages.ingest.trie import build_trie
from harts.stages.partition.labels import sets_of
from harts.stages.partition.natural import natural_cuts
from harts.stages.partition.paper import Candidate, Paper, anchors
from harts.stages.partition.spans import Spans, label_of_cuts
from tests.forests import batch_of, trie_of
from tests.shared import shared_data
from tests.stages.partition.naive import assert_partition, shapes, some_capacity, sorted_tokens, tries, works_of


def partitions_of(trajectories: list[list[int]], **options: int | None) -> Partitions:
    return Paper(Paper.Config(**options)).run(trie_of(trajectories))  # type: ignore[arg-type]


def total(trie: object, label: np.ndarray) -> int:
    return sum(works_of(trie, label))  # type: ignore[arg-type]


@pytest.mark.parametrize("exact_limit", [1, 512])
def test_every_candidate_is_a_partition(exact_limit: int) -> None:
    made = 0
    for name, rng, trie in tries(range(25)):
        capacity = rng.choice((None, some_capacity(rng, trie)))
        replicas = rng.randint(1, min(3, len(trie.order)))
        stage = Paper(Paper.Config(capacity=capacity, replicas=replicas, exact_limit=exact_limit))
        try:
            found = stage.run(trie)
        except PlanError as error:
            assert "found no way" in str(error), name
            natural = len(natural_cuts(Spans(trie.index), capacity or trie.compact_tokens)) + 1
            assert natural > len(trie.order) // replicas * replicas, name  # what contiguous splits can always reach
            continue
        found.verify()
        made += len(found.names)
        for label in found.microbatch:
            assert_partition(trie, label, capacity, replicas)
        assert len({label.tobytes() for label in found.microbatch}) == len(set(found.names)) == len(found.names), name
    assert made > 300


def test_unrelated_trajectories_that_fill_a_microbatch_get_one_each() -> None:
    found = partitions_of([[i] * 7 for i in range(1, 9)], capacity=8)
    assert found.counts().tolist() == [8]


def test_a_shared_prefix_counts_once_against_the_capacity() -> None:
    found = partitions_of([[1] * 6 + [2], [1] * 6 + [3]], capacity=8)
    assert found.counts().tolist() == [1]
    assert found.work(0).tolist() == [8]


def test_branches_under_a_trunk_fit_as_one_microbatch() -> None:
    trunk = [1] * 1000
    found = partitions_of([trunk + [i + 2] * 10 for i in range(100)], capacity=2000)
    assert found.counts().tolist() == [1]
    assert found.work(0).tolist() == [2000]


def test_trajectories_longer_than_the_capacity_are_named() -> None:
    with pytest.raises(
        PlanError, match=r"test: trajectory 't1' has 9 tokens: more than the capacity of 8 compact tokens$"
    ):
        partitions_of([[1] * 3, [1] * 9], capacity=8)
    with pytest.raises(PlanError, match=r"'t0' has 9 .*'t1' has 10 .*'t3' has 11 tokens, and 2 more: .* 8 compact"):
        partitions_of([[1] * 9, [1] * 10, [1], [1] * 11, [2] * 12, [3] * 13], capacity=8)


def test_fewer_trajectories_than_replicas_are_refused() -> None:
    with pytest.raises(PlanError, match=r"test: 2 trajectories cannot fill 3 replicas$"):
        partitions_of([[1], [2]], capacity=None, replicas=3)
    with pytest.raises(PlanError, match=r"test: 1 trajectory cannot fill 8 replicas$"):
        partitions_of([[1]], capacity=None, replicas=8)


def test_fewer_trajectories_than_slots_are_refused() -> None:
    with pytest.raises(PlanError, match=r"test: 5 trajectories cannot fill 3 replicas x 2 slots$"):
        partitions_of([[1]] * 5, capacity=None, replicas=3, slot_multiple=2)
    with pytest.raises(PlanError, match=r"test: 1 trajectory cannot fill 1 replica x 4 slots$"):
        partitions_of([[1]], capacity=None, slot_multiple=4)


@pytest.mark.parametrize(("replicas", "slots", "wanted"), [(2, 1, "2 replicas"), (1, 2, "1 replica x 2 slots")])
def test_a_count_that_slots_cannot_divide_is_refused(replicas: int, slots: int, wanted: str) -> None:
    text = (
        f"test: found no way to put 3 trajectories into microbatches of at most 4 compact tokens whose number is a "
        f"multiple of {wanted}; the search is heuristic: raising the capacity or lowering the replicas helps"
    )
    with pytest.raises(PlanError, match=f"^{text}$"):
        partitions_of([[1] * 4, [2] * 4, [3] * 4], capacity=4, replicas=replicas, slot_multiple=slots)


@pytest.mark.parametrize("exact_limit", [1, 512])
@pytest.mark.parametrize(("replicas", "slots"), [(1, 2), (2, 2), (2, 3), (3, 1), (1, 5)])
def test_every_replica_gets_a_multiple_of_the_slots(exact_limit: int, replicas: int, slots: int) -> None:
    trie = trie_of([[1 + i // 4] * 3 + [i + 9] * (1 + i % 3) for i in range(16)])
    for capacity in (8, 20, None):
        stage = Paper(Paper.Config(capacity=capacity, replicas=replicas, slot_multiple=slots, exact_limit=exact_limit))
        found = stage.run(trie)
        assert found.replicas == replicas
        for label in found.microbatch:
            assert_partition(trie, label, capacity, replicas * slots)


@pytest.mark.parametrize("exact_limit", [1, 512])
def test_three_natural_microbatches_become_an_even_number(exact_limit: int) -> None:
    trie = trie_of([[1] * 7, [2] * 7, [3] * 4, [4] * 4])
    assert natural_cuts(Spans(trie.index), 8).tolist() == [1, 2]
    found = Paper(Paper.Config(capacity=8, replicas=2, exact_limit=exact_limit)).run(trie)
    assert set(found.counts().tolist()) == {4}
    for label in found.microbatch:
        assert_partition(trie, label, 8, 2)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_without_a_capacity_each_replica_gets_one_microbatch(replicas: int) -> None:
    found = partitions_of(shapes(random.Random(7))["forest"], capacity=None, replicas=replicas)
    assert set(found.counts().tolist()) == {replicas}


def test_candidates_are_named_for_a_reader() -> None:
    trajectories = [[1] * 5, [2] * 5, [3] * 3, [4] * 3]  # intervals need 3 microbatches of 8, free choice needs 2
    exact = partitions_of(trajectories, capacity=8)
    assert exact.names == ("exact K=3", "greedy ascending best_fit")
    assert exact.counts().tolist() == [3, 2]
    assert partitions_of(trajectories, capacity=8, exact_limit=1).names[0] == "evolved K=3"


def test_exact_candidates_are_never_worse_than_the_natural_partition() -> None:
    for name, rng, trie in tries(range(20)):
        capacity = some_capacity(rng, trie)
        natural = label_of_cuts(natural_cuts(Spans(trie.index), capacity), len(trie.order))
        found = Paper(Paper.Config(capacity=capacity)).run(trie)
        assert min(total(trie, label) for label in found.microbatch) <= total(trie, natural), name


@pytest.mark.parametrize("exact_limit", [1, 512])
def test_permuted_input_gives_the_same_microbatches(exact_limit: int) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        for name, trajectories in shapes(rng).items():
            trie = trie_of(trajectories)
            stage = Paper(Paper.Config(capacity=some_capacity(rng, trie), exact_limit=exact_limit))
            rng.shuffle(trajectories)
            again = trie_of(trajectories)
            assert sorted_tokens(trie) == sorted_tokens(again)
            first, second = stage.run(trie), stage.run(again)
            assert first.names == second.names, name
            assert (first.microbatch == second.microbatch).all(), name


DIGEST = """
import random
from harts.stages.partition.paper import Candidate, Paper, anchors
from harts.stages.schedule.slots import Slots
from tests.forests import random_trajectories, trie_of
trie = trie_of(random_trajectories(random.Random(3), chunk=8, roots=4, forks=20))
for limit in (1, 512):
    found = Paper(Paper.Config(capacity=int(trie.length.max()) + 20, replicas=2, exact_limit=limit)).run(trie)
    print(found.digest(), Slots(Slots.Config()).run(found).digest())
"""


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    root = Path(__file__).resolve().parents[3]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 4


@pytest.mark.parametrize("exact_limit", [64, 512])
def test_partition_of_real_set(exact_limit: int) -> None:
    path = shared_data() / "medium" / "toolbench_leaf.jsonl.gz"
    trie = Jsonl(Jsonl.Config(path=path)).run(None)
    found = Paper(Paper.Config(capacity=16384, replicas=2, exact_limit=exact_limit)).run(trie)
    found.verify()
    natural = label_of_cuts(natural_cuts(Spans(trie.index), 16384), len(trie.order))
    for i, count in enumerate(found.counts().tolist()):
        members = found.members(i)
        assert np.sort(np.concatenate(members)).tolist() == list(range(len(trie.order)))
        assert count == len(members)
        assert count % 2 == 0
        assert found.work(i).min() > 0
        assert found.work(i).max() <= 16384
    least = min(int(found.work(i).sum()) for i in range(len(found.names)))
    assert least <= sets_of(trie.index, natural).work.sum()


def test_equal_trajectories_stay_together_when_nothing_forces_them_apart() -> None:
    trie = build_trie(batch_of([[1, 2, 3]] * 5 + [[4, 5, 6]] * 5))
    found = Paper(Paper.Config(capacity=3)).run(trie)
    assert found.counts()[0] == 2
    assert found.work(0).tolist() == [3, 3]


def test_anchors_are_the_greedy_count_then_the_least_work_then_the_nearest_count() -> None:
    trie = trie_of([[1, 1, 1, i] for i in range(1, 5)] + [[2, 2, 2, i] for i in range(1, 5)])
    labels = {
        "valley": [0, 0, 0, 0, 1, 1, 1, 1],
        "uneven": [0, 0, 1, 1, 1, 1, 1, 1],
        "three": [0, 0, 1, 1, 2, 2, 2, 2],
        "five": [0, 1, 2, 2, 3, 3, 4, 4],
        "six": [0, 1, 2, 2, 3, 3, 4, 5],
        "greedy": [0, 0, 0, 0, 1, 1, 2, 2],
    }
    found = [Candidate(name, np.array(label)) for name, label in labels.items()]
    assert [anchor.name for anchor in anchors(trie.index, found, 3)] == ["three", "valley", "greedy"]
    assert [anchor.name for anchor in anchors(trie.index, found[2:5], 6)] == ["six", "three", "five"]
    assert [anchor.name for anchor in anchors(trie.index, found[4:5], 6)] == ["six"]
