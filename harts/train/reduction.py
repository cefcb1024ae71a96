"""How the loss terms of a step become one number: a weight for each position, with denominators over the whole step.

A microbatch only knows its own tokens, so a mean over a microbatch would make the gradient depend on how the step
was split. All weights here come from the step's totals: the shares of the microbatches add up to the step's loss.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import PositiveFloat, model_validator

from harts.errors import InputError
from harts.ir import Columns, StepPlan
from harts.ir.base import Float64, Int64
from harts.stages.base import StageConfig

Reduction = Literal["token_mean", "sequence_mean", "constant"]


class ReductionConfig(StageConfig):
    """Reduction of the step's loss terms."""

    reduction: Reduction = "token_mean"
    """token_mean: over the step's trained tokens. sequence_mean: over each trajectory's trained tokens, then over
    the step's trained trajectories. constant: the sum over `denominator`."""
    denominator: PositiveFloat | None = None
    """Divisor of `constant`, and of nothing else."""

    @model_validator(mode="after")
    def _denominator_belongs_to_constant(self) -> ReductionConfig:
        if (self.reduction == "constant") != (self.denominator is not None):
            rule = "needs a denominator" if self.denominator is None else "takes no denominator"
            raise ValueError(f"reduction {self.reduction} {rule}")
        return self


def trained_positions(columns: Columns) -> Int64:
    """Indices of the trained positions among the S - N predictions, ascending."""
    return np.flatnonzero(columns.loss_mask[columns.predicted()]).astype(np.int64)


def trained_values(columns: Columns, field: str, values: Float64 | None) -> Float64:
    """Select a token-aligned column's values at the trained positions; what stands elsewhere is never looked at.

    Args:
        columns: of the microbatch.
        field: name for the message.
        values: [S], or None if the data has no such column.

    Returns:
        One value a trained position.

    Raises:
        InputError: the column is missing, or not finite at a trained position.
    """
    if values is None:
        raise InputError(f"field {field}: the objective needs it, the rollouts do not have it")
    token = columns.predicted()[trained_positions(columns)]
    picked = values[token]
    bad = np.flatnonzero(~np.isfinite(picked))
    if bad.size:
        raise InputError(f"{columns.locate(int(token[bad[0]]))}: {field} is {picked[bad[0]]} on a trained token")
    return np.asarray(picked)


def position_weights(
    columns: Columns, step: StepPlan, reduction: Reduction, denominator: float | None = None
) -> Float64:
    """Weight of each prediction's loss term in the step's loss, zero where nothing is trained, [S - N].

    Args:
        columns: of the microbatch; its per-token weights multiply.
        step: totals of the whole step.
        reduction: see `ReductionConfig`.
        denominator: of `constant`.

    Raises:
        InputError: a trained position's weight is not finite.
    """
    token = columns.predicted()
    weights = np.zeros(len(token))
    here = trained_positions(columns)
    given = columns.per_token("weight")
    terms = np.ones(len(here)) if given is None else trained_values(columns, "weight", given)
    if reduction == "token_mean":
        terms = terms / max(step.trained_tokens, 1)
    elif reduction == "sequence_mean":
        owner = np.repeat(np.arange(len(columns)), columns.length)[token[here]]
        terms = terms / np.bincount(owner, minlength=len(columns))[owner] / max(step.trained_trajectories, 1)
    else:
        assert denominator is not None
        terms = terms / denominator
    weights[here] = terms
    return weights
