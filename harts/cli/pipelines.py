"""Commands on a pipeline file."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from typing import Any

import harts.explain
from harts.cli.output import leads, printed, result
from harts.cli.training import check_settings, together, train
from harts.config import Scope, Settings, load_settings
from harts.errors import ConfigError, InputError
from harts.explain_plan import explain_plan, render_plan, step_of
from harts.ir import CompactLayout, PerMicrobatch, SemanticOutputs, Value
from harts.ir.codec import load
from harts.ir.shards import save_shards
from harts.pipeline import Pipeline
from harts.report import logprob_report, plan_report, render


def check(given: Namespace) -> int:
    """`harts check`: load everything, ask the backends whether they can serve, run nothing."""
    settings = load_settings(given.file, given.overrides, "plan" if given.plan else "all")
    if printed(settings, given):
        return 0
    pipeline = Pipeline(settings)
    if settings.scope == "all" and "execute" in settings.order and not pipeline.waits_for_module:
        _ = pipeline.env
        check_settings(pipeline)
    stages = [f"{kind}: {settings.components[kind].name}" for kind in settings.order]
    report = {"file": str(given.file), "ok": True, "scope": settings.scope, "stages": stages}
    result(report, f"{given.file}: ok ({', '.join(stages)})", given.json)
    return 0


def explain(given: Namespace) -> int:
    """`harts explain`: without torch, the planning stages only; with --from, a dumped plan and its attention, too."""
    settings = load_settings(given.file, given.overrides, "plan" if given.plan or not _has_torch() else "all")
    if printed(settings, given):
        return 0
    pipeline, dumped = Pipeline(settings), _start(given)
    planned = None if dumped is None else explain_plan(step_of(dumped))
    need = harts.explain.attention_need(pipeline, here=dumped is None)
    report = harts.explain.explain(pipeline, need)
    text = harts.explain.render_explanation(report)
    if dumped is not None and planned is not None:
        report["plan"] = planned
        text += "\n\n" + render_plan(planned)
        if need is not None:
            from harts.explain_attention import explain_attention, render_attention  # noqa: PLC0415  (imports torch)

            report["attention"] = explain_attention(pipeline, need, dumped, report["serving"]["full_attention"])
            text += "\n\n" + render_attention(report["attention"])
    result(report, text, given.json)
    return 0


def plan(given: Namespace) -> int:
    """`harts plan`: what the plan is, and how long planning took."""
    settings = _settings(given, "plan")
    if printed(settings, given):
        return 0
    pipeline = Pipeline(settings)
    layouts = _layouts(pipeline, _start(given))
    if given.split is not None:
        save_shards(layouts, given.split)
    report = plan_report(layouts, pipeline.seconds if settings.observe.time else {})
    result(report, render(report), given.json)
    return 0


def run(given: Namespace) -> int:
    """`harts run`: 1 if the comparison that the file asks for fails."""
    settings = _settings(given, "all")
    if printed(settings, given):
        return 0
    if "restore" not in settings.order:
        raise ConfigError(f"{given.file}: pipeline: a run ends with restore; `harts plan` runs planning alone")
    pipeline = Pipeline(settings)
    _ = pipeline.env  # what cannot serve is said before anything runs
    check_settings(pipeline)
    start = _start(given)
    if settings.train is not None:
        layouts = together(settings, lambda: _layouts(pipeline, start))
        report, ok = train(pipeline, layouts)
    else:
        layouts, report = _restored(pipeline, start)
        ok = True
    report = plan_report(layouts, pipeline.seconds if settings.observe.time else {}) | report
    result(report, render(report), given.json)
    return 0 if ok else 1


def _settings(given: Namespace, scope: Scope) -> Settings:
    settings = load_settings(given.file, given.overrides, scope)
    changes: dict[str, Any] = {"progress": False, "print": ()} if given.quiet or not leads() else {}
    changes |= {"dump": given.dump} if given.dump is not None else {}
    changes |= {} if leads() else {"dump": None}
    changes |= {"verify": given.verify} if given.verify is not None else {}
    return replace(settings, observe=settings.observe.model_copy(update=changes))


def _start(given: Namespace) -> Value | None:
    return None if given.start is None else load(given.start)


def _layouts(pipeline: Pipeline, start: Value | None) -> PerMicrobatch[CompactLayout]:
    if start is None:
        return pipeline.plan()
    made = pipeline.resume(start, until="layout")
    if isinstance(made, PerMicrobatch) and all(isinstance(item, CompactLayout) for item in made.items):
        return made
    raise InputError(f"--from: a {made.kind} is no plan of a whole step; dump an edge up to layout to start from")


def _restored(pipeline: Pipeline, start: Value | None) -> tuple[PerMicrobatch[CompactLayout], dict[str, Any]]:
    """Log-probs of every microbatch, without gradients, and the layouts that they were computed from."""
    import torch  # noqa: PLC0415  (planning must not import it)

    with torch.no_grad():
        made = pipeline.resume(pipeline.plan() if start is None else start)
    if not isinstance(made, PerMicrobatch) or not all(isinstance(item, SemanticOutputs) for item in made.items):
        raise InputError(f"--from: gives a {made.kind}; a run starts from a value of the whole step")
    layouts: PerMicrobatch[CompactLayout] = PerMicrobatch(made.step, tuple(item.outputs.layout for item in made.items))
    return layouts, {"restored": logprob_report(made)}


def _has_torch() -> bool:
    try:
        import_module("torch")
    except ImportError:
        print("torch cannot be imported: only planning is explained", file=sys.stderr)
        return False
    return True
