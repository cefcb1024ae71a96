"""Ratios of one workload, and the figures that they are held against."""

from __future__ import annotations

from typing import Any

from step_bench.breakdown import ATTEND

CONVERSION, CORE = 0.95, 0.93
"""Least speedup over compression, without and with planning. Published are 0.855 to 0.864, and 0.78 to 0.82."""
NO_SHARING = 0.97
"""Least speedup where nothing is shared."""
MEMORY = 1.0
"""Largest peak of HARTS over that of flat in microbatches of as many rows."""
LOSS = 1e-6
"""Largest relative difference of the losses."""
COSINE = 1e-9
"""1 - cosine that always passes: it is rounding of float32 at most."""
UNSHARED = "none"
"""Workload without sharing."""


def ratios(told: dict[str, Any]) -> dict[str, float]:
    """Of medians; only those whose parts were measured."""
    parity, cosines = told["parity"], told["parity"]["off_cosine"]
    found = {
        "loss difference": parity["differences"]["HARTS"]["loss"],
        "1 - cosine": cosines["HARTS"]["mean"],
        "1 - cosine, flat repacked": cosines["repacked"]["mean"],
        "1 - cosine, flat again": cosines["rerun"]["mean"],
        "1 - cosine, flat rounded otherwise": cosines["rounded"]["mean"],
    }
    if "seconds" not in told:
        return found
    ours, flat = ({name: each["median"] for name, each in told["seconds"][side].items()} for side in ("HARTS", "flat"))
    compression = told["cut"]["compression"]
    speedup = flat["total"] / ours["total"]
    core = flat["total"] / (ours["total"] + sum(told["planning_seconds"].values()))
    found |= {
        "forward speedup": flat["forward"] / ours["forward"],
        "backward speedup": flat["backward"] / ours["backward"],
        "F/B/Grad speedup": speedup,
        "Core speedup": core,
        "F/B/Grad conversion": speedup / compression,
        "Core conversion": core / compression,
        "loss difference, timed": told["timed_loss_difference"],
    }
    if "breakdown" in told:
        found["conversion that pairs allow"] = _by_pairs(told["sides"], told["breakdown"])
    memory = told["memory_bytes"]
    if memory:
        rows = told["sides"]["HARTS"]["fullest"] / told["sides"]["flat"]["fullest"]
        flat_peak, held = memory["flat"]["peak"], memory["flat"]["held"]
        found["peak memory, HARTS / flat"] = memory["HARTS"]["peak"] / flat_peak
        found["peak memory at equal rows"] = memory["HARTS"]["peak"] / (held + (flat_peak - held) * rows)
    return found


def _by_pairs(sides: dict[str, dict[str, int]], breakdown: dict[str, Any]) -> float:
    """Conversion if attention gained as many times as it has fewer pairs, and all else as there are fewer rows.

    Args:
        sides: rows and pairs of what was timed.
        breakdown: seconds of flat, of some of it; attention takes them for pairs, all else for rows.
    """
    parts = {part: sum(phases.values()) for part, phases in breakdown["seconds"]["flat"].items()}
    attention = parts.get(ATTEND, 0.0) / breakdown["pairs"]["flat"]
    rest = (sum(parts.values()) - parts.get(ATTEND, 0.0)) / breakdown["rows"]["flat"]
    ours, flat = (attention * sides[side]["pairs"] + rest * sides[side]["rows"] for side in ("HARTS", "flat"))
    return flat / ours / (sides["flat"]["rows"] / sides["HARTS"]["rows"])


def requirements(workload: str, found: dict[str, float]) -> list[dict[str, Any]]:
    """Each required ratio that was measured: its name, value, limit, and whether it is met.

    Args:
        workload: its name.
        found: by `ratios`.
    """
    least = (
        {"F/B/Grad speedup": NO_SHARING}
        if workload == UNSHARED
        else {"F/B/Grad conversion": CONVERSION, "Core conversion": CORE}
    )
    most = {"peak memory at equal rows": MEMORY, "loss difference": LOSS, "loss difference, timed": LOSS}
    most["1 - cosine"] = max(found["1 - cosine, flat again"], COSINE)
    return [
        {"ratio": name, "value": found[name], side: limit, "met": met(found[name], limit)}
        for side, limits, met in (("least", least, float.__ge__), ("most", most, float.__le__))
        for name, limit in limits.items()
        if name in found
    ]
