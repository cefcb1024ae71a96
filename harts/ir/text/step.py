"""Text of what a whole step is: its batch, its trie, its partitions and its plan."""

from __future__ import annotations

from collections.abc import Iterator

from harts.ir.base import array_fields
from harts.ir.compact_trie import CompactTrie
from harts.ir.partitions import Partitions
from harts.ir.rollout_batch import Columns, RolloutBatch
from harts.ir.step_plan import StepPlan
from harts.ir.text.pieces import spans, statistics, table, word, wrapped


def rollout_batch(batch: RolloutBatch) -> Iterator[str]:
    """Where the batch came from, its sizes and its columns."""
    yield f"rollout_batch v{batch.version}  N={len(batch.columns)} S={len(batch.tokens)}"
    yield f"  source: {batch.source!r}"
    yield f"  tokens: {statistics(batch.tokens)}"
    yield from _columns(batch.columns)


def columns(value: Columns) -> Iterator[str]:
    """Sizes, and the statistics of each column that is present."""
    yield f"columns v{value.version}  N={len(value)} S={len(value.loss_mask)}"
    yield from _columns(value)


def _columns(value: Columns) -> Iterator[str]:
    yield f"  groups: {len(value.groups)}"
    if len(value):
        yield f"  tokens per trajectory: {statistics(value.length)}"
    rows, absent = [], []
    for spec in array_fields(Columns):
        array = getattr(value, spec.name)
        if spec.name in ("offset", "group"):
            continue
        if array is None:
            absent.append(spec.name)
        else:
            rows.append((spec.name, "token" if spec.dims.names == ("S",) else "trajectory", statistics(array)))
    yield from table(2, ("column", "one a", "values"), rows)
    if absent:
        yield from wrapped(2, ["absent:", *absent])


def compact_trie(trie: CompactTrie) -> Iterator[str]:
    """One line a trajectory in sorted order: how much it shares with the one before it."""
    sizes = f"N={len(trie.order)} S={trie.semantic_tokens} C={trie.compact_tokens}"
    yield f"compact_trie v{trie.version}  {sizes} shared_trained_token={trie.shared_trained_token}"
    order, names, offset = trie.order.tolist(), trie.batch.columns.names, trie.batch.columns.offset
    trained = [int(trie.loss_mask[offset[i] : offset[i + 1]].sum()) for i in order]
    named = [word(names[i]) for i in order]
    rows = zip(range(len(order)), order, named, trie.length.tolist(), trie.lcp.tolist(), trained, strict=True)
    yield from table(2, ("sorted", "row", "name", "tokens", "lcp", "trained"), rows)


def partitions(value: Partitions) -> Iterator[str]:
    """One line a candidate, then the sorted positions of each candidate's microbatches."""
    count, size = value.microbatch.shape
    limit = "none" if value.capacity is None else value.capacity
    yield f"partitions v{value.version}  Q={count} N={size} D={value.replicas} capacity={limit}"
    yield f"  objective: {value.objective}, costs in {value.unit}; at least {value.lower_bound} compact tokens"
    work = [value.work(i).tolist() for i in range(count)]
    cost = [int(value.costs(i).sum()) for i in range(count)]
    rows = [(i, word(value.names[i]), len(work[i]), sum(work[i]), max(work[i]), cost[i]) for i in range(count)]
    yield from table(2, ("candidate", "name", "microbatches", "work", "heaviest", "cost"), rows)
    for i in range(count):
        yield f"  candidate {i}, by sorted position"
        for k, part in enumerate(value.members(i)):
            yield from wrapped(4, [f"m{k}:", f"work {work[i][k]},", *spans(part)])


def step_plan(plan: StepPlan) -> Iterator[str]:
    """Totals, the candidates with their objective, and the trajectories of each microbatch."""
    count, replicas = len(plan.work), plan.replicas
    limit = "none" if plan.capacity is None else plan.capacity
    sizes = f"N={len(plan.microbatch)} K={count} D={replicas} slots={plan.slots} capacity={limit}"
    yield f"step_plan v{plan.version}  {sizes}"
    yield f"  source: {plan.source!r}"
    yield f"  tokens: S={plan.semantic_tokens} C={plan.compact_tokens} C in microbatches={int(plan.work.sum())}"
    bound = f"at least {plan.lower_bound}, for the slots' heaviest {plan.slot_critical_bound}"
    yield f"  bound: {bound}{'; optimal' if plan.optimal else ''}"
    yield f"  objective: {plan.objective}, costs in {plan.unit}"
    yield f"  trained: {plan.trained_tokens} tokens, {plan.trained_trajectories} trajectories"
    marks = ["chosen" if i == plan.chosen else "" for i in range(len(plan.candidates))]
    named = [word(name) for name in plan.candidates]
    rows = [(*each, *score) for *each, score in zip(marks, named, plan.scores.tolist(), strict=True)]
    yield from table(2, ("", "candidate", "cost", "slots' heaviest", "heaviest replica"), rows)
    for k, (work, cost) in enumerate(zip(plan.work.tolist(), plan.cost.tolist(), strict=True)):
        where = f"m{k}: slot {k // replicas}, replica {k % replicas}, work {work}, cost {cost}, trajectories"
        yield from wrapped(2, [where, *spans((plan.microbatch == k).nonzero()[0])])
