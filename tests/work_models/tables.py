"""Tables with made-up coefficients."""

from __future__ import annotations

from pathlib import Path

from harts.work_models.calibrated import Calibrated
from harts.work_models.table import Coefficients, FitError, Measured, Table, write_table

COEFFICIENTS = {"fixed": 9001.0, "row": 701.0, "replay_row": 311.0, "pair": 3.0, "state": 2003.0, "round": 50021.0}
"""Whole numbers, so that costs of counts are exact."""


def table_of(**coefficients: float) -> Table:
    return Table(
        coefficients=Coefficients(**(COEFFICIENTS | coefficients)),
        error=FitError(microbatches=1, median=0.0, maximum=0.0),
        measured=Measured(
            sections={"model": {"type": "made up"}},
            chunk_size=16,
            dtype="float32",
            device="made up",
            torch="0",
            harts="0",
            date="2026-01-01T00:00:00+00:00",
            microbatches=1,
            rows=(1, 2),
            rounds=1,
            repeats=1,
        ),
    )


def written(folder: Path, **coefficients: float) -> Path:
    path = folder / "table.json"
    write_table(table_of(**coefficients), path)
    return path


def model_of(folder: Path, chunk_size: int, **coefficients: float) -> Calibrated:
    return Calibrated(Calibrated.Config(table=written(folder, **coefficients), chunk_size=chunk_size))
