"""Hold a finished plan to its promises from the tokens alone, sharing no code with any planner."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from harts.ir.base import Int32, Int64


class Plan(NamedTuple):
    """Any planner's plan of N trajectories for D replicas."""

    microbatch: Int64
    """Of each trajectory of the batch, [N]; j * D + d is replica d's in slot j."""
    work: Int64
    """Compact tokens of each microbatch, [slots, D]."""


class PlanFaultError(Exception):
    """A plan is not what it says; its figures must not be shown."""


def verify(tokens: Int32, offset: Int64, plan: Plan, capacity: int) -> None:
    """Check a plan of N trajectories.

    Args:
        tokens: ids of all trajectories, int32 [S].
        offset: trajectory i is tokens[offset[i]:offset[i + 1]], [N+1].
        plan: microbatches and what it claims of them.
        capacity: compact tokens of a microbatch.

    Raises:
        PlanFaultError: a trajectory is in no microbatch, a microbatch is empty, or its work is not what the tokens say
            or above the capacity. That D divides their number is the shape of `work`.
    """
    count = len(offset) - 1
    microbatch, work = plan
    if microbatch.shape != (count,):
        raise PlanFaultError(f"the plan places {microbatch.shape} trajectories, the step has {count}")
    if set(microbatch.tolist()) != set(range(work.size)):
        raise PlanFaultError(
            f"trajectories are in {len(set(microbatch.tolist()))} microbatches, {work.size} are planned"
        )
    for k, claimed in enumerate(work.reshape(-1).tolist()):
        members = np.flatnonzero(microbatch == k).tolist()
        found = compact_tokens([tokens[offset[i] : offset[i + 1]] for i in members])
        if found != claimed:
            raise PlanFaultError(
                f"microbatch {k}: {len(members)} trajectories have {found} compact tokens, not {claimed}"
            )
        if found > capacity:
            raise PlanFaultError(f"microbatch {k}: {found} compact tokens are above the capacity of {capacity}")


def compact_tokens(trajectories: list[Int32]) -> int:
    """Unique prefixes of some token strings."""
    ordered = sorted(trajectories, key=lambda path: path.astype(">i4").tobytes())  # bytes compare as the ids do
    shared = sum(_common(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _common(a: Int32, b: Int32) -> int:
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differs[0]) if len(differs) else shorter
