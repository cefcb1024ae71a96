"""The `train` section of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harts.config import Settings
from harts.errors import ConfigError
from harts.ir import CompactLayout, PerMicrobatch
from harts.pipeline import Pipeline
from harts.report import comparison_report, steps_report

PLACES = ("ingest", "observe")
"""Sections that ranks may have of their own: where rollouts are read, what is shown."""


def together(settings: Settings, plan: Callable[[], PerMicrobatch[CompactLayout]]) -> PerMicrobatch[CompactLayout]:
    """Plan on all ranks that there are.

    Raises:
        HartsError: on all of them, if it cannot be done on one, or they have different settings.
    """
    from harts.train.agreement import planned_together  # noqa: PLC0415  (imports torch)

    values = settings.effective()
    return planned_together(plan, {name: each for name, each in values.items() if name not in PLACES})


def check_settings(pipeline: Pipeline) -> None:
    """Find conflicts between the `train` section and others; builds the model.

    Raises:
        ConfigError: with every one.
    """
    from harts.train.agreement import several  # noqa: PLC0415  (imports torch)
    from harts.train.check import setting_faults  # noqa: PLC0415

    settings = pipeline.settings
    config: Any = settings.train
    if config is None:
        if several():
            raise ConfigError(f"{settings.path}: train: is missing; several processes train steps")
        return
    objective, restore = settings.components["train.objective"], settings.components["restore"].config
    faults = setting_faults(objective.cls(objective.config), config, restore, pipeline.env.dtype)
    if faults:
        raise ConfigError("\n".join(f"{settings.path}: {fault}" for fault in faults))


def train(pipeline: Pipeline, layouts: PerMicrobatch[CompactLayout]) -> tuple[dict[str, Any], bool]:
    """Train as the file says.

    Returns:
        The report's parts, and whether the comparison passed (True without one).
    """
    from harts.train.compare import Trainer, compare  # noqa: PLC0415  (imports torch)

    objective = pipeline.settings.components["train.objective"]
    config: Any = pipeline.settings.train
    trainer = Trainer(pipeline.stage("execute"), pipeline.stage("restore"), objective.cls(objective.config), config)
    count = len(layouts) * config.steps
    if config.compare is None:
        with pipeline.watched("train", layouts, count):
            results = list(trainer.steps(layouts, lambda *_: pipeline.advance()))
        return {"train": steps_report(results)}, True
    flat = pipeline.replan(layouts, config.compare)
    with pipeline.watched("train", layouts, 2 * count):
        comparison = compare(trainer, layouts, flat, lambda *_: pipeline.advance())
    ratio = layouts.step.semantic_tokens / layouts.step.compact_tokens
    report = {"train": steps_report(comparison.compact), "comparison": comparison_report(comparison, ratio)}
    return report, comparison.passed
