"""The partition stage `paper`: candidates over contiguous and free partitions, refined (SPEC section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import PositiveInt

from harts.errors import PlanError
from harts.ir import CompactTrie, Partitions
from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.stages.base import Stage, StageConfig
from harts.stages.partition.evolve import evolved_cuts, sampled
from harts.stages.partition.exact import exact_cuts
from harts.stages.partition.greedy import best_placement
from harts.stages.partition.labels import sets_of
from harts.stages.partition.natural import count_range, natural_cuts
from harts.stages.partition.refine import refined
from harts.stages.partition.spans import Spans, label_of_cuts

SHOWN = 3
"""Trajectories that an error names."""


class Paper(Stage[CompactTrie, Partitions]):
    """Put trajectories that share prefixes into the same microbatches, within a capacity.

    Candidates are exact contiguous partitions, or for many trajectories evolved ones, and a greedy one, each with its
    number of microbatches; the schedule stage ranks them.
    """

    class Config(StageConfig):
        """Capacity, replicas, and where exact search ends."""

        capacity: PositiveInt | None
        """Compact tokens that a microbatch may hold; null is no limit."""
        replicas: PositiveInt = 1
        """Data-parallel replicas D; the number of microbatches is a multiple of it."""
        exact_limit: PositiveInt = 512
        """Up to this many trajectories contiguous partitions are searched exactly."""

    config: Config

    def run(self, trie: CompactTrie, /) -> Partitions:
        """Make all candidates.

        Raises:
            PlanError: a trajectory is longer than the capacity, there are fewer trajectories than replicas, or no
                number of microbatches that D divides can hold them.
        """
        check(trie, self.config.capacity, self.config.replicas)
        capacity = min(self.config.capacity or trie.compact_tokens, trie.compact_tokens)
        found = candidates(trie.index, capacity, self.config.replicas, self.config.exact_limit)
        if not found:
            raise PlanError(
                f"{trie.batch.source}: found no way to put {len(trie.order)} trajectories into microbatches of at most "
                f"{capacity} compact tokens whose number is a multiple of {self.config.replicas} replicas"
            )
        return Partitions(
            trie=trie,
            capacity=self.config.capacity,
            replicas=self.config.replicas,
            names=tuple(candidate.name for candidate in found),
            microbatch=np.stack([candidate.label for candidate in found]).astype(np.int32),
        )


def check(trie: CompactTrie, capacity: int | None, replicas: int) -> None:
    """Raise PlanError for what no plan can serve."""
    source, length = trie.batch.source, trie.batch.columns.length
    if len(length) < replicas:
        raise PlanError(f"{source}: {len(length)} trajectories cannot fill {replicas} replicas")
    long = np.flatnonzero(length > (capacity or length.max()))
    if len(long):
        named = [f"trajectory {trie.batch.columns.names[i]} has {length[i]} tokens" for i in long[:SHOWN]]
        more = f", and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        raise PlanError(f"{source}: {', '.join(named)}{more}: more than the capacity of {capacity} compact tokens")


@dataclass(frozen=True, eq=False)
class Candidate:
    """One partition."""

    name: str
    label: Int64
    """Microbatch of each sorted position, numbered by first member, [N]."""

    @property
    def count(self) -> int:
        """K."""
        return int(self.label.max()) + 1


def candidates(index: LcpIndex, capacity: int, replicas: int, exact_limit: int) -> list[Candidate]:
    """All candidates, each partition once.

    Args:
        index: LCPs of sorted positions.
        capacity: compact tokens that a microbatch may hold; no single trajectory is longer.
        replicas: D.
        exact_limit: N0.
    """
    exact = len(index) <= exact_limit
    found = list(contiguous(index, capacity, replicas, exact))
    placement = best_placement(index, capacity, replicas)
    if placement is not None:
        greedy = Candidate(f"greedy {placement.order} {placement.policy}", placement.label)
        found.append(greedy)
        for anchor in [greedy] if exact else anchors(index, found, greedy.count):
            found.append(Candidate(f"{anchor.name} refined", refined(index, capacity, anchor.label)))
    unique: dict[bytes, Candidate] = {}
    for candidate in found:
        unique.setdefault(candidate.label.tobytes(), candidate)
    return list(unique.values())


def contiguous(index: LcpIndex, capacity: int, replicas: int, exact: bool) -> Iterator[Candidate]:
    """The base candidates: exact for every K of the range, or evolved to sampled ones."""
    spans = Spans(index)
    natural = natural_cuts(spans, capacity)
    counts = count_range(spans.work(0, len(spans)), capacity, replicas, len(natural) + 1, len(spans))
    found = exact_cuts(spans, capacity, counts) if exact else evolved_cuts(spans, capacity, natural, sampled(counts))
    how = "exact" if exact else "evolved"
    for count, cuts in found.items():
        yield Candidate(f"{how} K={count}", label_of_cuts(cuts, len(spans)))


def anchors(index: LcpIndex, found: list[Candidate], greedy: int) -> list[Candidate]:
    """At most three to refine (B_ref): the best at the greedy K, the least work of the others, the nearest K left."""
    work = {candidate.name: int(sets_of(index, candidate.label).work.sum()) for candidate in found}
    left = sorted(found, key=lambda candidate: work[candidate.name])
    chosen = [next(candidate for candidate in left if candidate.count == greedy)]
    left.remove(chosen[0])
    if left:
        chosen.append(left.pop(0))
    if left:
        chosen.append(min(left, key=lambda candidate: abs(candidate.count - greedy)))
    return chosen
