"""Predicted time: exact in its counts, monotone in its tables; what a table file may hold."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

import harts
from harts.errors import ConfigError
from harts.stages.call_plan.min_call import MinCall
from harts.stages.layout.round_major import RoundMajor
from harts.stages.schedule.segments import segment_tree
from harts.work_models.counts import TERMS
from harts.work_models.table import read_table
from tests.forests import random_trajectories, trie_of
from tests.work_models.tables import COEFFICIENTS, model_of, table_of, written

CHUNK = 8
PLAN_ONLY = Path(__file__).resolve().parents[2] / "pipelines" / "plan_only.yaml"


def laid_out(trie, members):
    plan = MinCall(MinCall.Config(chunk_size=CHUNK)).run(segment_tree(trie, members))
    return RoundMajor(RoundMajor.Config(conv_width=4)).run(plan)


def naive_counts(layout):
    """One microbatch, row by row and sequence by sequence."""
    plan = layout.plan
    return {
        "fixed": 1,
        "row": sum(plan.tree.length.tolist()),
        "replay_row": sum(plan.replay.tolist()),
        "pair": sum(position + 1 for position in layout.position_ids[: layout.rows].tolist()),
        "state": sum(source >= 0 for source in plan.initial_state.tolist()),
        "round": plan.rounds,
    }


def naive_cost(layout, terms=TERMS):
    found = naive_counts(layout)
    return sum(int(COEFFICIENTS[term]) * found[term] for term in terms)


def parts(trie, members):
    lcp = np.concatenate(([0], trie.index.neighbours(members[:-1], members[1:])))
    return trie.length[members], lcp


def table_cost(tables, length, lcp):
    """By the definition of `WorkTables`."""
    total = 0
    for i, (size, shared) in enumerate(zip(length.tolist(), lcp.tolist(), strict=True)):
        total += int(tables.along[size] - tables.along[shared])
        total += int(tables.fork[shared]) if shared < (length[i - 1] if i else 0) else 0
    return total


@pytest.mark.parametrize("seed", range(100))
def test_cost_is_that_of_the_counts_of_the_laid_out_microbatch(seed, tmp_path):
    rng = random.Random(seed)
    model = model_of(tmp_path, CHUNK)
    trie = trie_of(random_trajectories(rng, CHUNK, roots=rng.randint(1, 3), forks=rng.randint(0, 9)))
    members = np.array(sorted(rng.sample(range(len(trie.order)), rng.randint(1, len(trie.order)))))
    layout = laid_out(trie, members)
    length, lcp = parts(trie, members)
    assert model.costs(length, lcp, np.array([0])).tolist() == [naive_cost(layout)]
    searched = table_cost(model.tables(int(length.max())), length, lcp)
    assert searched == naive_cost(layout, ("row", "replay_row", "pair", "state"))


@pytest.mark.parametrize("seed", range(50))
def test_one_more_trajectory_never_costs_less_in_the_tables(seed, tmp_path):
    rng = random.Random(seed)
    model = model_of(tmp_path, CHUNK, row=0.3, pair=0.017, replay_row=0.8, state=5.5)
    trie = trie_of(random_trajectories(rng, CHUNK, roots=2, forks=8))
    tables = model.tables(int(trie.length.max()))
    order = rng.sample(range(len(trie.order)), len(trie.order))
    before = 0
    for count in range(1, len(order) + 1):
        now = table_cost(tables, *parts(trie, np.array(sorted(order[:count]))))
        assert now >= before
        before = now


def test_tables_are_whole_never_fall_and_are_free_at_the_top(tmp_path):
    along, fork = model_of(tmp_path, CHUNK, row=0.3, pair=0.017, replay_row=0.8, state=5.5).tables(1000)
    assert (along.dtype, fork.dtype) == (np.int64, np.int64)
    assert (along[0], fork[0]) == (0, 0)
    assert (np.diff(along) >= 0).all()
    assert (fork >= 0).all()
    assert along[1000] == round(0.3 * 1000 + 0.017 * 500_500)
    assert fork[CHUNK - 1] == round(0.8 * 7)  # the zero state is requested from nobody
    assert fork[CHUNK] == 6
    assert fork[CHUNK + 3] == round(0.8 * 3 + 5.5)


def test_plan_is_balanced_in_predicted_time(tmp_path):
    given = ["partition.capacity=8192", "partition.replicas=2"]
    named = f"work_model={{type: calibrated, table: {written(tmp_path)}, chunk_size: 64}}"
    layouts = harts.load(PLAN_ONLY, [*given, named], scope="plan").plan()
    assert layouts.step.unit == "ns"
    assert layouts.step.cost.tolist() == [naive_cost(layout) for layout in layouts.items]
    assert (np.diff(layouts.step.cost.reshape(-1, 2).max(axis=1)) <= 0).all()
    assert harts.load(PLAN_ONLY, given, scope="plan").plan().step.unit == "compact tokens"


def test_table_survives_its_file(tmp_path):
    assert read_table(written(tmp_path, row=0.1)) == table_of(row=0.1)


def test_missing_file_and_unknown_name_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match=r"table: .*absent\.json: cannot be read: No such file"):
        read_table(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="table: nothing_like_it is no shipped table; known: "):
        read_table("nothing_like_it")


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (lambda table: table["coefficients"].pop("pair"), "coefficients.pair: Field required"),
        (lambda table: table["coefficients"].update(row=-1), "coefficients.row: Input should be greater than or equal"),
        (lambda table: table["coefficients"].update(row=float("inf")), "coefficients.row: Input should be a finite"),
        (lambda table: table.update(unit="ms"), "unit: Input should be 'ns'"),
        (lambda table: table.update(version=2), "version: Input should be 1"),
        (lambda table: table.update(more=1), "more: Extra inputs are not permitted"),
    ],
)
def test_wrong_content_names_file_and_field(tmp_path, change, want):
    path = written(tmp_path)
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"table: {path}: {want}")


def test_file_that_is_no_json_is_one_message(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match=r"x\.json: Invalid JSON"):
        read_table(tmp_path / "x.json")
