"""One trajectory as typed values, and the rules that its values must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from harts.ir import Columns, RolloutBatch
from harts.ir.base import Bool, Float64
from harts.ir.rollout_batch import TOKEN_COLUMNS, TRAJECTORY_COLUMNS
from harts.stages.ingest import values
from harts.stages.ingest.faults import RecordFaults
from harts.stages.ingest.names import FRONT_ONLY, REQUIRED, misnamed

Row = Mapping[str, Any]
"""Field -> typed value; a field that the trajectory does not hold is not there."""

READERS: dict[str, Callable[[Any], Any]] = {
    "id": values.label,
    "group": values.label,
    "tokens": values.token_ids,
    **dict.fromkeys(TRAJECTORY_COLUMNS, values.number),
    **dict.fromkeys(TOKEN_COLUMNS, values.floats),
    "loss_mask": values.mask,
    "reward_known": values.flag,
    "parent": values.label,
    "shared_length": values.count,
}


def read_row(record: Mapping[str, Any], faults: RecordFaults) -> Row:
    """Read the known fields of a record in the full form; null is the same as absent.

    A reward that `reward_known: false` marks as a placeholder becomes NaN, which says unknown.
    """
    for field, meant in misnamed(record):
        faults.add(field, f"is unknown; did you mean {meant}?")
    for field in FRONT_ONLY:
        if field in record:
            faults.add(field, 'belongs to the front-coded form, whose first line is {"format":"rollout-front-1"}')
    row: dict[str, Any] = {}
    for field, reader in READERS.items():
        value = faults.read(record, field, reader, required=field in REQUIRED)
        if value is not None:
            row[field] = value
    if "parent" in row and record.get("shared_length") is None:
        faults.add("shared_length", "is missing, parent needs it")
    if row.get("shared_length") and record.get("parent") is None:
        faults.add("parent", f"is missing, shared_length {row['shared_length']} needs it")
    placeholder = row.get("reward_known") is False
    for field, what in row_faults({k: v for k, v in row.items() if k != "reward" or not placeholder}):
        faults.add(field, what)
    if placeholder:
        row["reward"] = np.nan
    return row


def rows_of(batch: RolloutBatch) -> Iterator[Row]:
    """The trajectories of a verified batch; a NaN reward says unknown, so it is left out."""
    columns = batch.columns
    for i, name in enumerate(columns.names):
        span = slice(columns.offset[i], columns.offset[i + 1])
        row: dict[str, Any] = {"id": name, "tokens": batch.tokens[span]}
        row |= {field: getattr(columns, field)[i] for field in _held(columns, TRAJECTORY_COLUMNS)}
        row |= {field: getattr(columns, field)[span] for field in _held(columns, TOKEN_COLUMNS)}
        if np.isnan(row.get("reward", 0.0)):
            del row["reward"]
        yield row


def _held(columns: Columns, fields: tuple[str, ...]) -> Iterator[str]:
    return (field for field in fields if getattr(columns, field) is not None)


def row_faults(row: Row) -> Iterator[tuple[str, str]]:
    """Faults of the values of one trajectory, as (field, what).

    A value must be finite where it is read: at trained tokens, the first token apart, which has no log-prob. What
    stands elsewhere is kept as it is and has no effect. Temperatures divide every token's logits, trained or not.
    """
    for field in ("advantage", "weight", "temperature"):
        if field in row and field + "s" in row:
            yield field, f"excludes {field}s: give one value a trajectory or one a token"
    if not row.get("temperature", 1.0) > 0 or np.isinf(row.get("temperature", 1.0)):
        yield "temperature", f"is {row['temperature']}, must be positive and finite"
    if "tokens" not in row:
        return
    if len(row["tokens"]) == 0:
        yield "tokens", "has 0 entries, a trajectory must have at least 1 token"
    yield from _token_faults(row, len(row["tokens"]))


def _token_faults(row: Row, length: int) -> Iterator[tuple[str, str]]:
    aligned = [field for field in TOKEN_COLUMNS if field in row and len(row[field]) == length]
    for field in TOKEN_COLUMNS:
        if field in row and field not in aligned:
            yield field, f"has {len(row[field])} entries, expected {length}, one for each token"
    if "temperatures" in aligned:
        heat = row["temperatures"]
        bad = ~(np.isfinite(heat) & (heat > 0))
        bad[:1] = False
        yield from _first("temperatures", bad, heat, "temperatures must be positive and finite")
    if "loss_mask" not in aligned:
        return
    trained = row["loss_mask"].copy()
    trained[:1] = False
    for field in ("advantages", "old_logprobs", "ref_logprobs", "weights"):
        if field in aligned:
            what = "a trained token's value must be finite"
            yield from _first(field, trained & ~np.isfinite(row[field]), row[field], what)
    for field in ("reward", "advantage", "weight"):
        if trained.any() and not np.isfinite(row.get(field, 0.0)):
            yield field, f"is {row[field]}, must be finite: {np.count_nonzero(trained)} tokens are trained"


def _first(field: str, bad: Bool, column: Float64, rule: str) -> Iterator[tuple[str, str]]:
    where = np.flatnonzero(bad)
    if where.size:
        yield field, f"entry {where[0]} is {column[where[0]]}, {rule} ({where.size} of {len(column)} are not)"
