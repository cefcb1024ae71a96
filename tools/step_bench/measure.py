"""One workload: planned for both sides, parity, times of interleaved repeats, and a breakdown."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from harts.errors import HartsError
from harts.ir import RolloutBatch
from harts.pipeline import Pipeline
from harts.train.agreement import agree
from step_bench.breakdown import breakdown
from step_bench.choice import chosen
from step_bench.communication import communication
from step_bench.models import Loaded
from step_bench.parity import parity, sampled
from step_bench.passes import TIMES, Clock, Pass, run
from step_bench.processes import PROCESSES
from step_bench.progress import Progress
from step_bench.requirements import ratios, requirements
from step_bench.steps import Cut, Planned, Side, cut, plan, repacked


class Settings(NamedTuple):
    """What holds for all workloads."""

    device: str
    microbatches: int | None
    """Of each replica of HARTS; None is the whole step."""
    parity: int
    """Of these, how many are compared."""
    samples: int
    """Positions whose logits are compared."""
    repeats: int
    breakdown: bool
    seed: int


def measure(name: str, batch: RolloutBatch, loaded: Loaded, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Everything that is told of a workload; no times if parity does not hold.

    Raises:
        HartsError: the step cannot be planned or computed.
    """
    pipeline = loaded.pipeline
    progress.tell(f"{name}: planning")
    planned = plan(pipeline, batch)
    replicas = pipeline.env.model.split.replicas
    if PROCESSES > 1:
        agree(planned.trees)
    members = chosen(planned.trees.items, settings.microbatches, replicas)
    made = cut(pipeline, planned, members, settings.seed, settings.device)
    told: dict[str, Any] = {
        "step": _step(planned),
        "cut": _cut(made),
        "planning_seconds": made.seconds,
        "sides": _sides(made, _all_positions(pipeline)),
    }
    progress.tell(f"{name}: parity")
    part = cut(pipeline, planned, members[: settings.parity * replicas], settings.seed, settings.device)
    told["parity"] = _parity(pipeline, planned, part, settings)
    if not told["parity"]["faults"]:
        told |= _timed(name, pipeline, made, settings, progress)
        clock = Clock(settings.device)
        if settings.breakdown:
            progress.tell(f"{name}: breakdown")
            told["breakdown"] = _breakdown(pipeline, part, loaded, clock)
        if PROCESSES > 1 and clock.cuda:
            progress.tell(f"{name}: communication")
            told["communication"] = {side.name: communication(pipeline, side) for side in (part.ours, part.flat)}
    told["ratios"] = ratios(told)
    told["requirements"] = requirements(name, told["ratios"])
    return told


def _parity(pipeline: Pipeline, planned: Planned, part: Cut, settings: Settings) -> dict[str, Any]:
    sample = sampled(planned.batch.columns.length, part.keys, settings.samples, settings.seed)
    found = parity(pipeline, part, repacked(pipeline, planned.batch, part), sample, settings.seed)
    return found | {"microbatches": len(part.ours.microbatches), "flat_microbatches": len(part.flat.microbatches)}


def _breakdown(pipeline: Pipeline, part: Cut, loaded: Loaded, clock: Clock) -> dict[str, Any]:
    seconds = {side.name: breakdown(pipeline, side, loaded.watch, clock) for side in (part.ours, part.flat)}
    return {"sides": _sides(part, _all_positions(pipeline)), "seconds": seconds}


def _timed(name: str, pipeline: Pipeline, made: Cut, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Both sides in turn, each repeat beginning with the other one; once before, when kernels meet their shapes."""
    clock = Clock(settings.device)
    sides, replicas = [made.ours, made.flat], pipeline.env.model.split.replicas
    found: dict[str, list[Pass]] = {}
    with _few_to_collect():
        for repeat in range(settings.repeats + 1):
            for side in sides if repeat % 2 else sides[::-1]:
                text = f"{name}: {f'repeat {repeat} of {settings.repeats}' if repeat else 'warming up'}, {side.name}"
                progress.tell(text)
                count = partial(progress.count, text, of=len(side.microbatches) // replicas)
                done = run(pipeline, side, clock, count)
                _check(done, side, name)
                if repeat:
                    found.setdefault(side.name, []).append(done)
    ours, flat = found["HARTS"][0].loss, found["flat"][0].loss
    return {
        "seconds": {side: summary(passes) for side, passes in found.items()},
        "microbatch_seconds": {side: [each.microbatches for each in passes] for side, passes in found.items()},
        "timed_loss_difference": abs(ours - flat) / abs(flat),
        "gradient_norm": {side: passes[0].norm for side, passes in found.items()},
        "slot_imbalance": {
            side: median(each.slot_imbalance for each in passes)
            for side, passes in found.items()
            if passes[0].slot_imbalance is not None
        },
        "memory_bytes": {side: passes[-1].memory._asdict() for side, passes in found.items() if passes[-1].memory},
    }


@contextmanager
def _few_to_collect() -> Iterator[None]:
    """Python's full collections look at what is made from here on alone: all modules would take a quarter of a second,
    in whichever pass they fall."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check(done: Pass, side: Side, name: str) -> None:
    if not abs(done.loss) + done.norm < float("inf"):
        raise HartsError(f"{name}: {side.name}: the loss is {done.loss}, the gradient's norm {done.norm}")


def summary(passes: Sequence[Pass]) -> dict[str, dict[str, float]]:
    """Median, least and most of each time."""
    found = {}
    for name in TIMES:
        seconds = [each.seconds[name] for each in passes]
        found[name] = {"median": median(seconds), "least": min(seconds), "most": max(seconds)}
    return found


def _step(planned: Planned) -> dict[str, Any]:
    step = planned.trees.step
    work = int(step.work.sum())
    return {
        "trajectories": len(step.microbatch),
        "semantic_tokens": step.semantic_tokens,
        "compact_tokens": work,
        "compression": step.semantic_tokens / work,
        "microbatches": len(step.work),
        "capacity": step.capacity,
        "planning_seconds": planned.seconds,
    }


def _cut(made: Cut) -> dict[str, Any]:
    return {
        "trajectories": len(made.keys),
        "semantic_tokens": made.flat.rows,
        "compact_tokens": made.ours.rows,
        "compression": made.compression,
        "trained_tokens": sum(len(each.trained) for each in made.ours.microbatches),
    }


def _all_positions(pipeline: Pipeline) -> bool:
    config: Any = pipeline.settings.components["restore"].config
    return bool(config.positions == "all")


def _sides(made: Cut, all_positions: bool) -> dict[str, Any]:
    return {side.name: _side(side, all_positions) for side in (made.ours, made.flat)}


def _side(side: Side, all_positions: bool) -> dict[str, Any]:
    plans = [each.layout.plan for each in side.microbatches]
    return {
        "microbatches": len(plans),
        "rows": side.rows,
        "padded_rows": side.padded_rows,
        "logit_rows": sum(each.logit_rows(all_positions=all_positions) for each in side.microbatches),
        "pairs": side.pairs,
        "replay_rows": sum(int(each.replay.sum()) for each in plans),
        "rounds": max(each.rounds for each in plans),
        "fullest": max(each.rows for each in side.microbatches),
    }
