"""The numbers of a run. Results of training are read by their fields, so that planning alone needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from harts.ir import PerMicrobatch, SemanticOutputs
from harts.ir.base import as_numpy

if TYPE_CHECKING:
    from harts.train.compare import Comparison
    from harts.train.differences import Differences
    from harts.train.totals import StepResult


def steps_report(results: Iterable[StepResult]) -> list[dict[str, Any]]:
    """Loss and gradient norm of each step."""
    return [
        {
            "step": number,
            "loss": result.loss,
            "policy_loss": result.policy_loss,
            "router_z": result.router_z,
            "router_balance": result.router_balance,
            "gradient_norm": result.gradient_norm,
            "trained_tokens": result.trained_tokens,
            "seconds": round(result.seconds, 6),
        }
        for number, result in enumerate(results, 1)
    ]


def comparison_report(comparison: Comparison, ratio: float) -> dict[str, Any]:
    """How far compact and flat training are apart, and, if parity holds, how much faster compact training was.

    Args:
        comparison: of the two runs.
        ratio: S / C of the step.
    """
    compact, flat = comparison.seconds
    return {
        "with": "flat",
        "passed": comparison.passed,
        "tolerance": comparison.tolerance,
        "faults": comparison.faults,
        "steps": [_differences(number, each) for number, each in enumerate(comparison.steps, 1)],
        "seconds": {"compact": round(compact, 6), "flat": round(flat, 6)},
        "time_ratio": comparison.time_ratio,
        "row_ratio": comparison.compression,
        "sharing_ratio": ratio,
    }


def _differences(number: int, each: Differences) -> dict[str, Any]:
    parameter, gradient = each.worst_gradient
    return {
        "step": number,
        "logprobs": each.logprobs,
        "entropy": each.entropy,
        "loss": each.loss,
        "router": each.router,
        "gradient": gradient,
        "gradient_parameter": parameter,
        "equal_load": each.equal_load,
    }


def logprob_report(restored: PerMicrobatch[SemanticOutputs]) -> dict[str, Any]:
    """Statistics of the restored log-probs of all microbatches, in nats."""
    found = {"logprobs": _statistics([item.logprobs for item in restored.items])}
    entropies = [item.entropy for item in restored.items if item.entropy is not None]
    if entropies:
        found["entropy"] = _statistics(entropies)
    return found


def _statistics(parts: list[Any]) -> dict[str, Any]:
    values = np.concatenate([as_numpy(part).astype(np.float64) for part in parts])
    if not values.size:
        return {"count": 0}
    return {
        "count": int(values.size),
        "mean": float(values.mean()),
        "min": float(values.min()),
        "max": float(values.max()),
    }
