"""Train the same steps compactly and flat from the same weights, judge parity, and only then give a time ratio."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harts.errors import BackendError
from harts.ir import CompactLayout, PerMicrobatch
from harts.train.agreement import agree, several
from harts.train.check import TOLERANCE
from harts.train.config import TrainConfig
from harts.train.differences import Differences, differences, gradient_errors
from harts.train.objectives import Objective
from harts.train.step import apply_step, run_step
from harts.train.totals import StepResult


@dataclass(frozen=True)
class Comparison:
    """Compact against flat, over all steps."""

    steps: tuple[Differences, ...]
    compact: tuple[StepResult, ...]
    flat: tuple[StepResult, ...]
    tolerance: float
    compression: float
    """Rows of the flat run over rows of the compact run."""

    @property
    def faults(self) -> list[str]:
        """Why parity fails, each with its step; empty if it holds."""
        return [f"step {i}: {fault}" for i, step in enumerate(self.steps, 1) for fault in step.faults(self.tolerance)]

    @property
    def passed(self) -> bool:
        """Whether parity holds in every step."""
        return not self.faults

    @property
    def seconds(self) -> tuple[float, float]:
        """Forward and backward of all steps, compact and flat."""
        return sum(step.seconds for step in self.compact), sum(step.seconds for step in self.flat)

    @property
    def time_ratio(self) -> float | None:
        """Seconds flat over seconds compact; None if parity fails, because a wrong result has no speed."""
        compact, flat = self.seconds
        return flat / compact if self.passed else None


@dataclass(frozen=True)
class Trainer:
    """What both runs have in common."""

    execute: Any
    """Stage CompactLayout -> CompactOutputs whose `env` holds the model."""
    restore: Any
    """Stage CompactOutputs -> SemanticOutputs."""
    objective: Objective
    config: TrainConfig

    def steps(
        self, layouts: PerMicrobatch[CompactLayout], on_microbatch: Callable[[int, int], None] | None = None
    ) -> Iterator[StepResult]:
        """Train `config.steps` steps from the model's present weights; each is given out before its update.

        Args:
            layouts: of the step.
            on_microbatch: called with (step, microbatch), both from 0, after each microbatch.

        Raises:
            PlanError: other ranks hold another plan.
            HartsError: a loss or a gradient is not finite.
        """
        if several():
            agree(layouts)
        env = self.execute.env
        optimizer = env.model.optimizer(self.config.optimizer, self.config.learning_rate)
        for step in range(self.config.steps):
            told = None if on_microbatch is None else partial(on_microbatch, step)
            result = run_step(layouts, self.execute, self.restore, self.objective, self.config, on_microbatch=told)
            yield result
            apply_step(env, optimizer, result)

    def gradients(self) -> dict[str, Tensor]:
        """Gradient of every parameter; one that took no part has zeros."""
        named = self.execute.env.model.module.named_parameters()
        return {name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in named}


def compare(
    trainer: Trainer,
    compact: PerMicrobatch[CompactLayout],
    flat: PerMicrobatch[CompactLayout],
    on_microbatch: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Train on both layouts from the same weights. The compact run is first and pays for what a first run warms up.

    Args:
        trainer: its model's weights are where both runs start; the compact run's are left in it.
        compact: layouts of the step.
        flat: layouts of the same trajectories, each its own chain.
        on_microbatch: called with ("compact" or "flat", step, microbatch) after each microbatch.

    Raises:
        BackendError: no bound is known for the model's dtype.
        HartsError: a loss or a gradient is not finite.
    """
    env = trainer.execute.env
    if env.dtype not in TOLERANCE:
        known = ", ".join(str(dtype) for dtype in TOLERANCE)
        raise BackendError(f"compare: no parity bound is set for {env.dtype}; known: {known}")
    module = env.model.module
    start = copy.deepcopy(module.state_dict())
    told = [None if on_microbatch is None else partial(on_microbatch, name) for name in ("compact", "flat")]
    ours = [(result, copy.deepcopy(trainer.gradients())) for result in trainer.steps(compact, told[0])]
    trained = copy.deepcopy(module.state_dict())
    module.load_state_dict(start)
    theirs, steps = [], []
    for (result, gradients), other in zip(ours, trainer.steps(flat, told[1]), strict=True):
        steps.append(differences(result, other, gradient_errors(gradients, trainer.gradients())))
        theirs.append(other)
    module.load_state_dict(trained)
    return Comparison(
        steps=tuple(steps),
        compact=tuple(result for result, _ in ours),
        flat=tuple(theirs),
        tolerance=TOLERANCE[env.dtype],
        compression=_rows(flat) / _rows(compact),
    )


def _rows(layouts: PerMicrobatch[CompactLayout]) -> int:
    return sum(layout.rows for layout in layouts.items)
