"""Which row predicts which token: a label is the next token of the same trajectory, never a physical neighbour."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harts.errors import BackendError, InputError
from harts.ir import Columns, CompactLayout
from harts.ir.base import Float64, Int64


class Predictions(NamedTuple):
    """The M = S - N next-token predictions of a microbatch, trajectory after trajectory."""

    row: Int64
    """Compact row that predicts, [M]."""
    target: Int64
    """Token id that is predicted, [M]."""
    inverse_temperature: Float64 | None
    """Factor on the logits, [M]; None is 1 everywhere."""

    def take(self, members: Int64) -> Predictions:
        """Some of the predictions, in the order given."""
        scale = self.inverse_temperature
        return Predictions(self.row[members], self.target[members], None if scale is None else scale[members])


def predictions(layout: CompactLayout, vocabulary: int) -> Predictions:
    """List what has to be read from the logits of the compact rows (equation 17).

    Args:
        layout: of the microbatch.
        vocabulary: rows of the LM head, V.

    Raises:
        BackendError: a target is not below V.
        InputError: a temperature is not positive and finite.
    """
    columns = layout.plan.tree.columns
    token = columns.predicted()
    rows = layout.semantic_map.rows()
    target = layout.input_ids[rows[token]].astype(np.int64)
    outside = np.flatnonzero(target >= vocabulary)
    if outside.size:
        where = columns.locate(int(token[outside[0]]))
        raise BackendError(f"{where}: id {target[outside[0]]} is outside the model's vocabulary of {vocabulary}")
    return Predictions(rows[token - 1], target, inverse_temperature(columns, token))


def inverse_temperature(columns: Columns, token: Int64) -> Float64 | None:
    """Factor on the logits that predict some tokens; None is 1 everywhere.

    Raises:
        InputError: a temperature or its inverse is not positive and finite.
    """
    values = columns.per_token("temperature")
    if values is None:
        return None
    picked = values[token]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = 1.0 / picked
        scales = np.isfinite(inverse.astype(np.float32)) & (inverse > 0)
    bad = np.flatnonzero(~(np.isfinite(picked) & scales))
    if bad.size:
        where = columns.locate(int(token[bad[0]]))
        raise InputError(f"{where}: temperature is {picked[bad[0]]}; it and its inverse must be positive and finite")
    return np.asarray(inverse)
