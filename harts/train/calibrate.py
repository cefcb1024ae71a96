"""Measure what microbatches cost on a pipeline's device, and fit the coefficients of a calibrated work model."""

from __future__ import annotations

import math
import platform
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import torch

from harts.config import BACKEND_SECTIONS
from harts.errors import ConfigError, HartsError
from harts.ir import CompactLayout, CompactTrie, Partitions, PerMicrobatch, SemanticOutputs, StepPlan
from harts.ir.base import Bool, Float64
from harts.ir.codec import producer
from harts.ir.partitions import COMPACT_TOKENS
from harts.pipeline import Pipeline
from harts.registry import resolve
from harts.train.calibrate_shapes import LEAST, batch, held_out, specs
from harts.train.check import check_rollouts
from harts.train.objectives import LossTerms, Objective
from harts.work_models.counts import TERMS, counts
from harts.work_models.fit import fitted, relative_errors
from harts.work_models.table import Coefficients, FitError, Measured, Table

SEED = 0
"""Of shapes and tokens."""
CAPACITY_SHARE = 4
"""Capacity over rows of the largest microbatch, if rows are not given: measuring a full one many times takes long."""


class Measurement(NamedTuple):
    """The microbatches that were run."""

    counts: Float64
    """How often each of `TERMS` occurs, [M, 6]."""
    nanoseconds: Float64
    """Fastest forward and backward, [M]."""
    held_out: Bool
    """Which judge the fit, [M]."""


def calibrate(pipeline: Pipeline, repeats: int, rows: int | None = None) -> Table:
    """Measure and fit.

    Args:
        pipeline: its model, backends, device, objective (`sft` without a `train` section) and planning stages are used.
        repeats: runs of each microbatch, after one to warm up.
        rows: compact rows of the largest microbatch; None is a quarter of `partition.capacity`.

    Raises:
        ConfigError: the rows are too few or too many, or there is no capacity to take them from.
        HartsError: a loss is not finite.
    """
    measured = measure(pipeline, layouts(pipeline, largest(pipeline, rows)), repeats)
    seen = ~measured.held_out
    found = fitted(measured.counts[seen], measured.nanoseconds[seen])
    coefficients = [float(f"{value:.6g}") for value in found]
    unseen = measured.counts[measured.held_out], measured.nanoseconds[measured.held_out]
    errors = relative_errors(*unseen, np.array(coefficients))
    return Table(
        coefficients=Coefficients(**dict(zip(TERMS, coefficients, strict=True))),
        error=FitError(
            microbatches=len(errors),
            median=round(float(np.median(errors)), 4),
            maximum=round(float(errors.max()), 4),
        ),
        measured=_about(pipeline, measured, repeats),
    )


def largest(pipeline: Pipeline, rows: int | None) -> int:
    """Compact rows of the largest microbatch."""
    path = pipeline.settings.path
    capacity: int | None = getattr(pipeline.settings.components["partition"].config, "capacity", None)
    if rows is None and capacity is None:
        raise ConfigError(f"{path}: partition.capacity: sets no limit, so --rows must say what to measure up to")
    wanted = rows if rows is not None else (capacity or 0) // CAPACITY_SHARE
    if capacity is not None and wanted > capacity:
        raise ConfigError(f"--rows: is {wanted}, but {path}: partition.capacity is {capacity}")
    if wanted < LEAST:
        source = "--rows" if rows is not None else f"{path}: partition.capacity / {CAPACITY_SHARE}"
        raise ConfigError(f"{source}: is {wanted}; the largest microbatch needs {LEAST} rows at least")
    return wanted


def layouts(pipeline: Pipeline, rows: int) -> PerMicrobatch[CompactLayout]:
    """Synthetic microbatches of at most `rows` compact rows, planned by the stages of the pipeline, in any order."""
    rng = np.random.default_rng(SEED)
    vocabulary = pipeline.env.model.vocabulary
    rollouts = batch(specs(rows, chunk_size_of(pipeline), vocabulary, rng), vocabulary, rng)
    ingest = resolve("ingest", "batch")
    trie: CompactTrie = ingest(ingest.Config()).run(rollouts)
    microbatch = rollouts.columns.group[trie.order]
    members = [np.flatnonzero(microbatch == k) for k in range(len(rollouts.columns.groups))]
    partitions = Partitions(
        trie=trie,
        capacity=rows,
        replicas=1,
        objective="paper",
        lower_bound=trie.compact_tokens,
        unit=COMPACT_TOKENS,
        names=("synthetic",),
        microbatch=microbatch[None],
        cost=np.array([trie.index.set_work(each) for each in members], dtype=np.int64),
    )
    made = pipeline.resume(partitions, until="layout")
    assert isinstance(made, PerMicrobatch)
    return made


def chunk_size_of(pipeline: Pipeline) -> int:
    """Tokens of a linear-attention chunk, as the call plan has them."""
    config: Any = pipeline.settings.components["call_plan"].config
    return int(config.chunk_size)


def measure(pipeline: Pipeline, planned: PerMicrobatch[CompactLayout], repeats: int) -> Measurement:
    """Run every microbatch forward and backward once to warm up, then all of them `repeats` times over.

    Gradients are accumulated and never applied, as inside a step; they are gone afterwards.
    """
    execute, restore, objective = pipeline.stage("execute"), pipeline.stage("restore"), _objective(pipeline)
    check_rollouts(planned, objective, pipeline.env.model.vocabulary)
    module, device = pipeline.env.model.module, pipeline.env.device
    module.zero_grad(set_to_none=True)
    best = np.full(len(planned), np.inf)
    with pipeline.shown("calibrate", len(planned) * (repeats + 1)):
        for turn in range(repeats + 1):
            for index, layout in enumerate(planned.items):
                begin = _now(device)
                _forward_backward(restore.run(execute.run(layout)), objective, planned.step)
                if turn:
                    best[index] = min(best[index], _now(device) - begin)
                pipeline.advance()
    module.zero_grad(set_to_none=True)
    judges = np.array([held_out(int(layout.plan.tree.columns.group[0])) for layout in planned.items])
    return Measurement(np.stack([counts(layout) for layout in planned.items]), best, judges)


def _objective(pipeline: Pipeline) -> Objective:
    component = pipeline.settings.components.get("train.objective")
    cls = resolve("objectives", "sft") if component is None else component.cls
    built: Objective = cls(cls.Config() if component is None else component.config)
    return built


def _now(device: str) -> int:
    """Nanoseconds on a clock, once the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


def _forward_backward(restored: SemanticOutputs, objective: Objective, step: StepPlan) -> None:
    """The loss of one microbatch and its gradients; router losses join with some coefficient, which costs no time."""
    outputs = restored.outputs
    columns = outputs.layout.plan.tree.columns
    loss = objective.loss(LossTerms(restored.logprobs, restored.entropy, columns, step))
    for router in (outputs.router_z, outputs.router_balance):
        loss = loss if router is None else loss + router / step.semantic_tokens
    value = float(loss.detach())
    if not math.isfinite(value):
        raise HartsError(f"synthetic rollouts: {columns.groups[columns.group[0]]}: the loss is {value}")
    torch.autograd.backward(loss)


def _about(pipeline: Pipeline, measured: Measurement, repeats: int) -> Measured:
    components, env = pipeline.settings.components, pipeline.env
    seen = measured.counts[~measured.held_out]
    rows = seen[:, TERMS.index("row")]
    on_cuda = torch.device(env.device).type == "cuda"
    return Measured(
        sections={name: components[name].shown() for name in (*BACKEND_SECTIONS, "execute", "restore")},
        chunk_size=chunk_size_of(pipeline),
        dtype=str(env.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(env.device) if on_cuda else f"{env.device}, {platform.machine()}",
        torch=torch.__version__,
        harts=producer(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        microbatches=len(seen),
        rows=(int(rows.min()), int(rows.max())),
        rounds=int(seen[:, TERMS.index("round")].max()),
        repeats=repeats,
    )
