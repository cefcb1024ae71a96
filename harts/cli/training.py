"""The `train` section of a run."""

from __future__ import annotations

from typing import Any

from harts.ir import CompactLayout, PerMicrobatch
from harts.pipeline import Pipeline
from harts.report import comparison_report, steps_report


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
