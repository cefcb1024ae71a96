"""The partition stage `contiguous`."""

from __future__ import annotations

import numpy as np

from harts.ir import CompactTrie
from harts.ir.base import Int64
from harts.stages.partition.candidates import Candidate, PartitionStage, legal
from harts.stages.partition.search.intervals import best_intervals
from harts.stages.partition.search.problem import Problem

FINEST = 256
"""Parts of the capacity between which the bisection ends."""


class Contiguous(PartitionStage):
    """The best intervals of sorted trajectories, whatever their number; then the cheapest splits to a legal number.

    A second candidate has the least capacity (MULTIFIT) at which intervals still are as few, up to a legal number: its
    microbatches are the most even.
    """

    def candidates(self, trie: CompactTrie) -> list[Candidate]:
        """Those whose microbatches can be brought to a legal number."""
        index, multiple = trie.index, self.config.multiple
        problem = self.problem(index, trie)
        best = _intervals(problem)
        even = _even(problem, best, multiple)
        return legal("intervals", index, best, multiple) + legal("even intervals", index, even, multiple)

    def label(self, trie: CompactTrie) -> Int64:
        """Interval of each sorted position, whatever their number, [N]."""
        return _intervals(self.problem(trie.index, trie))


def _intervals(problem: Problem) -> Int64:
    return best_intervals(problem, np.arange(len(problem.length)), problem.lcp)[0]


def _even(problem: Problem, label: Int64, multiple: int) -> Int64:
    """Lower the capacity by bisection while no more intervals are needed than the next legal number."""
    most = -(-(int(label.max()) + 1) // multiple) * multiple
    compact_tokens = int((problem.length - problem.lcp).sum())
    low, high = max(int(problem.length.max()), -(-compact_tokens // most)), problem.capacity
    while high - low > problem.capacity // FINEST:
        middle = (low + high) // 2
        found = _intervals(problem._replace(capacity=middle))
        if found.max() < most:
            label, high = found, middle
        else:
            low = middle + 1
    return label
