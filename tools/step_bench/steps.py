"""One step planned for both sides: microbatches of the plan, and of the same trajectories without sharing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harts.errors import InputError
from harts.ir import CompactLayout, PerMicrobatch, RolloutBatch, SegmentTree
from harts.ir.base import Float64, Int64
from harts.pipeline import Pipeline
from harts.registry import resolve
from harts.train.reduction import trained_positions
from step_bench.processes import gathered

WHOLE = ("ingest", "partition", "schedule")
"""Planning of all trajectories together."""


class Microbatch(NamedTuple):
    """What one forward and backward pass takes."""

    layout: CompactLayout
    trained: Tensor
    """Which of the S - N log-probs are in the loss, int64 on the device, [M]."""
    weight: Tensor
    """Of each of them, float64 on the device, [M]."""

    @property
    def rows(self) -> int:
        """Without padding."""
        return self.layout.rows

    def logit_rows(self, *, all_positions: bool) -> int:
        """Rows whose logits are needed: of all predictions, or of trained ones."""
        columns = self.layout.plan.tree.columns
        rows = self.layout.semantic_map.rows()[columns.predicted() - 1]
        return len(np.unique(rows if all_positions else rows[self.trained.cpu().numpy()]))


class Side(NamedTuple):
    """HARTS or flat."""

    name: str
    microbatches: tuple[Microbatch, ...]

    @property
    def rows(self) -> int:
        """Of all microbatches, without padding."""
        return sum(each.rows for each in self.microbatches)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head of one layer, of all microbatches."""
        return sum(pairs(each.layout.plan.tree) for each in self.microbatches)

    @property
    def padded_rows(self) -> int:
        """Rows that nobody owns, of all microbatches."""
        return sum(len(each.layout.input_ids) - each.rows for each in self.microbatches)


class Planned(NamedTuple):
    """A step after the schedule stage, and what that took."""

    batch: RolloutBatch
    trees: PerMicrobatch[SegmentTree]
    seconds: dict[str, float]
    """Of each stage of `WHOLE`."""


class Loss(NamedTuple):
    """The loss of a step: log-probs, negative, weighted and summed."""

    seed: int
    """Of the weights."""
    total: float
    """Sum of all weights, which are divided by it."""
    device: str

    def of(self, layouts: Iterable[CompactLayout]) -> tuple[Microbatch, ...]:
        """Microbatches with their share of the weights."""
        return tuple(self._microbatch(layout) for layout in layouts)

    def _microbatch(self, layout: CompactLayout) -> Microbatch:
        tree = layout.plan.tree
        trained = trained_positions(tree.columns)
        weight = weights(tree, self.seed) / self.total
        return Microbatch(layout, *(torch.from_numpy(each).to(self.device) for each in (trained, weight)))


class Cut(NamedTuple):
    """Some microbatches of a step, and the same trajectories without sharing."""

    ours: Side
    flat: Side
    keys: Int64
    """Rows of the trajectories in the batch, ascending."""
    loss: Loss
    seconds: dict[str, float]
    """Planning: the part of `WHOLE` that falls to these trajectories by their tokens, and the stages of the process's
    own microbatches; the slowest process's."""

    @property
    def compression(self) -> float:
        """S / C."""
        return self.flat.rows / self.ours.rows


def pairs(tree: SegmentTree) -> int:
    """Pairs of a query and a key that it sees: a token sees itself and all before it on its path."""
    return triangles(tree.end) - triangles(tree.start)


def triangles(length: Int64) -> int:
    """Pairs of trajectories of some lengths, each by itself."""
    return int((length * (length + 1) // 2).sum())


def plan(pipeline: Pipeline, batch: RolloutBatch) -> Planned:
    """Plan a step twice and time the second run: what is compiled once a machine does not count."""
    for _ in range(2):
        value: Any = batch
        seconds = {}
        for kind in WHOLE:
            begin = time.perf_counter()
            value = pipeline.stage(kind).run(value)
            seconds[kind] = time.perf_counter() - begin
    return Planned(batch, value, seconds)


def cut(pipeline: Pipeline, planned: Planned, members: Sequence[int], seed: int, device: str) -> Cut:
    """Lay out some microbatches of a step, and the same trajectories in flat microbatches of the same capacity.

    Raises:
        InputError: none of the trajectories has a trained token.
    """
    trees = [planned.trees.items[i] for i in members]
    keys = np.sort(np.concatenate([tree.key for tree in trees]))
    tokens = int(planned.batch.columns.length[keys].sum())
    share = tokens / planned.trees.step.semantic_tokens
    seconds = {kind: share * planned.seconds[kind] for kind in WHOLE}
    split = pipeline.env.model.split
    layouts: list[Any] = list(trees)
    for kind in ("call_plan", "layout"):
        seconds[kind] = 0.0
        for number, value in enumerate(layouts):
            begin = time.perf_counter()
            layouts[number] = pipeline.stage(kind).run(value)
            seconds[kind] += (number % split.replicas == split.replica) * (time.perf_counter() - begin)
    seconds = {kind: max(told[kind] for told in gathered(seconds)) for kind in seconds}
    loss = Loss(seed, sum(float(weights(tree, seed).sum()) for tree in trees), device)
    if not loss.total:
        raise InputError(f"{planned.batch.source}: none of the {len(keys)} trajectories has a trained token")
    bins = evened(planned.batch, packed(planned.batch, keys, _capacity(pipeline, tokens)), split.replicas)
    flat = Side("flat", loss.of(flat_layouts(pipeline, planned.batch, bins)))
    return Cut(Side("HARTS", loss.of(layouts)), flat, keys, loss, seconds)


def repacked(pipeline: Pipeline, batch: RolloutBatch, made: Cut) -> Side:
    """The flat side in other microbatches, as a shuffled data loader would pack it."""
    order = np.random.default_rng(made.loss.seed).permutation(made.keys)
    bins = packed(batch, order, _capacity(pipeline, made.flat.rows), sort=False)
    bins = evened(batch, bins, pipeline.env.model.split.replicas)
    return Side("repacked", made.loss.of(flat_layouts(pipeline, batch, bins)))


def _capacity(pipeline: Pipeline, otherwise: int) -> int:
    found: Any = pipeline.settings.components["partition"].config
    return int(found.capacity or otherwise)


def packed(batch: RolloutBatch, keys: Int64, capacity: int, *, sort: bool = True) -> list[Int64]:
    """Pack whole trajectories into microbatches, each into the fullest one that has room.

    Args:
        batch: of the step.
        keys: trajectories of it.
        capacity: rows of a microbatch; no trajectory is longer.
        sort: longest first, which leaves least room; otherwise in the order of `keys`.

    Returns:
        Trajectories of each microbatch, ascending.
    """
    length = batch.columns.length
    order = keys[np.argsort(-length[keys], kind="stable")] if sort else keys
    room: list[int] = []
    bins: list[list[int]] = []
    for key in order.tolist():
        size = int(length[key])
        fits = [(left, i) for i, left in enumerate(room) if left >= size]
        if not fits:
            room.append(capacity)
            bins.append([])
        i = min(fits)[1] if fits else len(room) - 1
        room[i] -= size
        bins[i].append(key)
    return [np.sort(np.array(each, dtype=np.int64)) for each in bins]


def evened(batch: RolloutBatch, bins: list[Int64], replicas: int) -> list[Int64]:
    """As many microbatches for each replica, those of a slot alike in rows; the fullest that can be are halved for it.

    Raises:
        InputError: there are fewer trajectories than replicas.
    """
    if replicas == 1:
        return bins
    length = batch.columns.length
    made = list(bins)
    while len(made) % replicas:
        several = [i for i, members in enumerate(made) if len(members) > 1]
        if not several:
            raise InputError(f"{batch.source}: {len(made)} trajectories cannot be shared by {replicas} replicas")
        members = made.pop(max(several, key=lambda i: int(length[made[i]].sum())))
        filled = np.cumsum(length[members])
        half = int(np.searchsorted(filled, filled[-1] / 2).clip(1, len(members) - 1))
        made += [members[:half], members[half:]]
    return sorted(made, key=lambda members: -int(length[members].sum()))


def flat_layouts(pipeline: Pipeline, batch: RolloutBatch, bins: Iterable[Int64]) -> list[CompactLayout]:
    """Every trajectory its own chain, by the call plan `flat` and the pipeline's layout stage."""
    kind = resolve("call_plan", "flat")
    config: Any = pipeline.settings.components["call_plan"].config
    flat = kind(kind.Config(chunk_size=config.chunk_size))
    return [pipeline.stage("layout").run(flat.run(chains(batch, members))) for members in bins]


def chains(batch: RolloutBatch, members: Int64) -> SegmentTree:
    """Trajectories of a batch as a tree without a fork: each is one root segment."""
    columns = batch.columns.take(members)
    spans = zip(batch.columns.offset[members], batch.columns.offset[members + 1], strict=True)
    return SegmentTree(
        parent=np.full(len(members), -1, dtype=np.int32),
        start=np.zeros(len(members), dtype=np.int64),
        offset=columns.offset,
        tokens=np.concatenate([batch.tokens[a:b] for a, b in spans]),
        key=members,
        tail=np.arange(len(members), dtype=np.int32),
        columns=columns,
    )


def weights(tree: SegmentTree, seed: int) -> Float64:
    """Of each trained position, [M]: a trajectory's are the same in any microbatch."""
    columns = tree.columns
    drawn = [
        np.random.default_rng([seed, key]).uniform(0.5, 1.5, size)
        for key, size in zip(tree.key.tolist(), columns.length.tolist(), strict=True)
    ]
    return np.concatenate(drawn)[columns.predicted()[trained_positions(columns)]]
