"""One workload: plan, parity, times, memory, and what the requirements say of them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harts.backends.base import LinearAttention
from harts.backends.plan_tensors import build_plan_tensors
from linear_bench.candidates import Candidate, Problem, depth, expand, flat, operator, plain
from linear_bench.fla_call import fla_call
from linear_bench.inputs import Shape, leaves, upstream
from linear_bench.parity import Limits, Operators, Parity, check
from linear_bench.projections import projections
from linear_bench.requirements import ratios, requirements
from linear_bench.timing import peak_bytes, time_all
from linear_bench.trajectories import groups
from linear_bench.workloads import Workload, workload

BASELINES = ("plain", "plain_one", "plain_flat_lengths", "expand", "depth", "flat")
SAME = 0.02
"""Largest relative difference of a baseline's outputs from ours: more is another function, not rounding."""


class Settings(NamedTuple):
    """What holds for all workloads."""

    shape: Shape
    safe_gate: bool
    limits: Limits
    baselines: tuple[str, ...]
    repeats: int
    rows_per_call: int
    seed: int
    shared: Path
    scale: float


def measure(name: str, operators: Operators, settings: Settings) -> dict[str, Any]:
    """Figures of one workload; without times and memory where parity does not hold.

    Raises:
        FileNotFoundError: it needs the shared data, which is not there.
    """
    planned = workload(name, settings.shared, settings.seed, settings.scale)
    problem = _problem(planned, settings)
    parity = check(problem, operators, settings.limits, settings.seed + 2)
    told = {"workload": name, "plan": planned.figures(), "parity": parity._asdict()}
    if parity.faults:
        return told
    _free(settings.shape)
    candidates = _candidates(problem, operators, settings)
    differences = {each.name: _difference(each, problem, operators.fused) for each in candidates}
    faults = [f"{each}: outputs differ from ours by {x:.2e}" for each, x in differences.items() if not x <= SAME]
    if faults:
        return told | {"parity": Parity(faults, parity.errors)._asdict()}
    times = {each: x.summary() for each, x in time_all(candidates, settings.repeats, settings.shape.device).items()}
    told |= {
        "differences": differences,
        "times_ms": times,
        "calls": {each.name: len(each.parts) for each in candidates},
    }
    memory = _memory(candidates, problem)
    found = ratios(times, planned.compression, memory)
    return told | {"memory_bytes": memory, "ratios": found, "requirements": requirements(name, found)}


def _problem(planned: Workload, settings: Settings) -> Problem:
    shape, rows = settings.shape, planned.rows
    return Problem(
        planned,
        shape,
        build_plan_tensors(planned.layout, shape.device, torch.float32),
        leaves(shape, rows, settings.seed),
        upstream(shape, rows, settings.seed + 1),
        list(groups(planned, settings.rows_per_call, shape.device)),
    )


def _candidates(problem: Problem, operators: Operators, settings: Settings) -> list[Candidate]:
    found = [operator(problem, name, each) for name, each in operators._asdict().items() if each is not None]
    if settings.baselines:
        call = fla_call(settings.shape.rule, settings.safe_gate)
        made = {"expand": expand, "depth": depth, "flat": flat}
        found += [
            made[name](problem, call) if name in made else plain(problem, name, call) for name in settings.baselines
        ]
    return [*found, projections(settings.shape, problem.workload.rows, settings.seed)]


def _difference(candidate: Candidate, problem: Problem, fused: LinearAttention) -> float:
    """Of a candidate's outputs from ours, relative, the largest of its parts; 0 if it computes something else."""
    found = [0.0]
    with torch.no_grad():
        ours = fused.mix(problem.leaves, problem.plan)
        for part in candidate.parts:
            if part.compact_row is None or not len(part.compact_row):
                continue
            theirs = part.run(part.leaves)
            assert isinstance(theirs, Tensor)
            wanted = ours.index_select(0, part.compact_row).float()
            found.append(float((theirs.float() - wanted).norm() / wanted.norm()))
    return max(found)


def _memory(candidates: list[Candidate], problem: Problem) -> dict[str, int]:
    """Bytes: the bank of requested states, and on a GPU the peaks of the operator and of the plain call."""
    shape = problem.shape
    found = {"bank": problem.plan.num_states * shape.value_heads * shape.key_dim * shape.value_dim * 4}
    if torch.device(shape.device).type == "cuda":
        found |= {
            each.name: peak_bytes(each)
            for each in candidates
            if each.name in {"fused", "rounds", "recomputed", "plain"}
        }
    return found


def _free(shape: Shape) -> None:
    gc.collect()
    if torch.device(shape.device).type == "cuda":
        torch.cuda.empty_cache()
