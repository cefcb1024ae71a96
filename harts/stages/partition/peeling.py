"""The partition stage `peeling`."""

from __future__ import annotations

from harts.ir import CompactTrie
from harts.ir.prefix_tree import prefix_tree
from harts.stages.partition.candidates import Candidate, PartitionStage, legal
from harts.stages.partition.fold import folded
from harts.stages.partition.search.peel import Rule, peeled, tools


class Peeling(PartitionStage):
    """Fill microbatch after microbatch, from the deepest forks below which not all fits, for the least that is left."""

    def candidates(self, trie: CompactTrie) -> list[Candidate]:
        """It, or none if its microbatches cannot be brought to a legal number."""
        leaves = folded(trie.index)
        tree = prefix_tree(leaves.lcps.length, leaves.lcps.lcp)
        label, _ = peeled(tree, Rule(self.config.limit(trie), noise=0, penalty=0), tools(0))
        return legal("peeled", trie.index, leaves.unfold(label), self.config.multiple)
