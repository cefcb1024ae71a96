"""`harts calibrate`: from a pipeline file to a table of what microbatches cost on its device."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from harts.cli.output import printed, result
from harts.cli.training import check_settings
from harts.config import load_settings
from harts.errors import ConfigError
from harts.pipeline import Pipeline
from harts.work_models.counts import TERMS
from harts.work_models.table import write_table

if TYPE_CHECKING:
    from harts.work_models.table import Table


def calibrate(given: Namespace) -> int:
    """Measure, fit, print the table, and write it if the command says where."""
    settings = load_settings(given.file, given.overrides, "all")
    if printed(settings, given):
        return 0
    missing = [
        kind for kind in ("partition", "call_plan", "layout", "execute", "restore") if kind not in settings.order
    ]
    if missing:
        raise ConfigError(f"{given.file}: pipeline: calibrating needs the stage {missing[0]}")
    if given.out is not None and not given.out.parent.is_dir():  # said before minutes are spent
        raise ConfigError(f"{given.out}: cannot be written: {given.out.parent} is no folder")
    if given.quiet:
        settings = replace(settings, observe=settings.observe.model_copy(update={"progress": False, "print": ()}))
    from harts.train.calibrate import calibrate as measured  # noqa: PLC0415  (imports torch)

    pipeline = Pipeline(settings)
    check_settings(pipeline)
    table = measured(pipeline, given.repeats, given.rows)
    if given.out is not None:
        write_table(table, given.out)
    result(table.model_dump(mode="json"), "\n".join(_text(table)), given.json)
    return 0


def _text(table: Table) -> Iterator[str]:
    about, error = table.measured, table.error
    yield f"Cost of a microbatch on {about.device}, {about.dtype}"
    for term in TERMS:
        yield f"  {term:<12} {getattr(table.coefficients, term):>16,.6g}  ns"
    first, last = about.rows
    yield ""
    yield f"Fitted to {about.microbatches} microbatches: {first:,} to {last:,} rows, {about.rounds} rounds at most"
    yield f"Predicted against measured time of {error.microbatches} others:"
    yield f"  median error {error.median:.1%}, at most {error.maximum:.1%}"
