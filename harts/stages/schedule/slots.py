"""The schedule stage `slots`: rank fully scheduled candidates by the objective and pick one."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from harts.ir import CompactTrie, Partitions, PerMicrobatch, SegmentTree, StepPlan
from harts.ir.base import Int64
from harts.stages.base import Stage
from harts.stages.schedule.segments import segment_tree


class Slots(Stage[Partitions, PerMicrobatch[SegmentTree]]):
    """Give every microbatch a slot and a replica, take the best candidate, and build its microbatches' trees."""

    def run(self, partitions: Partitions, /) -> PerMicrobatch[SegmentTree]:
        """Schedule each candidate; of equal scores the first candidate wins."""
        trie = partitions.trie
        schedules = [assign(partitions.costs(i), partitions.replicas) for i in range(len(partitions.names))]
        scores = [schedule.score for schedule in schedules]
        ranks = [ranked(score, partitions.objective) for score in scores]
        chosen = ranks.index(min(ranks))
        members = partitions.members(chosen)
        order = schedules[chosen].microbatch.reshape(-1)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        microbatch = np.empty(len(trie.order), dtype=np.int32)
        microbatch[trie.order] = number[partitions.microbatch[chosen]]
        trained, trajectories = trained_counts(trie)
        step = StepPlan(
            source=trie.batch.source,
            capacity=partitions.capacity,
            replicas=partitions.replicas,
            microbatch=microbatch,
            work=partitions.work(chosen)[order],
            cost=partitions.costs(chosen)[order],
            unit=partitions.unit,
            objective=partitions.objective,
            lower_bound=partitions.lower_bound,
            candidates=partitions.names,
            scores=np.array(scores, dtype=np.int64),
            chosen=chosen,
            semantic_tokens=trie.semantic_tokens,
            compact_tokens=trie.compact_tokens,
            trained_tokens=trained,
            trained_trajectories=trajectories,
        )
        return PerMicrobatch(step, tuple(segment_tree(trie, members[i]) for i in order))


class Schedule(NamedTuple):
    """Slots and replicas of one candidate."""

    microbatch: Int64
    """Microbatch of each slot and replica, [slots, D]."""
    score: tuple[int, int, int]
    """Objective (4): total cost, sum over slots of the heaviest, heaviest replica."""


def ranked(score: tuple[int, int, int], objective: str) -> tuple[int, int, int]:
    """What `paper` and `critical` compare, most important first."""
    total, critical, replica = score
    return score if objective == "paper" else (critical, total, replica)


def assign(cost: Int64, replicas: int) -> Schedule:
    """Sort by cost, cut into slots of D, and in a slot give heavier microbatches to replicas with less so far.

    Heaviest first, ties by number, so that the last slots even out what the first ones left uneven.

    Args:
        cost: of each microbatch, [K].
        replicas: D, which divides K.
    """
    by_cost = np.argsort(-cost, kind="stable").reshape(-1, replicas)
    slots = np.empty_like(by_cost)
    load = np.zeros(replicas, dtype=np.int64)
    for i, slot in enumerate(by_cost):
        lightest = np.argsort(load, kind="stable")
        slots[i, lightest] = slot
        load += cost[slots[i]]
    critical = int(cost[slots].max(axis=1).sum())
    return Schedule(slots, (int(cost.sum()), critical, int(load.max())))


def trained_counts(trie: CompactTrie) -> tuple[int, int]:
    """Tokens with a loss term, which a trajectory's first token never has, and trajectories with one or more."""
    spans = pairwise(trie.batch.columns.offset.tolist())
    per_trajectory = [int(np.count_nonzero(trie.loss_mask[start + 1 : stop])) for start, stop in spans]
    return sum(per_trajectory), int(np.count_nonzero(per_trajectory))
