"""The numbers of a plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from harts.ir import CompactLayout, PerMicrobatch, StepPlan
from harts.ir.base import Float64, Int64


def plan_report(layouts: PerMicrobatch[CompactLayout], seconds: dict[str, float]) -> dict[str, Any]:
    """Sharing, microbatches, balance, rounds and replay of a planned step.

    Args:
        layouts: the step.
        seconds: of each stage that ran.
    """
    step = layouts.step
    return {
        "source": step.source,
        "sharing": {
            "trajectories": len(step.microbatch),
            "trained_trajectories": step.trained_trajectories,
            "semantic_tokens": step.semantic_tokens,
            "trained_tokens": step.trained_tokens,
            "compact_tokens": step.compact_tokens,
            "ratio": step.semantic_tokens / step.compact_tokens,
        },
        "microbatches": _microbatches(step),
        "rounds": _rounds(layouts),
        "seconds": {stage: round(value, 6) for stage, value in seconds.items()},
    }


def _microbatches(step: StepPlan) -> dict[str, Any]:
    cost, critical, replica = (int(score) for score in step.scores[step.chosen])
    total = int(step.work.sum())
    by_slot = step.by_slot()
    cost_by_slot = step.cost.reshape(by_slot.shape)
    within = imbalance(cost_by_slot)
    return {
        "count": len(step.work),
        "slots": step.slots,
        "replicas": step.replicas,
        "capacity": step.capacity,
        "work": total,
        "work_over_compact": total / step.compact_tokens,
        "ratio": step.semantic_tokens / total,
        "slot_critical_work": step.slot_critical_work,
        "bound": {
            "total": step.lower_bound,
            "slot_critical": step.slot_critical_bound,
            "total_gap": step.total_gap,
            "slot_critical_gap": step.slot_critical_gap,
            "optimal": step.optimal,
        },
        "objective": {
            "ranked_by": step.objective,
            "unit": step.unit,
            "total": cost,
            "slot_critical": critical,
            "heaviest_replica": replica,
        },
        "heaviest": int(step.work.max()),
        "lightest": int(step.work.min()),
        "slot_imbalance": {
            "mean": float(within.mean()),
            "p50": float(np.percentile(within, 50)),
            "p95": float(np.percentile(within, 95)),
            "max": float(within.max()),
        },
        "step_imbalance": float(imbalance(cost_by_slot.sum(axis=0, keepdims=True))[0]),
        "work_by_slot": by_slot.tolist(),
        "candidate": step.candidates[step.chosen],
        "candidates": len(step.candidates),
    }


def imbalance(work: Int64) -> Float64:
    """Excess of the heaviest replica over the mean, equation (23): 0 is even; [slots] of [slots, D]."""
    return np.asarray(work.max(axis=1) / work.mean(axis=1) - 1)


def _rounds(layouts: PerMicrobatch[CompactLayout]) -> dict[str, Any]:
    plans = [layout.plan for layout in layouts.items]
    histogram = Counter(plan.rounds for plan in plans)
    rows = sum(layout.rows for layout in layouts.items)
    ancestors = sum(int(layout.ancestor_length.sum()) for layout in layouts.items)
    replay = sum(len(layout.replay_row) for layout in layouts.items)
    return {
        "chunk_size": plans[0].chunk_size,
        "max": max(histogram),
        "total": sum(plan.rounds for plan in plans),
        "histogram": {str(rounds): histogram[rounds] for rounds in sorted(histogram)},
        "segments": sum(len(plan.segment) for plan in plans),
        "input_sequences": sum(len(plan.anchor) for plan in plans),
        "replay_rows": replay,
        "replay_over_work": replay / rows,
        "requested_states": sum(len(plan.state_sequence) for plan in plans),
        "rows": rows,
        "padding_rows": sum(len(layout.input_ids) for layout in layouts.items) - rows,
        "key_value_rows": rows + ancestors,
    }
