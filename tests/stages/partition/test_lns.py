"""The stages `lns`, `contiguous` and `peeling`: guarantees, the portfolio, degenerate steps, repeatability."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.errors import PlanError
from harts.ir import CompactTrie, Partitions, StepPlan
from harts.ir.base import Int64
from harts.registry import resolve
from harts.stages.ingest.jsonl import Jsonl
from harts.stages.schedule.slots import Slots, ranked
from harts.work_models.base import WorkModel, WorkTables
from tests.forests import trie_of
from tests.shared import shared_data
from tests.stages.partition.naive import assert_partition, shapes, some_capacity, tries
from tests.stages.partition.search.rig import partitions_of

ROOT = Path(__file__).resolve().parents[3]
STAGES = ["lns", "contiguous", "peeling"]


def partition(trie: CompactTrie, stage: str = "lns", env: Any = None, **options: Any) -> Partitions:
    cls = resolve("partition", stage)
    options = {"capacity": None, **({"rounds": 150} if stage == "lns" else {}), **options}
    made: Partitions = cls(cls.Config(**options), env).run(trie)
    made.verify()
    return made


def planned(made: Partitions) -> StepPlan:
    step = Slots(Slots.Config()).run(made).step
    step.verify()
    return step


@pytest.mark.parametrize("objective", ["paper", "critical"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_candidate_is_a_partition(stage: str, objective: str) -> None:
    made = 0
    for name, rng, trie in tries(range(12)):
        capacity = rng.choice((None, some_capacity(rng, trie)))
        replicas = rng.randint(1, min(3, len(trie.order)))
        try:
            found = partition(trie, stage, capacity=capacity, replicas=replicas, objective=objective)
        except PlanError as error:
            assert "found no way" in str(error), name
            assert len(trie.order) % replicas, name  # one trajectory a microbatch is legal otherwise
            continue
        made += 1
        for label in found.microbatch:
            assert_partition(trie, label, capacity, replicas)
    assert made > 90


@pytest.mark.parametrize("stage", ["paper", *STAGES])
@pytest.mark.parametrize("objective", ["paper", "critical"])
def test_no_plan_is_worse_than_one_of_another_stage(stage: str, objective: str) -> None:
    for name, rng, trie in tries(range(12)):
        options = {"capacity": some_capacity(rng, trie), "replicas": rng.randint(1, 2), "objective": objective}
        try:
            other = planned(partition(trie, stage, **options))
        except PlanError:
            continue
        ours = planned(partition(trie, **options))
        scores = [ranked(tuple(step.scores[step.chosen].tolist()), objective) for step in (ours, other)]
        assert scores[0] <= scores[1], name


DEGENERATE = {
    "no sharing": [[i + 1] * (3 + i % 5) for i in range(40)],
    "star": [[1] * 20 + [i + 2] * 4 for i in range(40)],
    "caterpillar": [[1] * (5 * i + 1) + [2] * 3 for i in range(40)],
    "binary": [[1 + (i >> b & 1) for b in (4, 3, 2, 1, 0) for _ in range(6)] for i in range(32)],
    "all equal": [[1, 2, 3]] * 40,
    "duplicates": [[i // 5 + 1] * 8 for i in range(40)],
    "nested prefixes": [[1] * (i + 1) for i in range(40)],
    "one trajectory": [[1, 2, 3]],
    "one token each": [[i + 1] for i in range(40)],
}


@pytest.mark.parametrize("shape", DEGENERATE)
@pytest.mark.parametrize("stage", STAGES)
def test_degenerate_steps(stage: str, shape: str) -> None:
    trie = trie_of(DEGENERATE[shape])
    longest = int(trie.length.max())
    for capacity in (longest, longest + 1, 2 * longest, trie.compact_tokens, None):
        for replicas in (1, 2, 4):
            if len(trie.order) < replicas:
                with pytest.raises(PlanError, match=f"1 trajectory cannot fill {replicas} replicas"):
                    partition(trie, stage, capacity=capacity, replicas=replicas)
                continue
            found = partition(trie, stage, capacity=capacity, replicas=replicas)
            for label in found.microbatch:
                assert_partition(trie, label, capacity, replicas)


def test_a_step_that_fits_into_one_microbatch_is_proven_optimal() -> None:
    step = planned(partition(trie_of(DEGENERATE["star"]), capacity=1000))
    assert (step.slots, step.lower_bound, step.optimal) == (1, 180, True)
    assert step.total_gap == step.slot_critical_gap == 0.0


def test_a_microbatch_too_many_shows_as_a_gap() -> None:
    trie = trie_of([[1] * 6 + [i + 2] * 2 for i in range(4)])  # 14 tokens; two microbatches compute the prefix twice
    step = planned(partition(trie, capacity=10))
    assert (int(step.work.sum()), step.lower_bound, step.optimal) == (20, 20, True)
    step = planned(partition(trie, stage="contiguous", capacity=8))
    assert (int(step.work.sum()), step.lower_bound, step.optimal) == (32, 32, True)
    uneven = trie_of([[1] * 3, [2] * 4, [3] * 4])  # 11 tokens, of which a slot's heaviest are at least 6
    step = planned(partition(uneven, replicas=2))
    assert (step.optimal, step.slot_critical_work, step.slot_critical_bound) == (True, 7, 6)
    assert step.slot_critical_gap == pytest.approx(1 / 6)


def test_a_trajectory_over_the_capacity_is_named() -> None:
    for stage in STAGES:
        with pytest.raises(PlanError, match=r"test: trajectory 't1' has 9 tokens: more than the capacity of 8 compact"):
            partition(trie_of([[1] * 3, [1] * 9]), stage, capacity=8)


def test_what_the_papers_search_refuses_is_searched_all_the_same() -> None:
    """Steps that only few partitions serve."""
    refused = served = possible = 0
    for seed in range(400):
        rng = random.Random(seed)
        trie = trie_of([[i + 1] * rng.randint(1, 9) for i in range(rng.choice((5, 7)))])
        options = {"capacity": max(9, int(trie.length.max())), "replicas": 2}
        try:
            partition(trie, "paper", **options)
            continue
        except PlanError:
            refused += 1
        length = trie.length
        possible += any(
            (max(label) + 1) % 2 == 0 and max(np.bincount(label, weights=length)) <= options["capacity"]
            for label in partitions_of(len(length))
        )
        try:
            found = partition(trie, **options)
        except PlanError:
            continue
        served += 1
        for label in found.microbatch:
            assert_partition(trie, label, options["capacity"], 2)
    assert refused > 0
    assert served == possible


def test_slots_come_in_multiples() -> None:
    trie = trie_of(shapes(random.Random(3))["star"] + [[9] * 5, [8] * 4, [7] * 3, [6] * 3, [5] * 2, [4] * 2])
    found = partition(trie, capacity=int(trie.length.max()) + 4, replicas=2, slot_multiple=2)
    for label in found.microbatch:
        assert_partition(trie, label, found.capacity, 4)


def middle() -> CompactTrie:
    rng = random.Random(0)
    return trie_of(
        [[1] * 3 + [2 + i // 8] * (20 + i // 8) + [30 + i // 2] * rng.randint(1, 40) + [99 + i] for i in range(120)]
    )


def test_rounds_give_the_same_partition_on_every_machine() -> None:
    """A digest kept here: a change of the search changes it, a machine must not."""
    found = partition(middle(), capacity=150, replicas=4, objective="critical", rounds=400)
    label = found.microbatch[found.names.index("searched 1")]
    assert hashlib.sha256(label.astype("<i4").tobytes()).hexdigest()[:16] == "cd6cd3a43959491b"


def test_seeds_differ_and_more_rounds_are_not_worse() -> None:
    trie = middle()
    options = {"capacity": 150, "replicas": 2, "objective": "paper"}
    works = [int(planned(partition(trie, rounds=rounds, **options)).work.sum()) for rounds in (0, 100, 2000)]
    assert works[0] >= works[1] >= works[2]
    labels = [partition(trie, seed=seed, **options).microbatch for seed in (0, 0, 1)]
    assert np.array_equal(labels[0], labels[1])
    assert not np.array_equal(labels[0], labels[2])


def test_seconds_end_the_stage() -> None:
    trie = middle()
    partition(trie, capacity=150)  # compiled
    for seconds in (0.5, 2.5):
        began = time.perf_counter()
        found = partition(trie, capacity=150, replicas=2, rounds=10**9, seconds=seconds)
        assert 0.8 * seconds < time.perf_counter() - began < seconds + 1.5  # a busy machine may be late
        assert any(name.startswith("searched") for name in found.names)


def test_compiling_first_takes_nothing_from_the_seconds() -> None:
    """All that a search calls is compiled by then, for the types that it calls it with."""
    program = (
        "from harts.stages.partition.lns import compile_search; from harts.stages.partition.search import drive;"
        "compile_search(); from tests.stages.partition.test_lns import middle, partition;"
        "kept = [drive.rebuild, drive.balance, drive.begin, drive.forks];"
        "before = [len(each.signatures) for each in kept]; partition(middle(), capacity=150, replicas=4);"
        "print(before == [len(each.signatures) for each in kept], min(before))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == ["True", "1"]


def test_without_compilation_the_partition_is_the_same() -> None:
    """Ties are broken by order, never by how one machine sorts."""
    program = (
        "from tests.stages.partition.test_lns import few, partition;"
        "print(partition(few(), capacity=60, replicas=2, rounds=40).microbatch.tolist())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, "NUMBA_DISABLE_JIT": switch},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
        for switch in ("0", "1")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 100


def few() -> CompactTrie:
    """Many equal costs."""
    return trie_of([[1] * 3 + [2 + i // 4] * 8 + [30 + i] * (4 + i % 3) for i in range(32)])


def test_a_model_in_which_nothing_costs_anything_is_searched() -> None:
    class Free(WorkModel):
        unit = "nothing"

        def tables(self, longest: int) -> WorkTables:
            nothing = np.zeros(longest + 1, dtype=np.int64)
            return WorkTables(nothing, nothing)

    found = partition(few(), env=Free(Free.Config()), capacity=60, replicas=2)
    assert set(found.cost.tolist()) == {0}


def test_costs_that_64_bits_cannot_add_are_refused() -> None:
    class Dear(WorkModel):
        unit = "ns"

        def tables(self, longest: int) -> WorkTables:
            depth = np.arange(longest + 1, dtype=np.int64)
            return WorkTables(depth << 48, 0 * depth)

    with pytest.raises(PlanError, match=r"test: costs may add up to \S+ ns: too large to search"):
        partition(few(), env=Dear(Dear.Config()), capacity=60)


def test_even_intervals_use_the_room_that_a_legal_number_leaves() -> None:
    trie = trie_of([[i + 1] * 10 for i in range(12)])
    found = partition(trie, "contiguous", capacity=None, replicas=4)
    assert found.names == ("intervals", "even intervals")
    assert found.work(1).tolist() == [30, 30, 30, 30]
    assert planned(found).slot_critical_gap == 0.0


class Steep(WorkModel):
    """Deep positions cost more, and so do forks."""

    unit = "steps"

    def tables(self, longest: int) -> WorkTables:
        depth = np.arange(longest + 1, dtype=np.int64)
        fork: Int64 = np.where(depth > 0, 7, 0)
        return WorkTables(depth * depth, fork)


def test_another_work_model_is_what_the_search_lowers_and_slots_are_balanced_in() -> None:
    trie = middle()
    model = Steep(Steep.Config())
    options = {"capacity": 150, "replicas": 4, "objective": "critical", "rounds": 600}
    ours, plain = partition(trie, env=model, **options), partition(trie, **options)
    step = planned(ours)
    assert step.unit == "steps"
    assert (step.cost != step.work).any()
    by_slot = step.cost.reshape(-1, 4)
    assert (by_slot[:-1].min(axis=1) >= by_slot[1:].max(axis=1)).all()
    rated = Partitions(**{**vars(plain), "unit": model.unit, "cost": costs_of(plain, model)})
    assert step.scores[step.chosen, 1] < planned(rated).scores[:, 1].min()


def costs_of(made: Partitions, model: WorkModel) -> Int64:
    """Of candidates that were searched with another model."""
    index = made.trie.index
    costs = []
    for candidate in range(len(made.names)):
        for members in made.members(candidate):
            lcp = np.concatenate(([0], index.neighbours(members[:-1], members[1:])))
            costs.append(int(model.costs(index.length[members], lcp, np.array([0]))[0]))
    return np.array(costs, dtype=np.int64)


def test_real_step_is_near_its_bound() -> None:
    path = shared_data() / "medium/swe_step.jsonl.gz"
    trie = Jsonl(Jsonl.Config(path=path)).run(None)
    options = {"capacity": 65536, "replicas": 4, "objective": "critical"}
    step = planned(partition(trie, rounds=3000, **options))
    papers = planned(partition(trie, "paper", **options))
    assert step.total_gap < 0.01
    assert step.slot_critical_gap < 0.013
    assert step.slot_critical_work < papers.slot_critical_work
