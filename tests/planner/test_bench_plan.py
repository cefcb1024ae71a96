"""The benchmark tells the truth: its figures, its refusals, and the paper's figures beside them."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from planner_bench import or_tools
from planner_bench.measure import Job, measure
from planner_bench.published import CAPACITY, TABLE2, TABLE3, Balance
from planner_bench.steps import Step, load, make
from planner_bench.summary import balance, summed
from planner_bench.tables import report
from planner_bench.verify import Plan, PlanFaultError, compact_tokens, verify

from harts.ir import RolloutBatch
from harts.stages.ingest.arrays import Arrays
from harts.stages.partition.paper import Paper
from harts.stages.schedule.slots import Slots
from tests.forests import batch_of
from tests.shared import shared_data
from tests.stages.partition.naive import compact_work, sorted_tokens, tries

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_plan.py"


def step_batch(seed: int = 0) -> RolloutBatch:
    """12 tasks of 8 trajectories, 700,000 compact tokens: several microbatches of the paper's capacity."""
    rng = random.Random(seed)
    paths, group = [], []
    for task in range(12):
        prompt = [task + 1] * rng.randint(9_000, 25_000)
        for answer in range(8):
            paths.append(prompt[: rng.randint(2_000, len(prompt))] + [50 + answer] * rng.randint(500, 12_000))
            group.append(task)
    return batch_of(paths, groups=tuple(f"g{i}" for i in range(12)), group=np.array(group, dtype=np.int32))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A cache in which the first two rows' steps lie already, small ones."""
    root = tmp_path_factory.mktemp("steps")
    for row in (1, 2):
        batch = step_batch(row)
        folder = root / f"table2_{row}_seed0"
        folder.mkdir()
        np.save(folder / "tokens.npy", batch.tokens)
        np.save(folder / "offset.npy", batch.columns.offset)
        np.save(folder / "loss_mask.npy", batch.columns.loss_mask)
        np.save(folder / "groups.npy", batch.columns.group.astype(np.int64))
    return root


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--cache", str(cache), "--shared", str(cache / "absent"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def job(cache: Path, setting: str, replicas: int = 2) -> Job:
    partition = None if setting == "or" else {"type": setting}
    return Job(
        Step("table2", "table2_1_seed0", 1, 0),
        cache / "table2_1_seed0",
        setting,
        partition,
        0.05,
        CAPACITY,
        replicas,
        2,
    )


def test_figures_are_those_of_the_plan(cache):
    trie = Arrays(Arrays.Config(path=cache / "table2_1_seed0")).run(None)
    plan = Slots(Slots.Config()).run(Paper(Paper.Config(capacity=CAPACITY, replicas=2)).run(trie)).step
    found = measure(job(cache, "paper"))
    assert found["total"] == plan.work.sum() == found["bound"] * (1 + found["total_gap"])
    assert found["bound"] == plan.lower_bound
    assert found["slot_critical"] == plan.slot_critical_work
    assert found["slot_critical_gap"] == plan.slot_critical_gap
    assert found["slots"] == plan.slots == len(found["slot_imbalance"]) > 1
    assert found["slot_imbalance"] == [max(pair) / (sum(pair) / 2) - 1 for pair in plan.by_slot().tolist()]
    assert found["trajectories"] == 96
    assert found["semantic_tokens"] == trie.semantic_tokens
    assert found["compact_tokens"] == trie.compact_tokens
    seconds = found["seconds"]
    assert seconds["plan"] == seconds["trie"] + seconds["partition"] + seconds["slots"] > 0
    assert found["peak_mb"] > trie.semantic_tokens * 5 / 2**20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan._replace(work=plan.work - 1), "compact tokens, not"),
        (lambda plan: plan._replace(work=plan.work[:-1]), "are planned"),
        (lambda plan: plan._replace(microbatch=np.zeros_like(plan.microbatch)), "are in 1 microbatches"),
        (lambda plan: plan._replace(microbatch=plan.microbatch[:-1]), "the step has 96"),
    ],
    ids=["work", "slots", "membership", "a trajectory is left out"],
)
def test_a_plan_that_does_not_verify_has_no_figures(cache, monkeypatch, change, message):
    honest = or_tools.or_tools_plan
    monkeypatch.setattr(or_tools, "or_tools_plan", lambda *arguments: change(honest(*arguments)))
    with pytest.raises(PlanFaultError, match=message):
        measure(job(cache, "or"))


def test_a_microbatch_above_the_capacity_does_not_verify():
    batch = batch_of([[1, 2, 3], [1, 2, 4]])
    plan = Plan(np.array([0, 0]), np.array([[4]]))
    verify(batch.tokens, batch.columns.offset, plan, capacity=4)
    with pytest.raises(PlanFaultError, match="4 compact tokens are above the capacity of 3"):
        verify(batch.tokens, batch.columns.offset, plan, capacity=3)


def test_independent_work_equals_unique_prefixes():
    for name, _, trie in tries(range(10)):
        paths = [np.array(path, dtype=np.int32) for path in sorted_tokens(trie)]
        assert compact_tokens(paths[::-1]) == compact_work(sorted_tokens(trie)), name
    wide = [np.array(path, dtype=np.int32) for path in ([255], [256], [256, 1], [2**31 - 1], [256, 1])]
    assert compact_tokens(wide) == 4


def test_json_is_one_object_with_every_result(cache):
    done = run(cache, "--json", "--rows", "1", "2", "--replicas", "2", "--settings", "paper", "--or-seconds", "0.05")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    keys = {(result["step"], result["setting"], result["replicas"]) for result in told["results"]}
    assert keys == {(f"table2_{row}_seed0", "paper", 2) for row in (1, 2)}
    assert told["or_seconds"] == 0.05
    for summary in told["summaries"]:
        of = [r for r in told["results"] if (r["setting"], r["replicas"]) == (summary["setting"], summary["replicas"])]
        assert summary["steps"] == len(of) == 2
        assert summary["total"] == sum(result["total"] for result in of) >= summary["bound"]
    assert told["published"]["table3"]["4"]["HARTS"]["slots"] == 301


def test_tables_show_the_papers_figures_and_ours(cache):
    done = run(cache, "--rows", "1", "--replicas", "4", "2", "--settings", "paper")
    assert done.returncode == 0, done.stderr
    total = measure(job(cache, "paper", replicas=4))["total"]
    assert "D = 4" in done.stdout
    assert "D = 2" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("table2_1_seed0"))
    assert row.split()[0:2] == ["table2_1_seed0", "96"]
    assert row.split()[-1] == f"{total:,}"
    assert {"7,780,586", "8,058,974", "1.0358", "9.73"} <= set(row.split())
    assert "34.6410" in done.stdout


def test_without_shared_data_it_says_so(cache):
    done = run(cache, "--rows", "3")
    assert done.returncode == 1
    assert "table2_3_seed0: skipped: needs" in done.stderr
    assert "gen_claude_like.py, which is not there" in done.stderr
    assert done.stdout == ""


def test_without_real_sets_it_says_so(cache):
    done = run(cache, "--data", "real")
    assert done.returncode == 1
    assert "real: skipped: no sets in" in done.stderr


def test_a_planner_that_refuses_is_reported_beside_the_others(cache):
    refused = measure(job(cache, "or", replicas=13))
    assert "12 task trees cannot go to 13 replicas" in refused["error"]
    text = report([measure(job(cache, "paper", replicas=13)), refused])
    assert "table2_1_seed0, or, D = 13: not measured: table2_1_seed0: 12 task trees" in text


def test_balance_pools_slots_and_sums_ask_all_steps():
    one = {"slot_imbalance": [0.0, 0.1], "step_imbalance": 0.01, "slots": 2}
    two = {"slot_imbalance": [0.2], "step_imbalance": 0.03, "slots": 1}
    assert balance([one, two]) == pytest.approx(Balance(3, 10.0, 19.0, 2.0, 3.0))
    more = {"seconds": {"plan": 2.0}, "peak_mb": 7, "replicas": 2}
    total = summed(
        [
            one | more | {"total": 110, "bound": 100, "slot_critical": 60},
            two | more | {"total": 300, "bound": 300, "slot_critical": 150, "seconds": {"plan": 4.0}, "peak_mb": 5},
        ]
    )
    assert total["total_gap"] == pytest.approx(0.025)
    assert total["slot_critical_gap"] == pytest.approx(0.05)
    assert (total["seconds_median"], total["seconds_max"], total["peak_mb"]) == (3.0, 4.0, 7)


def test_published_sums_are_the_papers():
    assert sum(row.harts for row in TABLE2) == 77_581_958
    assert sum(row.or_tools for row in TABLE2) == 80_213_867
    assert max(row.or_tools / row.harts for row in TABLE2) == pytest.approx(1.079273, abs=1e-6)
    assert TABLE3[2]["OR-Tools"].slots == 614


def test_published_rows_are_the_generators():
    path = shared_data() / "tools" / "gen_claude_like.py"
    spec = importlib.util.spec_from_file_location("gen_claude_like", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert tuple(tuple(row[:4]) for row in TABLE2) == module.TABLE2


def test_a_real_set_is_planned_from_the_shared_data(tmp_path):
    shared = shared_data()
    folder = make(Step("real", "toolbench_leaf"), shared, tmp_path)
    batch = load(folder)
    assert (len(batch.columns), len(batch.tokens), len(batch.columns.groups)) == (156, 384_691, 15)
    Arrays(Arrays.Config(path=folder)).run(None).verify()
    found = measure(Job(Step("real", "toolbench_leaf"), folder, "or", None, 0.05, CAPACITY, 4, 1))
    assert found["compact_tokens"] == 68_804 <= found["bound"] <= found["total"]
