"""Microbatches that grow by one trajectory at a time, with exact insertion costs (10)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.compiled import compiled
from harts.ir.base import Int32, Int64
from harts.ir.lcp import LcpIndex


class Policy(NamedTuple):
    """Among the microbatches that a trajectory fits into, the one with the most `after * work + shared * tokens`."""

    work: int
    """Weight of the work after insertion."""
    shared: int
    """Weight of the tokens that the trajectory shares with the microbatch."""


class Bins(NamedTuple):
    """Open microbatches; the arrays change in place. The insertion cost (10) of x is |x| less `shared`.

    Of `shared` only the rows of opened microbatches are ever touched, so that 4 K N bytes of memory are used.
    """

    length: Int64
    """Tokens of each trajectory in sorted order, [N]."""
    lcp: Int32
    """Tokens shared with the one before, [N]."""
    own: Int64
    """Tokens that no other trajectory shares: what an insertion at least costs, [N]."""
    capacity: int
    """Compact tokens that a microbatch may hold."""
    label: Int64
    """Microbatch of each trajectory, -1 before it is placed, [N]."""
    work: Int64
    """Compact tokens of each microbatch; more than the capacity once it is dissolved, [N]."""
    shared: Int32
    """Most tokens that each trajectory shares with one member of each microbatch, [N, N]."""
    opened: Int64
    """How many microbatches were opened, [1]."""


def empty_bins(index: LcpIndex, capacity: int) -> Bins:
    """No microbatch yet."""
    count = len(index)
    own = index.length - np.maximum(index.lcp, np.append(index.lcp[1:], 0))
    label = np.full(count, -1, dtype=np.int64)
    work = np.zeros(count, dtype=np.int64)
    shared = np.zeros((count, count), dtype=np.int32)
    opened = np.zeros(1, dtype=np.int64)
    return Bins(index.length, index.lcp.astype(np.int32), own, capacity, label, work, shared, opened)


def clear(bins: Bins) -> None:
    """Take all trajectories out; only what was touched is written."""
    bins.label[:] = -1
    bins.work[:] = 0
    bins.shared[: bins.opened[0]] = 0
    bins.opened[0] = 0


@compiled
def place(bins: Bins, policy: Policy, x: int) -> None:
    """Put the trajectory at sorted position x where the policy says, or into a new microbatch."""
    chosen = _choose(bins, policy, x)
    if chosen < 0:
        chosen = bins.opened[0]
        bins.opened[0] += 1
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
    touched = np.empty(len(members), dtype=np.int64)
    before = np.empty(len(members), dtype=np.int64)
    rows = np.empty((len(members), len(bins.label)), dtype=np.int32)
    own_work = bins.work[microbatch]
    bins.work[microbatch] = bins.capacity + 1  # nothing fits
    for moved in range(len(members)):
        chosen = _choose(bins, policy, members[moved])
        if chosen < 0:
            for i in range(moved - 1, -1, -1):
                bins.work[touched[i]] = before[i]
                bins.shared[touched[i]] = rows[i]
                bins.label[members[i]] = microbatch
            bins.work[microbatch] = own_work
            return False
        touched[moved], before[moved] = chosen, bins.work[chosen]
        rows[moved] = bins.shared[chosen]
        _add(bins, chosen, members[moved])
    return True


@compiled
def _choose(bins: Bins, policy: Policy, x: int) -> int:
    """The first of the best microbatches that x fits into, -1 if there is none."""
    best, chosen = -1, -1
    for k in range(bins.opened[0]):
        if bins.work[k] + bins.own[x] > bins.capacity:
            continue
        common = bins.shared[k, x]
        after = bins.work[k] + bins.length[x] - common
        value = after * policy.work + common * policy.shared
        if after <= bins.capacity and value > best:
            best, chosen = value, k
    return chosen


@compiled
def _add(bins: Bins, microbatch: int, x: int) -> None:
    """Add x; what others share with the microbatch changes only between x and its nearest members."""
    shared = bins.shared[microbatch]
    bins.work[microbatch] += bins.length[x] - shared[x]
    bins.label[x] = microbatch
    shared[x] = bins.length[x]
    least = bins.length[x]
    for y in range(x - 1, -1, -1):
        least = min(least, bins.lcp[y + 1])
        if least == 0 or bins.label[y] == microbatch:
            break
        shared[y] = max(shared[y], least)
    least = bins.length[x]
    for y in range(x + 1, len(bins.label)):
        least = min(least, bins.lcp[y])
        if least == 0 or bins.label[y] == microbatch:
            break
        shared[y] = max(shared[y], least)
