"""The partition stage `lns`: a portfolio of partitions, and a large-neighbourhood search from the best of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from harts.ir import Columns, CompactTrie, RolloutBatch
from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.ir.partitions import COMPACT_TOKENS
from harts.stages.partition.candidates import Candidate, PartitionConfig, PartitionStage
from harts.stages.partition.contiguous import Contiguous
from harts.stages.partition.fold import folded
from harts.stages.partition.paper import Paper
from harts.stages.partition.peeling import Peeling
from harts.stages.partition.search.drive import Budget, promising, searched


class Lns(PartitionStage):
    """The candidates of `paper`, `contiguous` and `peeling`, and what destroying and rebuilding makes of the best two.

    The plan is never worse than theirs, and with `seconds: null` it is the same on every machine.
    """

    class Config(PartitionConfig):
        """Limits, and how long the search goes on."""

        objective: Literal["paper", "critical"] = "critical"
        """`critical` ranks by the slots' heaviest microbatches, summed, then by the total; `paper` by total first."""
        rounds: NonNegativeInt = 6000
        """Times that a few microbatches are taken apart and built anew from each start; 12 moves are tried for each."""
        seconds: PositiveFloat | None = None
        """Wall time of the stage after which the search ends; the other candidates are made in any case. Compiling,
        which a machine does once, does not count."""
        seed: NonNegativeInt = 0
        """Of the search."""
        exact_limit: PositiveInt = 512
        """As in `paper`."""

    config: Config

    def candidates(self, trie: CompactTrie) -> list[Candidate]:
        """All of them; a partition may come twice."""
        if self.config.seconds is not None:
            compile_search()
        began = time.perf_counter()
        stop = None if self.config.seconds is None else began + self.config.seconds
        limits = {name: getattr(self.config, name) for name in PartitionConfig.model_fields}
        paper = Paper(Paper.Config(**limits, exact_limit=self.config.exact_limit), self.env)
        contiguous = Contiguous(PartitionConfig(**limits), self.env)
        peeling = Peeling(contiguous.config, self.env)
        found = [candidate for stage in (paper, contiguous, peeling) for candidate in stage.candidates(trie)]
        starts = [candidate.label for candidate in found] or [contiguous.label(trie)]
        return found + self._searched(trie, starts, Budget(self.config.rounds, stop))

    def _searched(self, trie: CompactTrie, starts: list[Int64], budget: Budget) -> list[Candidate]:
        leaves = folded(trie.index)
        labels = self._labels(trie, leaves.lcps, [leaves.fold(start) for start in starts], budget)
        labels = [leaves.unfold(label) for label in labels] or self._labels(trie, trie.index, starts, budget)
        return [Candidate(f"searched {i}", label) for i, label in enumerate(labels)]

    def _labels(self, trie: CompactTrie, index: LcpIndex, starts: list[Int64], budget: Budget) -> list[Int64]:
        """Of one search from each promising start, side by side: they run without the interpreter's lock."""
        problem, tokens = self.problem(index, trie), self.work_model.unit == COMPACT_TOKENS
        run = partial(searched, problem, index, budget=budget, seed=self.config.seed, tokens=tokens)
        with ThreadPoolExecutor() as pool:
            return [label for found in pool.map(run, promising(problem, starts)) for label in found]


@cache
def compile_search() -> None:
    """Plan four trajectories that no two microbatches hold evenly, so that all that a search calls is compiled."""
    length = np.array([2, 2, 10, 2])
    offset = np.concatenate(([0], np.cumsum(length)))
    tokens = np.repeat(np.array([2, 3, 4, 5], dtype=np.int32), length)
    tokens[offset[:-1]] = 1
    mask = np.ones(len(tokens), dtype=np.bool_)
    columns = Columns(("a", "b", "c", "d"), ("g",), offset, np.zeros(4, dtype=np.int32), mask)
    trie = CompactTrie(RolloutBatch("compiling", tokens, columns), "sum", np.arange(4), np.array([0, 1, 1, 1]), mask)
    Lns(Lns.Config(capacity=11, replicas=2, rounds=8)).run(trie)
