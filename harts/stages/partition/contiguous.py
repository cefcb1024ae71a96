"""The partition stage `contiguous`."""

from __future__ import annotations

import numpy as np

from harts.ir import CompactTrie, Partitions
from harts.ir.base import Int64
from harts.stages.partition.candidates import Candidate, PartitionStage, check, handed_over, legal
from harts.stages.partition.search.intervals import best_intervals


class Contiguous(PartitionStage):
    """The best intervals of sorted trajectories, whatever their number; then the cheapest splits to a legal number."""

    def run(self, trie: CompactTrie, /) -> Partitions:
        """Make the one candidate.

        Raises:
            PlanError: as `lns`.
        """
        check(trie, self.config)
        return handed_over(trie, self.config, self.work_model, self.candidates(trie))

    def candidates(self, trie: CompactTrie) -> list[Candidate]:
        """It, or none if its microbatches cannot be brought to a legal number."""
        return legal("intervals", trie.index, self.label(trie), self.config.multiple)

    def label(self, trie: CompactTrie) -> Int64:
        """Interval of each sorted position, whatever their number, [N]."""
        return best_intervals(self.problem(trie.index, trie), np.arange(len(trie.order)), trie.lcp)[0]
