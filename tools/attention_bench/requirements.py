"""Ratios of one workload, and the figures that they are held against."""

from __future__ import annotations

from typing import Any

from attention_bench.candidates import FLEX

Times = dict[str, dict[str, dict[str, float]]]
"""Candidate -> `forward` or `both` -> median, least, most; milliseconds."""

TREE = "tree"
"""The backend that is held against the others."""
RIVALS = ("flash_attention_4", "transformer_engine", "varlen")
"""Expanding backends that have to be measured before `tree` is said to be as fast as the best of them."""
FLATS = ("flash_attention_4", TREE)
"""Backends of its kernel family, whose faster flat run it is held against: without sharing that may be the first."""
EXPANDING, AIM = 1.0, 1.3
"""Least time of the best expanding backend over that of `tree`, and what is aimed at."""
HELD = 0.1
"""Most of the expanded keys and values that `tree` may hold by its peak of memory, which rounding and lists are in."""
AGAINST_FLAT = 0.9
"""Least of time of the flat run over time of `tree`, over the compression ratio."""
REQUIRED = ("case1", "case2", "case3", "claude", "step")
"""Workloads whose speed is required; the others are extremes, or share nothing."""


def ratios(
    times: Times, compression: float, pair_ratio: float, expanding: list[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Of medians of forward and backward unless a name says otherwise, and which candidates were the best.

    Args:
        times: of what was measured.
        compression: S / C, rows of all trajectories over compact rows.
        pair_ratio: pairs of a query and a key that it sees on flat rows, over those on compact rows.
        expanding: backends that expand keys and values.
    """
    both = {name: each["both"]["median"] for name, each in times.items()}
    forward = {name: each["forward"]["median"] for name, each in times.items()}
    found: dict[str, float] = {}
    best: dict[str, str] = {}
    measured = [name for name in expanding if name in both]
    if measured:
        best["expanding"] = min(measured, key=both.__getitem__)
    flats = [flat for name in FLATS if (flat := f"flat:{name}") in both]
    if flats:
        best["flat"] = min(flats, key=both.__getitem__)
    if TREE in both:
        if measured:
            found["best expanding / tree"] = both[best["expanding"]] / both[TREE]
            found["best expanding / tree, forward"] = min(forward[name] for name in measured) / forward[TREE]
        found |= {f"{name} / tree": both[name] / both[TREE] for name in (*measured, FLEX) if name in both}
        if flats:
            found |= _against_flat("best flat / tree", both[best["flat"]] / both[TREE], compression, pair_ratio)
    for name, ms in both.items():
        flat = f"flat:{name}"
        if name != TREE and flat in both:
            found |= _against_flat(f"{flat} / {name}", both[flat] / ms, compression, pair_ratio)
    return found, best


def _against_flat(name: str, ratio: float, compression: float, pair_ratio: float) -> dict[str, float]:
    return {name: ratio, f"{name} over S / C": ratio / compression, f"{name} over ratio of pairs": ratio / pair_ratio}


def requirements(
    workload: str, found: dict[str, float], cost: dict[str, dict[str, int]], held: float | None
) -> list[dict[str, Any]]:
    """What is required of `tree`: name, value, limit, whether it is met, and whether what is aimed at is reached.

    Args:
        workload: its name.
        found: ratios.
        cost: what backends say of themselves.
        held: bytes that `tree` held at its peak beside compact rows, over those of the expanded keys and values; None
            if its peak was not measured.
    """
    told: list[dict[str, Any]] = []
    if TREE in cost:
        size = cost[TREE]["expanded_bytes"]
        told.append({"ratio": "bytes of expanded keys and values, tree", "value": size, "most": 0, "met": size == 0})
    if held is not None:
        name = "held over expanded keys and values, tree"
        told.append({"ratio": name, "value": held, "most": HELD, "met": held <= HELD})
    if workload not in REQUIRED:
        return told
    least = {
        "best expanding / tree": EXPANDING,
        "best flat / tree over S / C": AGAINST_FLAT,
        "best flat / tree over ratio of pairs": AGAINST_FLAT,
    }
    raced = all(f"{name} / {TREE}" in found for name in RIVALS)
    for name, limit in least.items():
        # none if there was nothing sound to hold it against, or not all of it, or it was not sound itself
        value = found.get(name) if raced or limit != EXPANDING else None
        if value is not None or TREE in cost:
            told.append({"ratio": name, "value": value, "least": limit, "met": value is not None and value >= limit})
            if limit == EXPANDING:
                told[-1] |= {"aim": AIM, "reached": value is not None and value >= AIM}
    return told
