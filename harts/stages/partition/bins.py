"""Microbatches that grow by one trajectory at a time, with exact insertion costs (10)."""

from __future__ import annotations

from bisect import bisect
from typing import NamedTuple

import numpy as np

from harts.ir.base import Int32, Int64
from harts.ir.lcp import LcpIndex


class Policy(NamedTuple):
    """Among the microbatches that a trajectory fits into, the one with the most `after * work + shared * tokens`."""

    work: int
    """Weight of the work after insertion."""
    shared: int
    """Weight of the tokens that the trajectory shares with the microbatch."""


class Bins:
    """Open microbatches. The insertion cost (10) of x is |x| less the most tokens that it shares with one member.

    That number is kept for every microbatch and position, 4 K N bytes: an insertion changes it only between the
    new member's neighbours in its microbatch.
    """

    def __init__(self, index: LcpIndex, capacity: int) -> None:
        self.capacity = capacity
        self.members: list[list[int]] = []
        self.work: Int64 = np.zeros(16, dtype=np.int64)
        self._length = index.length.tolist()
        self._lcp: Int32 = index.lcp.astype(np.int32)
        self._shared: Int32 = np.zeros((16, len(index)), dtype=np.int32)

    def place(self, x: int, policy: Policy) -> None:
        """Put the trajectory at sorted position x where the policy says, or into a new microbatch."""
        chosen = self._choose(x, policy)
        self._add(self._open() if chosen is None else chosen, x)

    def dissolve(self, microbatch: int, policy: Policy) -> bool:
        """Move all members of a microbatch to others, longest first; undo it if one of them fits nowhere."""
        held = self.members[microbatch]
        own_work = self.work[microbatch]
        self.work[microbatch] = self.capacity + 1  # nothing fits
        undo: dict[int, tuple[int, list[int], Int32]] = {}
        for x in sorted(held, key=lambda x: -self._length[x]):
            chosen = self._choose(x, policy)
            if chosen is None:
                self.work[microbatch] = own_work
                for touched, (work, members, shared) in undo.items():
                    self.work[touched], self.members[touched], self._shared[touched] = work, members, shared
                return False
            if chosen not in undo:
                undo[chosen] = int(self.work[chosen]), list(self.members[chosen]), self._shared[chosen].copy()
            self._add(chosen, x)
        self.members[microbatch] = []
        return True

    def label(self) -> Int64:
        """Microbatch of each sorted position, [N]; numbers of dissolved microbatches are unused."""
        label = np.empty(len(self._length), dtype=np.int64)
        for microbatch, members in enumerate(self.members):
            label[members] = microbatch
        return label

    def _choose(self, x: int, policy: Policy) -> int | None:
        count = len(self.members)
        if count == 0:
            return None
        shared = self._shared[:count, x].astype(np.int64)
        after = self.work[:count] + self._length[x] - shared
        value = after * policy.work + shared * policy.shared
        value[after > self.capacity] = -1
        best = int(value.argmax())
        return best if value[best] >= 0 else None

    def _open(self) -> int:
        count = len(self.members)
        if count == len(self.work):
            self.work = np.concatenate((self.work, np.zeros_like(self.work)))
            self._shared = np.concatenate((self._shared, np.zeros_like(self._shared)))
        self.members.append([])
        return count

    def _add(self, microbatch: int, x: int) -> None:
        members, shared = self.members[microbatch], self._shared[microbatch]
        self.work[microbatch] += self._length[x] - shared[x]
        at = bisect(members, x)
        before = members[at - 1] if at else -1
        after = members[at] if at < len(members) else len(shared)
        members.insert(at, x)
        shared[x] = self._length[x]
        right, left = shared[x + 1 : after], shared[before + 1 : x][::-1]
        np.maximum(right, np.minimum.accumulate(self._lcp[x + 1 : after]), out=right)
        np.maximum(left, np.minimum.accumulate(self._lcp[x : before + 1 : -1]), out=left)
