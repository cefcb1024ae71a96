"""Ratios of one workload, and the figures that they are held against."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from step_bench.breakdown import ATTEND, HEAD
from step_bench.parity import COSINE

CONVERSION, CORE = 0.95, 0.93
"""Least speedup over compression, without and with planning. Published are 0.855 to 0.864, and 0.78 to 0.82."""
NO_SHARING = 0.97
"""Least speedup where nothing is shared."""
MEMORY = 1.0
"""Largest peak of HARTS over that of flat in microbatches of as many rows."""
LOSS = 1e-6
"""Largest relative difference of the losses."""
COUNTED_BY = {ATTEND: "pairs", HEAD: "logit_rows"}
"""Parts of a step whose work is not that of rows."""
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
        "F/B conversion": _passes(flat) / _passes(ours) / compression,
        "F/B/Grad conversion": speedup / compression,
        "Core conversion": core / compression,
        "loss difference, timed": told["timed_loss_difference"],
    }
    if "breakdown" in told:
        found["conversion that pairs and logits allow"] = _allowed(told["sides"], told["breakdown"])
    memory = told["memory_bytes"]
    if memory:
        rows = told["sides"]["HARTS"]["fullest"] / told["sides"]["flat"]["fullest"]
        flat_peak, held = memory["flat"]["peak"], memory["flat"]["held"]
        found["peak memory, HARTS / flat"] = memory["HARTS"]["peak"] / flat_peak
        found["peak memory at equal rows"] = memory["HARTS"]["peak"] / (held + (flat_peak - held) * rows)
    return found


def _passes(seconds: dict[str, float]) -> float:
    """Forward and backward, without what is done once a step, however many microbatches it has."""
    return seconds["forward"] + seconds["backward"]


def _allowed(sides: dict[str, dict[str, int]], breakdown: dict[str, Any]) -> float:
    """Conversion if attention gained as many times as it has fewer pairs, the LM head as it has fewer rows of logits,
    and all else as there are fewer rows.

    Args:
        sides: what was timed, counted in each of `COUNTED_BY` and `rows`.
        breakdown: seconds of some of it, and what that is in the same counts.
    """
    seconds: dict[str, float] = defaultdict(float)
    for part, phases in breakdown["seconds"]["flat"].items():
        seconds[COUNTED_BY.get(part, "rows")] += sum(phases.values())
    each = {count: whole / breakdown["sides"]["flat"][count] for count, whole in seconds.items()}
    ours, flat = (sum(sides[side][count] * one for count, one in each.items()) for side in ("HARTS", "flat"))
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
