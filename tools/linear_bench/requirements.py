"""Ratios of one workload, and the figures that they are held against."""

from __future__ import annotations

from typing import Any

Times = dict[str, dict[str, dict[str, float]]]
"""Candidate -> `forward` or `both` -> median, least, most; milliseconds."""

SHARING, NO_SHARING = 1.05, 1.02
"""Largest time of `fused` over `plain`, forward and backward."""
AGAINST_FLAT = 0.93
"""Least of time of `flat` over time of `fused`, over the compression ratio."""
MEMORY = 1.1
"""Largest peak of `fused`, without the bank of requested states, over that of `plain`."""
TIMED = ("case1", "case2", "case3", "claude", "none")
"""Workloads whose speed is required; the others are extremes, or small."""


def ratios(times: Times, compression: float, memory: dict[str, int]) -> dict[str, float]:
    """Of medians of forward and backward unless a name says otherwise; only those whose parts were measured."""
    both = {name: each["both"]["median"] for name, each in times.items()}
    forward = {name: each["forward"]["median"] for name, each in times.items()}
    fused, around = both["fused"], both["projections"]
    found: dict[str, float] = {}
    for name in ("plain", "plain_one", "plain_flat_lengths"):
        if name in both:
            found[f"fused / {name}"] = fused / both[name]
    if "plain" in both:
        found["fused / plain, forward"] = forward["fused"] / forward["plain"]
        found["fused / plain, layer"] = (around + fused) / (around + both["plain"])
    for name in ("rounds", "expand", "depth", "flat"):
        if name in both:
            found[f"{name} / fused"] = both[name] / fused
    if "expand" in both:
        found["expand / fused, layer"] = (around + both["expand"]) / (around + fused)
    if "recomputed" in both and "plain" in both:
        found["recomputed / plain"] = both["recomputed"] / both["plain"]
    if "flat" in both:
        # of `plain`: what a call that shares nothing reaches on C rows in the tree's lengths
        for name in ("fused", "recomputed", "plain"):
            if name in both:
                found[f"flat / {name} over S / C"] = both["flat"] / both[name] / compression
    for name in ("fused", "recomputed"):
        if name in memory and "plain" in memory:
            found[f"memory without bank, {name} / plain"] = (memory[name] - memory["bank"]) / memory["plain"]
    return found


def requirements(workload: str, found: dict[str, float]) -> list[dict[str, Any]]:
    """Each required ratio that was measured: its name, value, limit, and whether it is met."""
    if workload not in TIMED:
        return []
    most = {
        "fused / plain": NO_SHARING if workload == "none" else SHARING,
        "memory without bank, fused / plain": MEMORY,
        "memory without bank, recomputed / plain": MEMORY,
    }
    least = {"flat / fused over S / C": AGAINST_FLAT}
    if workload != "none":
        least["expand / fused, layer"] = 1.0
    return [
        {"ratio": name, "value": found[name], side: limit, "met": met(found[name], limit)}
        for side, limits, met in (("most", most, float.__le__), ("least", least, float.__ge__))
        for name, limit in limits.items()
        if name in found
    ]
