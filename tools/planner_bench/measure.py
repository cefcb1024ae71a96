"""Plan one step with one planner in a process of its own, and measure it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harts.errors import HartsError
from harts.ir import Columns, CompactTrie, Partitions, RolloutBatch, StepPlan
from harts.ir.base import Int64
from harts.ir.prefix_tree import prefix_tree, volume_bound
from harts.registry import resolve
from harts.report.plan import imbalance
from harts.stages.ingest.trie import build_trie
from harts.stages.schedule.slots import Slots, assign, ranked
from planner_bench.steps import Step, load
from planner_bench.verify import Plan, verify


class Job(NamedTuple):
    """One step and one planner."""

    step: Step
    folder: Path
    setting: str
    partition: dict[str, Any] | None
    """Type and values of a partition stage, without capacity and replicas; None is the OR-Tools baseline."""
    or_seconds: float
    """Time limit of the baseline's solver, a task tree."""
    capacity: int
    replicas: int
    repeat: int
    """Times to plan; the fastest counts."""


class Timed(NamedTuple):
    """A plan and the seconds of its parts."""

    plan: Plan
    trie: float
    partition: float
    slots: float
    trees: float
    """The whole schedule stage, which makes the segment trees of all microbatches."""
    rss: int
    """Peak memory of the process before the segment trees, KiB."""


def warm_up(job: Job) -> None:
    """Plan a small step, so that what is compiled is in the compiler's cache."""
    with suppress(HartsError):  # which is then the job's own result
        _planner(job)(_small_step(), job)


def measure(job: Job) -> dict[str, Any]:
    """Figures of one verified plan; only `error` beside the job's names if the planner refuses.

    What is compiled is loaded from the compiler's cache by planning a small step first: that is not counted.

    Raises:
        PlanFaultError: the plan is not what it says.
    """
    named = job.step._asdict() | {"setting": job.setting, "replicas": job.replicas}
    warm_up(job)
    batch = load(job.folder)
    try:
        runs = [_planner(job)(batch, job) for _ in range(job.repeat)]
    except HartsError as error:
        return named | {"error": str(error)}
    best = min(runs, key=lambda run: run.trie + run.partition + run.slots)
    columns = batch.columns
    verify(batch.tokens, columns.offset, best.plan, job.capacity)
    return named | {"trajectories": len(columns)} | _figures(build_trie(batch), best, job)


def _figures(trie: CompactTrie, run: Timed, job: Job) -> dict[str, Any]:
    work = run.plan.work
    bound = volume_bound(prefix_tree(trie.length, trie.lcp), job.capacity, job.replicas)
    critical_bound = -(-bound // job.replicas)
    total, critical = int(work.sum()), int(work.max(axis=1).sum())
    seconds = {"trie": run.trie, "partition": run.partition, "slots": run.slots}
    return {
        "semantic_tokens": trie.semantic_tokens,
        "compact_tokens": trie.compact_tokens,
        "bound": bound,
        "total": total,
        "total_gap": total / bound - 1,
        "slot_critical": critical,
        "slot_critical_gap": critical / critical_bound - 1,
        "slots": len(work),
        "slot_imbalance": imbalance(work).tolist(),
        "step_imbalance": float(imbalance(work.sum(axis=0, keepdims=True))[0]),
        "seconds": seconds | {"plan": sum(seconds.values()), "schedule_stage": run.trees},
        "peak_mb": run.rss // 1024,
    }


def _planner(job: Job) -> Callable[[RolloutBatch, Job], Timed]:
    return _baseline if job.partition is None else _stages


def _stages(batch: RolloutBatch, job: Job) -> Timed:
    """Ingest, partition and schedule of the package."""
    assert job.partition is not None
    values = dict(job.partition)
    kind = resolve("partition", values.pop("type"))
    limits = {"capacity": job.capacity, "replicas": job.replicas}
    stage = kind(kind.Config(**limits | values))
    clock = [time.perf_counter()]
    trie = build_trie(batch)
    clock.append(time.perf_counter())
    partitions = stage.run(trie)
    clock.append(time.perf_counter())
    _best_score(partitions)
    clock.append(time.perf_counter())
    rss = _peak()
    step = Slots(Slots.Config()).run(partitions).step
    clock.append(time.perf_counter())
    return Timed(_plan_of(step), *np.diff(clock).tolist(), rss)


def _best_score(partitions: Partitions) -> tuple[int, int, int]:
    """What the schedule stage does to choose a candidate and its slots."""
    scores = [assign(partitions.costs(i), partitions.replicas).score for i in range(len(partitions.names))]
    return min(ranked(score, partitions.objective) for score in scores)


def _plan_of(step: StepPlan) -> Plan:
    return Plan(step.microbatch.astype(np.int64), step.by_slot())


def _baseline(batch: RolloutBatch, job: Job) -> Timed:
    """The OR-Tools baseline, which chooses its slots itself."""
    from planner_bench.or_tools import or_tools_plan  # noqa: PLC0415  other planners' memory is without OR-Tools

    clock = [time.perf_counter()]
    trie = build_trie(batch)
    clock.append(time.perf_counter())
    plan = or_tools_plan(trie, job.capacity, job.replicas, job.or_seconds)
    clock.append(time.perf_counter())
    return Timed(plan, *np.diff(clock).tolist(), 0.0, 0.0, _peak())


def _peak() -> int:
    """KiB that this process has held at most: interpreter, libraries, tokens and all that planning took."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _small_step() -> RolloutBatch:
    """40 trees of 16 trajectories, 190,000 compact tokens: four microbatches and enough trajectories for every path."""
    rng = np.random.default_rng(0)
    trunks = [np.full(4_000, 1 + tree) for tree in range(40)]
    paths = [np.concatenate((trunk, rng.integers(50, 99, rng.integers(1, 90)))) for trunk in trunks for _ in range(16)]
    offset: Int64 = np.cumsum([0, *map(len, paths)], dtype=np.int64)
    group = np.repeat(np.arange(40, dtype=np.int32), 16)
    mask = np.ones(int(offset[-1]), dtype=np.bool_)
    columns = Columns(tuple(f"t{i}" for i in range(640)), tuple(f"g{i}" for i in range(40)), offset, group, mask)
    return RolloutBatch("small step", np.concatenate(paths).astype(np.int32), columns)
