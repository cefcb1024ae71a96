"""What the ten steps of one setting come to, in the measures of the paper's tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner_bench.published import Balance

Result = dict[str, Any]


class Group(NamedTuple):
    """Results of one kind of data, for one number of replicas."""

    data: str
    replicas: int
    results: list[Result]

    def settings(self) -> list[str]:
        """In the order measured."""
        return list(dict.fromkeys(result["setting"] for result in self.results))

    def steps(self) -> list[str]:
        """In the order measured."""
        return list(dict.fromkeys(result["step"] for result in self.results))

    def of(self, setting: str) -> list[Result]:
        """Measured results of one setting, without those that have none."""
        return [result for result in self.results if result["setting"] == setting and "error" not in result]

    def at(self, step: str, setting: str) -> Result:
        """One result, which may be an error."""
        return next(result for result in self.results if (result["step"], result["setting"]) == (step, setting))


def grouped(results: list[Result]) -> list[Group]:
    """By data, then replicas, in the order measured."""
    keys = dict.fromkeys((result["data"], result["replicas"]) for result in results)
    return [
        Group(
            data, replicas, [result for result in results if (result["data"], result["replicas"]) == (data, replicas)]
        )
        for data, replicas in keys
    ]


def balance(results: list[Result]) -> Balance:
    """The measures of Table 3: within slots pooled over all steps, of step totals a value a step; in percent."""
    within = 100 * np.concatenate([result["slot_imbalance"] for result in results])
    whole = 100 * np.array([result["step_imbalance"] for result in results])
    p50, p95 = np.percentile(within, [50, 95])
    slots = sum(result["slots"] for result in results)
    return Balance(slots, float(p50), float(p95), float(np.median(whole)), float(whole.max()))


def summed(results: list[Result]) -> Result:
    """Totals over steps, their excess over the summed bounds, time, and the most memory."""
    total, bound = sum(result["total"] for result in results), sum(result["bound"] for result in results)
    critical = sum(result["slot_critical"] for result in results)
    seconds = [result["seconds"]["plan"] for result in results]
    return {
        "steps": len(results),
        "bound": bound,
        "total": total,
        "total_gap": total / bound - 1,
        "slot_critical": critical,
        "slot_critical_gap": critical * results[0]["replicas"] / bound - 1,
        "seconds_median": float(np.median(seconds)),
        "seconds_max": max(seconds),
        "peak_mb": max(result["peak_mb"] for result in results),
    } | balance(results)._asdict()


def summaries(results: list[Result]) -> list[Result]:
    """One a kind of data, number of replicas and setting that has a figure."""
    return [
        {"data": group.data, "replicas": group.replicas, "setting": setting} | summed(group.of(setting))
        for group in grouped(results)
        for setting in group.settings()
        if group.of(setting)
    ]
