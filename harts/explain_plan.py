"""What a dumped plan says of itself: how near it is to what is possible, and which candidates it was chosen from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harts.errors import InputError
from harts.ir import StepPlan, Value


def step_of(value: Value) -> StepPlan:
    """The step plan that a value is, or was made from.

    Raises:
        InputError: it was made before the schedule stage.
    """
    held = [value]
    for each in held:
        if isinstance(each, StepPlan):
            return each
        held += each.parents()
    raise InputError(f"--from: a {value.kind} holds no plan; dump the edge of the schedule stage or a later one")


def explain_plan(step: StepPlan) -> dict[str, Any]:
    """Bounds, gaps and candidates; costs are in `unit`, work and bounds in compact tokens."""
    names = ("total", "slot_critical", "heaviest_replica")
    candidates = [
        {"name": name, "chosen": i == step.chosen, **dict(zip(names, score, strict=True))}
        for i, (name, score) in enumerate(zip(step.candidates, step.scores.tolist(), strict=True))
    ]
    return {
        "source": step.source,
        "work": int(step.work.sum()),
        "slot_critical_work": step.slot_critical_work,
        "lower_bound": step.lower_bound,
        "slot_critical_bound": step.slot_critical_bound,
        "total_gap": step.total_gap,
        "slot_critical_gap": step.slot_critical_gap,
        "optimal": step.optimal,
        "objective": step.objective,
        "unit": step.unit,
        "candidates": candidates,
    }


def render_plan(report: dict[str, Any]) -> str:
    """The text of it."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    proven = "optimal: no plan has less" if report["optimal"] else f"{report['total_gap']:.2%} above the bound"
    yield f"plan of {report['source']}"
    yield f"  work           {report['work']:>15,} compact tokens, {proven} of {report['lower_bound']:,}"
    above = f"{report['slot_critical_gap']:.2%} above the bound of {report['slot_critical_bound']:,}"
    yield f"  slots' heaviest{report['slot_critical_work']:>15,} compact tokens, {above}"
    yield f"  candidates, ranked after {report['objective']!r}, costs in {report['unit']}"
    yield f"    {'':<8}{'total':>18}{'slots heaviest':>18}{'heaviest replica':>18}  name"
    for each in report["candidates"]:
        mark = "chosen" if each["chosen"] else ""
        costs = "".join(f"{each[name]:>18,}" for name in ("total", "slot_critical", "heaviest_replica"))
        yield f"    {mark:<8}{costs}  {each['name']}"
