"""Measured coefficients of a model on a device: the JSON file that `harts calibrate` writes, and the shipped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from harts.errors import ConfigError
from harts.schema import StageConfig

SHIPPED = Path(__file__).parent / "tables"
"""Folder of the tables that come with the package, NAME.json."""

Nanoseconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Coefficients(StageConfig):
    """Forward and backward of one microbatch, in nanoseconds for each occurrence."""

    fixed: Nanoseconds
    """Of a microbatch, whatever is in it."""
    row: Nanoseconds
    """Of a compact row."""
    replay_row: Nanoseconds
    """Of a replayed row."""
    pair: Nanoseconds
    """Of a query and a key that it sees."""
    state: Nanoseconds
    """Of an input sequence that starts from a requested state."""
    round: Nanoseconds
    """Of a round: one more dependent call in every linear-attention layer."""


class FitError(StageConfig):
    """Relative error of predicted against measured time, on microbatches that the fit has not seen."""

    microbatches: PositiveInt
    median: Share
    maximum: Share


class Measured(StageConfig):
    """What the coefficients were measured on."""

    sections: dict[str, dict[str, Any]]
    """`model`, `linear_attention`, `full_attention`, `execute` and `restore` of the pipeline file."""
    chunk_size: PositiveInt
    """Tokens of a linear-attention chunk."""
    dtype: str
    device: str
    """Name of the hardware."""
    torch: str
    harts: str
    """Versions."""
    date: str
    """ISO 8601, UTC."""
    microbatches: PositiveInt
    """That were fitted; those of the error come on top."""
    rows: tuple[PositiveInt, PositiveInt]
    """Compact rows of the smallest and the largest; beyond, costs are extrapolated."""
    rounds: NonNegativeInt
    """Most rounds of one."""
    repeats: PositiveInt
    """Runs of each, after one to warm up; the fastest counts."""


class Table(StageConfig):
    """The whole file."""

    version: Literal[1] = 1
    unit: Literal["ns"] = "ns"
    coefficients: Coefficients
    error: FitError
    measured: Measured


def shipped() -> list[str]:
    """Names of the tables that come with the package."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


def read_table(table: str | Path) -> Table:
    """Read a table.

    Args:
        table: the name of a shipped one, or the path of a file.

    Raises:
        ConfigError: it does not exist, or its content is wrong; file and fields are named.
    """
    if isinstance(table, str) and table not in shipped():
        known = ", ".join(shipped()) or "none"
        raise ConfigError(f"table: {table} is no shipped table; known: {known}; the path of a file holds a . or a /")
    path = SHIPPED / f"{table}.json" if isinstance(table, str) else table
    try:
        return Table.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"table: {path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors()]
        raise ConfigError(f"table: {path}: {'; '.join(faults)}") from error


def write_table(table: Table, path: Path) -> None:
    """Write a table as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(table.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
