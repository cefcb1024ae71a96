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
        slot_multiple: PositiveInt = 1
        """Slots of every replica are a multiple of it, as virtual pipeline stages ask."""
        exact_limit: PositiveInt = 512
        """Up to this many trajectories contiguous partitions are searched exactly."""

    config: Config

    def run(self, trie: CompactTrie, /) -> Partitions:
        """Make all candidates.

        Raises:
            PlanError: a trajectory is longer than the capacity, there are fewer trajectories than the slots that all
                replicas need, or no partition into a multiple of these slots was found.
        """
        replicas, slots = self.config.replicas, self.config.slot_multiple
        check(trie, self.config.capacity, replicas, slots)
        capacity = min(self.config.capacity or trie.compact_tokens, trie.compact_tokens)
        found = candidates(trie.index, capacity, replicas * slots, self.config.exact_limit)
        if not found:
            room = counted(capacity, "compact token", "compact tokens")
            raise PlanError(  # at least two trajectories: one alone always has its microbatch
                f"{trie.batch.source}: found no way to put {len(trie.order)} trajectories into microbatches of at most "
                f"{room} whose number is a multiple of {slots_of(replicas, slots)}; the search is heuristic: raising "
                f"the capacity or lowering the replicas helps"
            )
        return Partitions(
            trie=trie,
            capacity=self.config.capacity,
            replicas=replicas,
            names=tuple(candidate.name for candidate in found),
            microbatch=np.stack([candidate.label for candidate in found]).astype(np.int32),
        )


def counted(count: int, one: str, many: str) -> str:
    """A number and its noun."""
    return f"{count} {one if count == 1 else many}"


def slots_of(replicas: int, slot_multiple: int) -> str:
    """What the number of microbatches is a multiple of."""
    slots = f" x {slot_multiple} slots" if slot_multiple > 1 else ""
    return counted(replicas, "replica", "replicas") + slots


def check(trie: CompactTrie, capacity: int | None, replicas: int, slot_multiple: int) -> None:
    """Raise PlanError for what no plan can serve."""
    source, length = trie.batch.source, trie.batch.columns.length
    if len(length) < replicas * slot_multiple:
        have = counted(len(length), "trajectory", "trajectories")
        raise PlanError(f"{source}: {have} cannot fill {slots_of(replicas, slot_multiple)}")
    limit = capacity or trie.compact_tokens
    long = np.flatnonzero(length > limit)
    if len(long):
        named = [f"trajectory {trie.batch.columns.names[i]!r} has {length[i]} tokens" for i in long[:SHOWN]]
        more = f", and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        room = counted(limit, "compact token", "compact tokens")
        raise PlanError(f"{source}: {', '.join(named)}{more}: more than the capacity of {room}")


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


def candidates(index: LcpIndex, capacity: int, multiple: int, exact_limit: int) -> list[Candidate]:
    """All candidates, each partition once.

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
    unique: dict[bytes, Candidate] = {}
    for candidate in found:
        unique.setdefault(candidate.label.tobytes(), candidate)
    return list(unique.values())


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
