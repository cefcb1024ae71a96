"""The `train` section of a pipeline file, without its objective. Imports no torch: a file can be checked without it."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from harts.stages.base import StageConfig


class TrainConfig(StageConfig):
    """How the step trains."""

    steps: PositiveInt = 1
    """Optimizer steps, each over the whole batch."""
    learning_rate: PositiveFloat
    """Constant over the steps."""
    optimizer: Literal["sgd", "adamw"]
    """sgd without momentum; adamw with betas 0.9 and 0.999 and without weight decay."""
    router_z_coefficient: NonNegativeFloat = 0.0
    """Factor on the router z-loss, a mean over the step's semantic tokens (summed over layers)."""
    router_balance_coefficient: NonNegativeFloat = 0.0
    """Factor on the balance loss, a mean over microbatches weighted by their semantic tokens (summed over layers)."""
    compare: Literal["flat"] | None = None
    """flat: train the same steps trajectory by trajectory too, and compare."""
