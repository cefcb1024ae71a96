"""What can be known to be wrong before anything is computed: settings that do not fit, rollouts that lack something."""

from __future__ import annotations

from typing import Any

import torch

from harts.errors import InputError
from harts.ir import CompactLayout, PerMicrobatch
from harts.stages.restore.labels import inverse_temperature
from harts.train.agreement import several
from harts.train.config import TrainConfig
from harts.train.objectives import Objective
from harts.train.reduction import trained_values

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference that passes, by the model's dtype.

Four-layer models on real rollouts stay below 2e-13 and 2e-5 over two AdamW steps (the worst is a gradient); wrong
states, windows or counts move a gradient by 0.3 and more.
"""


def setting_faults(objective: Objective, config: TrainConfig, restore: Any, dtype: torch.dtype) -> list[str]:
    """Every conflict between sections of a pipeline file.

    Args:
        objective: built.
        config: the train section.
        restore: config of the restore stage.
        dtype: of the model.
    """
    faults = []
    if objective.needs_entropy and not getattr(restore, "entropy", False):
        faults.append("train.objective.entropy_coefficient: is above 0, which needs restore.entropy: true")
    if config.compare is not None and several():
        faults.append("train.compare: compares in one process; of several, tools/parity_matrix.py does")
    if config.compare is not None and dtype not in TOLERANCE:
        known = ", ".join(str(each).removeprefix("torch.") for each in TOLERANCE)
        faults.append(f"train.compare: no parity bound is set for {str(dtype).removeprefix('torch.')}; known: {known}")
    return faults


def check_rollouts(layouts: PerMicrobatch[CompactLayout], objective: Objective, vocabulary: int) -> None:
    """Check a step's data against the objective and the model, before any device work.

    Raises:
        InputError: a column is missing or not finite at a trained token, a temperature cannot be divided by, or a token
            is outside the vocabulary; source, trajectory, field and numbers are named.
    """
    source = layouts.step.source
    for layout in layouts.items:
        columns = layout.plan.tree.columns
        try:
            for name in objective.columns:
                plain = name not in ("advantage", "weight", "temperature")
                trained_values(columns, name, getattr(columns, name) if plain else columns.per_token(name))
            inverse_temperature(columns, columns.predicted())
        except InputError as error:
            raise InputError(f"{source}: {error}") from error
        row = int(layout.input_ids.argmax())
        if layout.input_ids[row] >= vocabulary:
            place = columns.locate(int((layout.semantic_map.rows() == row).argmax()))
            raise InputError(
                f"{source}: {place}: token id {layout.input_ids[row]} is outside the model's vocabulary of {vocabulary}"
            )
