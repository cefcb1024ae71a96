"""Microbatches that grow by one trajectory at a time, with exact insertion costs (10)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int64


class Policy(NamedTuple):
    """Among the microbatches that a trajectory fits into, the one with the most `after * work + shared * tokens`."""

    work: int
    """Weight of the work after insertion."""
    shared: int
    """Weight of the tokens that the trajectory shares with the microbatch."""


class Bins(NamedTuple):
    """Open microbatches; the arrays change in place."""

    length: Int64
    """Tokens of each trajectory in sorted order, [N]."""
    lcp: Int64
    """Tokens shared with the one before, [N]."""
    least: int
    """Tokens that all trajectories share."""
    capacity: int
    """Compact tokens that a microbatch may hold."""
    label: Int64
    """Microbatch of each trajectory, -1 before it is placed, [N]."""
    work: Int64
    """Compact tokens of each microbatch; more than the capacity once it is dissolved, [N]."""
    shared: Int64
    """Most tokens that the trajectory looked at shares with one member of each microbatch, [N]."""
    opened: Int64
    """How many microbatches were opened, [1]."""


@compiled
def empty_bins(length: Int64, lcp: Int64, capacity: int) -> Bins:
    """No microbatch yet.

    Args:
        length: tokens of each trajectory in sorted order, [N].
        lcp: tokens shared with the one before, [N].
        capacity: compact tokens that a microbatch may hold; no trajectory is longer.
    """
    count = len(length)
    least = lcp[1:].min() if count > 1 else length[0]
    label, work, shared = np.full(count, -1), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    return Bins(length, lcp, least, capacity, label, work, shared, np.zeros(1, dtype=np.int64))


@compiled
def place(bins: Bins, policy: Policy, x: int) -> None:
    """Put the trajectory at sorted position x where the policy says, or into a new microbatch."""
    chosen = _choose(bins, policy, x)
    if chosen < 0:
        chosen = bins.opened[0]
        bins.opened[0] += 1
        bins.shared[chosen] = 0
    _add(bins, chosen, x)


@compiled
def place_all(bins: Bins, policy: Policy, positions: Int64) -> None:
    """Place all trajectories in order, then empty microbatches that are at most half full where that is possible."""
    for x in positions:
        place(bins, policy, x)
    for microbatch in np.argsort(bins.work[: bins.opened[0]], kind="mergesort"):
        if 2 * bins.work[microbatch] <= bins.capacity:
            dissolve(bins, policy, microbatch)


@compiled
def dissolve(bins: Bins, policy: Policy, microbatch: int) -> bool:
    """Move all members of a microbatch to others, longest first; undo it if one of them fits nowhere."""
    members = np.flatnonzero(bins.label == microbatch)
    members = members[np.argsort(-bins.length[members], kind="mergesort")]
    before = bins.work.copy()
    bins.work[microbatch] = bins.capacity + 1  # nothing fits
    for i in range(len(members)):
        x = int(members[i])
        chosen = _choose(bins, policy, x)
        if chosen < 0:
            bins.work[:] = before
            bins.label[members] = microbatch
            return False
        _add(bins, chosen, x)
    return True


@compiled
def _choose(bins: Bins, policy: Policy, x: int) -> int:
    """The first of the best microbatches that x fits into, -1 if there is none."""
    _look(bins, x)
    best, chosen = -1, -1
    for k in range(bins.opened[0]):
        after = bins.work[k] + bins.length[x] - bins.shared[k]
        value = after * policy.work + bins.shared[k] * policy.shared
        if after <= bins.capacity and value > best:
            best, chosen = value, k
    return chosen


@compiled
def _look(bins: Bins, x: int) -> None:
    """Measure what x shares with every microbatch: from x outwards, until only what all share is left."""
    bins.shared[: bins.opened[0]] = bins.least
    common = bins.length[x]
    for y in range(x - 1, -1, -1):
        common = min(common, bins.lcp[y + 1])
        if common == bins.least:
            break
        if bins.label[y] >= 0:
            bins.shared[bins.label[y]] = max(bins.shared[bins.label[y]], common)
    common = bins.length[x]
    for y in range(x + 1, len(bins.label)):
        common = min(common, bins.lcp[y])
        if common == bins.least:
            break
        if bins.label[y] >= 0:
            bins.shared[bins.label[y]] = max(bins.shared[bins.label[y]], common)


@compiled
def _add(bins: Bins, microbatch: int, x: int) -> None:
    """Add the trajectory that was looked at."""
    bins.work[microbatch] += bins.length[x] - bins.shared[microbatch]
    bins.label[x] = microbatch
