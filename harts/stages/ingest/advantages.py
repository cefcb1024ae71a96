"""Advantages from the rewards of a prompt group, for data that brings rewards only."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from harts.errors import InputError
from harts.ir import RolloutBatch
from harts.ir.base import Float64

GroupAdvantage = Literal["normalized", "centered"]

EPSILON = 1e-6
"""Added to a group's standard deviation."""


def with_group_advantages(batch: RolloutBatch, kind: GroupAdvantage) -> RolloutBatch:
    """Give each trajectory reward - mean over its group, over (standard deviation + 1e-6) if normalized.

    The standard deviation is the sample's (divisor n - 1). A group of one and a group of equal rewards get exactly 0.

    Raises:
        InputError: the data holds advantages, or a reward is missing, unknown or not finite.
    """
    columns = batch.columns
    for field in ("advantage", "advantages"):
        if getattr(columns, field) is not None:
            raise _refuse(batch, 0, field, f"the data holds it, so group_advantage {kind} must not compute it")
    if columns.reward is None:
        raise _refuse(batch, 0, "reward", f"is missing, group_advantage {kind} needs it")
    unusable = np.flatnonzero(~np.isfinite(columns.reward))
    if unusable.size:
        value = columns.reward[unusable[0]]
        what = "is unknown (NaN or reward_known: false)" if np.isnan(value) else f"is {value}"
        raise _refuse(batch, int(unusable[0]), "reward", f"{what}, group_advantage {kind} needs it")
    advantage = np.zeros(len(columns))
    for group in range(len(columns.groups)):
        members = columns.group == group
        advantage[members] = _relative(columns.reward[members], kind)
    return replace(batch, columns=replace(columns, advantage=advantage))


def _relative(reward: Float64, kind: GroupAdvantage) -> Float64:
    if len(reward) == 0 or reward.min() == reward.max():
        return np.zeros(len(reward))  # a rounded mean would leave a tiny rest
    away = reward - math.fsum(reward) / len(reward)  # exact sum: the caller's order does not matter
    if kind == "centered":
        return away
    return np.asarray(away / (math.sqrt(math.fsum(away**2) / (len(reward) - 1)) + EPSILON))


def _refuse(batch: RolloutBatch, index: int, field: str, what: str) -> InputError:
    return InputError(f"{batch.source}: trajectory {batch.columns.names[index]!r}: field {field}: {what}")
