"""The partition stage `paper`: candidates over contiguous and free partitions, refined (SPEC section 2)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import PositiveInt

from harts.ir import CompactTrie
from harts.ir.lcp import LcpIndex
from harts.stages.partition.candidates import Candidate, PartitionConfig, PartitionStage
from harts.stages.partition.evolve import evolved_cuts, sampled
from harts.stages.partition.exact import exact_cuts
from harts.stages.partition.greedy import best_placement
from harts.stages.partition.labels import sets_of
from harts.stages.partition.natural import count_range, natural_cuts
from harts.stages.partition.refine import refined
from harts.stages.partition.spans import Spans, label_of_cuts


class Paper(PartitionStage):
    """Put trajectories that share prefixes into the same microbatches, within a capacity.

    Candidates are exact contiguous partitions, or for many trajectories evolved ones, and a greedy one, each with its
    number of microbatches; the schedule stage ranks them.
    """

    class Config(PartitionConfig):
        """Limits, and where exact search ends."""

        exact_limit: PositiveInt = 512
        """Up to this many trajectories contiguous partitions are searched exactly."""

    config: Config

    def candidates(self, trie: CompactTrie) -> list[Candidate]:
        """All of them; a partition may come twice."""
        return candidates(trie.index, self.config.limit(trie), self.config.multiple, self.config.exact_limit)


def candidates(index: LcpIndex, capacity: int, multiple: int, exact_limit: int) -> list[Candidate]:
    """All candidates; a partition may come twice.

    Args:
        index: LCPs of sorted positions.
        capacity: compact tokens that a microbatch may hold; no single trajectory is longer.
        multiple: what K must be a multiple of.
        exact_limit: N0.
    """
    exact = len(index) <= exact_limit
    found = list(contiguous(index, capacity, multiple, exact))
    placement = best_placement(index, capacity, multiple)
    if placement is not None:
        greedy = Candidate(f"greedy {placement.order} {placement.policy}", placement.label)
        found.append(greedy)
        for anchor in [greedy] if exact else anchors(index, found, greedy.count):
            found.append(Candidate(f"{anchor.name} refined", refined(index, capacity, anchor.label)))
    return found


def contiguous(index: LcpIndex, capacity: int, multiple: int, exact: bool) -> Iterator[Candidate]:
    """The base candidates: exact for every K of the range, or evolved to sampled ones."""
    spans = Spans(index)
    natural = natural_cuts(spans, capacity)
    counts = count_range(spans.work(0, len(spans)), capacity, multiple, len(natural) + 1, len(spans))
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
