"""A step's plan as one file a microbatch, so that a training process reads only the microbatches that it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harts.errors import CodecError
from harts.ir.base import Value
from harts.ir.codec import load, save
from harts.ir.step_plan import PerMicrobatch, StepPlan

STEP = "step.harts"


def save_shards(value: PerMicrobatch[Any], folder: str | Path) -> None:
    """Write the step plan and each microbatch's value to files of their own: `step.harts`, `microbatch_0000.harts`, ...

    Raises:
        CodecError: as `save`.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("microbatch_*.harts"):  # of an earlier plan, which may have had more
            stale.unlink()
    except OSError as error:
        raise CodecError(f"{folder}: cannot be made ready: {error.strerror}") from error
    for index, item in enumerate(value.items):
        save(item, folder / _name(index))
    save(value.step, folder / STEP)


def load_step(folder: str | Path) -> StepPlan:
    """Read the step plan of a folder of shards.

    Raises:
        CodecError: as `load`, or the file holds something else.
    """
    step = load(Path(folder) / STEP)
    if not isinstance(step, StepPlan):
        raise CodecError(f"{Path(folder) / STEP}: holds a {step.kind}, wanted is a step_plan")
    return step


def load_microbatch(folder: str | Path, index: int) -> Value:
    """Read one microbatch's value; microbatch j * D + d is replica d's in slot j.

    Raises:
        CodecError: as `load`.
    """
    return load(Path(folder) / _name(index))


def _name(index: int) -> str:
    return f"microbatch_{index:04}.harts"
