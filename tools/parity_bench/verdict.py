"""How far what the processes of a topology computed is from what one process computed another way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROUTER = ("z", "balance")
FLOOR = 1e-2
"""Of the norm of all gradients: where terms cancel in one of them, its rounding is of the size of the terms."""


def collected(folder: Path) -> list[dict[str, Any]]:
    """What each process left of one job, in the order of their ranks.

    Raises:
        FileNotFoundError: none left anything.
    """
    files = sorted(folder.glob("*.pt"), key=lambda file: int(file.stem))
    if not files:
        raise FileNotFoundError(f"{folder}: no process finished")
    return [torch.load(file, weights_only=False) for file in files]


def verdict(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences of all steps, the worst of each kind.

    Args:
        found: of all processes of a topology.
        wanted: of the reference.
    """
    steps = list(zip(found[0]["steps"], wanted[0]["steps"], strict=True))
    shares = [each["steps"] for each in found]
    gradients = {}
    for index in range(len(steps)):
        if all(share[index]["gradients"] is not None for share in shares):
            ours = _whole([share[index]["gradients"] for share in shares])
            gradients = _worse(gradients, errors(ours, _whole([each["steps"][index]["gradients"] for each in wanted])))
    weights = errors(*(_whole([each["weights"] for each in side]) for side in (found, wanted)), floor=0.0)
    biases, wanted_biases = ({n: bias for each in side for n, bias in each["bias"].items()} for side in (found, wanted))
    return {
        "gradient": max(gradients.values(), default=None),
        "gradient_of": max(gradients, key=lambda name: gradients[name], default=None),
        "weight": max(weights.values()),
        "loss": max(abs(a["loss"] - b["loss"]) / max(1.0, abs(b["loss"])) for a, b in steps),
        "logprob": max(_apart(a["logprobs"], b["logprobs"]) for a, b in steps),
        "entropy": max(_apart(a["entropy"], b["entropy"]) for a, b in steps),
        "gradient_norm": max(_relative(a["gradient_norm"], b["gradient_norm"]) for a, b in steps),
        "router": max(
            (abs(a[each] / b[each] - 1.0) for a, b in steps for each in ("z", "balance") if b[each]), default=None
        ),
        "equal_load": all(a["load"] is b["load"] or torch.equal(a["load"], b["load"]) for a, b in steps),
        "equal_bias": set(biases) == set(wanted_biases)
        and all(torch.equal(biases[number], bias) for number, bias in wanted_biases.items()),
        "equal_ranks": all(_same(each["steps"], found[0]["steps"]) for each in found),
    }


def holds(row: dict[str, Any], bound: float) -> bool:
    """Whether everything is within the bound, and equal where it has to be."""
    numbers = ("gradient", "weight", "loss", "logprob", "entropy", "gradient_norm", "router")
    near = all(row[name] <= bound for name in numbers if row[name] is not None)
    return near and all(row[name] for name in ("equal_load", "equal_bias", "equal_ranks"))


def errors(ours: dict[str, Tensor], theirs: dict[str, Tensor], floor: float = FLOOR) -> dict[str, float]:
    """|a - b| / |b| of each tensor, |b| no less than `floor` times that of all together."""
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    floor *= math.sqrt(sum(float(each.double().square().sum()) for each in theirs.values()))
    return {
        name: float((ours[name].double() - each.double()).norm()) / (max(float(each.double().norm()), floor) or 1.0)
        for name, each in theirs.items()
    }


def _whole(parts: list[list[tuple[Any, Tensor]]]) -> dict[str, Tensor]:
    from harts.backends.model.megatron.parts import joined  # noqa: PLC0415  (heavy)

    return joined(pair for each in parts for pair in each)


def _worse(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), value) for name, value in b.items()}


def _relative(a: float, b: float) -> float:
    return abs(a / b - 1.0) if b else abs(a)


def _apart(a: Tensor, b: Tensor) -> float:
    """NaN where only one side has none; positions that neither has are equal."""
    apart = (a - b).abs()
    return float(apart.masked_fill(a.isnan() & b.isnan(), 0.0).max())


def _same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Every process tells the same numbers."""
    return all(
        x["loss"] == y["loss"]
        and x["gradient_norm"] == y["gradient_norm"]
        and torch.equal(x["logprobs"].nan_to_num(), y["logprobs"].nan_to_num())
        for x, y in zip(a, b, strict=True)
    )
