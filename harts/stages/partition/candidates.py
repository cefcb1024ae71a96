"""What every partition stage shares: its limits, what no plan can serve, and how candidates are handed over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import PositiveInt

from harts.errors import PlanError
from harts.ir import CompactTrie, Partitions
from harts.ir.base import Int64
from harts.ir.lcp import LcpIndex
from harts.ir.prefix_tree import prefix_tree, volume_bound
from harts.schema import StageConfig
from harts.stages.base import Stage
from harts.stages.partition.greedy import aligned
from harts.stages.partition.labels import sets_of
from harts.stages.partition.search.problem import Problem
from harts.work_models.base import WorkModel
from harts.work_models.compact import Compact

TOTAL_FIRST = 64
"""Weight of the total cost beside the slots' heaviest while searching after the objective `paper`."""
LARGEST = 1 << 55
"""Total cost that weights and slots still leave room for in 64 bits."""
SHOWN = 3
"""Trajectories that an error names."""


class PartitionConfig(StageConfig):
    """Limits of a partition, and what ranks candidates."""

    capacity: PositiveInt | None
    """Compact tokens that a microbatch may hold; null is no limit."""
    replicas: PositiveInt = 1
    """Data-parallel replicas D; the number of microbatches is a multiple of it."""
    slot_multiple: PositiveInt = 1
    """Slots of every replica are a multiple of it, as virtual pipeline stages ask."""
    objective: Literal["paper", "critical"] = "paper"
    """`paper` ranks by total cost, then by the slots' heaviest microbatches, summed; `critical` the other way round."""

    @property
    def multiple(self) -> int:
        """What the number of microbatches is a multiple of."""
        return self.replicas * self.slot_multiple

    def limit(self, trie: CompactTrie) -> int:
        """The capacity; that of one microbatch with everything if there is none."""
        return min(self.capacity or trie.compact_tokens, trie.compact_tokens)


class PartitionStage(Stage[CompactTrie, Partitions]):
    """A stage that searches in the measure of a work model; without one it counts compact tokens."""

    needs_work_model = True
    Config = PartitionConfig
    config: PartitionConfig

    def run(self, trie: CompactTrie, /) -> Partitions:
        """Make all candidates.

        Raises:
            PlanError: a trajectory is longer than the capacity, there are fewer trajectories than the slots that all
                replicas need, or no partition into a multiple of these slots was found.
        """
        check(trie, self.config)
        return handed_over(trie, self.config, self.work_model, self.candidates(trie))

    @abstractmethod
    def candidates(self, trie: CompactTrie) -> list[Candidate]:
        """Partitions within the capacity into a legal number of microbatches, if any were found."""

    @property
    def work_model(self) -> WorkModel:
        """The measure."""
        return self.env or Compact(Compact.Config())

    def problem(self, index: LcpIndex, trie: CompactTrie) -> Problem:
        """What a compiled search of some of a trie's trajectories reads: limits, work model and objective, too.

        Raises:
            PlanError: costs are too large to be added up and weighted in 64 bits.
        """
        tables = self.work_model.tables(int(trie.length.max()))
        most = len(trie.order) * int(tables.along[-1] + tables.fork.max())
        if most > LARGEST:
            raise PlanError(
                f"{trie.batch.source}: costs may add up to {most:.3g} {self.work_model.unit}: too large to search"
            )
        return Problem(
            length=index.length,
            lcp=index.lcp,
            minima=index.table,
            along=tables.along,
            fork=tables.fork,
            capacity=self.config.limit(trie),
            replicas=self.config.replicas,
            multiple=self.config.multiple,
            total_weight=TOTAL_FIRST if self.config.objective == "paper" else 1,
        )


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


def check(trie: CompactTrie, config: PartitionConfig) -> None:
    """Raise PlanError for what no plan can serve."""
    source, length = trie.batch.source, trie.batch.columns.length
    if len(length) < config.multiple:
        have = _counted(len(length), "trajectory", "trajectories")
        raise PlanError(f"{source}: {have} cannot fill {_slots_of(config)}")
    limit = config.capacity or trie.compact_tokens
    long = np.flatnonzero(length > limit)
    if len(long):
        named = [f"trajectory {trie.batch.columns.names[i]!r} has {length[i]} tokens" for i in long[:SHOWN]]
        more = f", and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        room = _counted(limit, "compact token", "compact tokens")
        raise PlanError(f"{source}: {', '.join(named)}{more}: more than the capacity of {room}")


def handed_over(
    trie: CompactTrie, config: PartitionConfig, model: WorkModel, candidates: Iterable[Candidate]
) -> Partitions:
    """All candidates, each partition once, with their costs and the bound.

    Raises:
        PlanError: there is no candidate.
    """
    unique: dict[bytes, Candidate] = {}
    for candidate in candidates:
        unique.setdefault(candidate.label.tobytes(), candidate)
    found = list(unique.values())
    if not found:
        room = _counted(config.limit(trie), "compact token", "compact tokens")
        raise PlanError(  # at least two trajectories: one alone always has its microbatch
            f"{trie.batch.source}: found no way to put {len(trie.order)} trajectories into microbatches of at most "
            f"{room} whose number is a multiple of {_slots_of(config)}; the search is heuristic: raising "
            f"the capacity or lowering the replicas helps"
        )
    return Partitions(
        trie=trie,
        capacity=config.capacity,
        replicas=config.replicas,
        objective=config.objective,
        lower_bound=volume_bound(prefix_tree(trie.length, trie.lcp), config.limit(trie), config.multiple),
        unit=model.unit,
        names=tuple(candidate.name for candidate in found),
        microbatch=np.stack([candidate.label for candidate in found]).astype(np.int32),
        cost=np.concatenate([costs(trie, model, candidate.label) for candidate in found]),
    )


def legal(name: str, index: LcpIndex, label: Int64, multiple: int) -> list[Candidate]:
    """A partition, split until `multiple` divides the number of its microbatches; empty if that cannot be.

    Args:
        name: of the candidate.
        index: LCPs of sorted positions.
        label: microbatch of each sorted position, from 0, [N].
        multiple: what the number of microbatches is a multiple of.
    """
    found = aligned(index, label, multiple)
    return [] if found is None else [Candidate(name, found)]


def costs(trie: CompactTrie, model: WorkModel, label: Int64) -> Int64:
    """Cost of each microbatch of one partition, [K]."""
    sets = sets_of(trie.index, label)
    by_microbatch = sets.key % len(label)
    return model.costs(trie.length[by_microbatch], sets.adjacent, np.cumsum(sets.size) - sets.size)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _slots_of(config: PartitionConfig) -> str:
    slots = f" x {config.slot_multiple} slots" if config.slot_multiple > 1 else ""
    return _counted(config.replicas, "replica", "replicas") + slots
