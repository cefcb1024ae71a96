"""Strict prefixes and duplicates cost nothing beside what they are a prefix of: searches leave them out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.stages.partition.labels import renumbered


class Folded(NamedTuple):
    """The n of N trajectories that are no prefix of the next one in sorted order."""

    lcps: LcpIndex
    """Of those n."""
    kept: Int64
    """Their sorted positions, [n]."""
    group: Int64
    """Which of the n each trajectory goes with: the next that extends or equals it, [N]."""

    def fold(self, label: Int64) -> Int64:
        """A partition of all, as one of the n, whose microbatches are no heavier, [n]."""
        return renumbered(label[self.kept])

    def unfold(self, label: Int64) -> Int64:
        """A partition of the n, as one of all, whose microbatches are as heavy, [N]."""
        return renumbered(label[self.group])


def folded(index: LcpIndex) -> Folded:
    """Leave out every trajectory that the next one begins with."""
    ends = np.append(index.lcp[1:] < index.length[:-1], True)
    kept = np.flatnonzero(ends)
    lcp = np.append(index.lcp[:1], index.neighbours(kept[:-1], kept[1:]))
    return Folded(LcpIndex(index.length[kept], lcp), kept, np.cumsum(ends) - ends)
