"""A made-up pipeline of integers for tests of the machinery: count, split into microbatches, square, shift."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import PositiveInt

from harts import registry
from harts.errors import PlanError
from harts.ir import PerMicrobatch, StepPlan, Value
from harts.ir.base import Dims, Int64, Invariant
from harts.stages.base import Stage, StageConfig

FILE = """\
pipeline: [ingest, partition, call_plan, layout]
ingest: {type: count, count: 10}
partition: {type: split, parts: 3}
call_plan: {type: square}
layout: {type: shift, by: 5}
observe: {progress: false}
"""


@dataclass(frozen=True, eq=False)
class Numbers(Value):
    kind = "toy_numbers"

    values: Annotated[Int64, Dims("N")]

    def invariants(self) -> Iterator[Invariant]:
        yield Invariant("values", self.values < 0, "must not be negative")


@dataclass(frozen=True, eq=False)
class Part(Value):
    kind = "toy_part"

    whole: Numbers
    values: Annotated[Int64, Dims("N")]


@dataclass(frozen=True, eq=False)
class Squares(Value):
    kind = "toy_squares"

    part: Part
    values: Annotated[Int64, Dims("N")]


@dataclass(frozen=True, eq=False)
class Shifted(Value):
    kind = "toy_shifted"

    squares: Squares
    values: Annotated[Int64, Dims("N")]


class Count(Stage[None, Numbers]):
    class Config(StageConfig):
        count: PositiveInt
        first: int = 0

    def run(self, value: None, /) -> Numbers:
        return Numbers(np.arange(self.config.first, self.config.first + self.config.count))


class Split(Stage[Numbers, PerMicrobatch[Part]]):
    class Config(StageConfig):
        parts: PositiveInt

    def run(self, value: Numbers, /) -> PerMicrobatch[Part]:
        pieces = np.array_split(value.values, self.config.parts)
        work = np.array([len(piece) for piece in pieces])
        return PerMicrobatch(step_of(work), tuple(Part(value, piece) for piece in pieces))


def step_of(work: Int64) -> StepPlan:
    total = int(work.sum())
    microbatch = np.repeat(np.arange(len(work), dtype=np.int32), work)
    scores = np.array([[total, total, total]])
    return StepPlan(
        source="toy",
        capacity=None,
        replicas=1,
        microbatch=microbatch,
        work=work,
        cost=work,
        unit="compact tokens",
        objective="paper",
        lower_bound=total,
        candidates=("only",),
        scores=scores,
        chosen=0,
        semantic_tokens=total,
        compact_tokens=total,
        trained_tokens=total,
        trained_trajectories=total,
    )


class Square(Stage[Part, Squares]):
    class Config(StageConfig):
        fails_at: int | None = None

    def run(self, part: Part, /) -> Squares:
        if self.config.fails_at in part.values:
            raise PlanError(f"{self.config.fails_at} cannot be squared")
        return Squares(part, part.values**2)


class Shift(Stage[Squares, Shifted]):
    class Config(StageConfig):
        by: int

    def run(self, squares: Squares, /) -> Shifted:
        return Shifted(squares, squares.values + self.config.by)


class WantsNumbers(Stage[Numbers, Shifted]):
    def run(self, value: Numbers, /) -> Shifted:
        raise NotImplementedError


def register_toys(monkeypatch) -> None:
    """Register the stages above, until the test ends."""
    monkeypatch.setattr(registry, "_added", {})
    for kind, name, cls in (
        ("ingest", "count", Count),
        ("partition", "split", Split),
        ("call_plan", "square", Square),
        ("layout", "shift", Shift),
        ("layout", "wants_numbers", WantsNumbers),
    ):
        registry.register(kind, name, f"{__name__}:{cls.__name__}", "toys")
