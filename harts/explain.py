"""What a pipeline file says, without running it: stages with their edges and configs, and which backends serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from harts.config import BACKEND_SECTIONS, WORK_MODEL, Component
from harts.config.edges import type_name
from harts.errors import ConfigError
from harts.pipeline import Pipeline
from harts.registry import BUILT_IN, names, resolve


def explain(pipeline: Pipeline) -> dict[str, Any]:
    """Describe a loaded pipeline.

    Args:
        pipeline: of any scope; in scope `plan` the sections of execution and training are left out.
    """
    settings = pipeline.settings
    stages = [
        {
            "stage": kind,
            **_component(settings.components[kind]),
            "takes": type_name(lift.takes),
            "gives": type_name(lift.gives),
            "each_microbatch": lift.mapped,
        }
        for kind, lift in zip(settings.order, pipeline.lifts, strict=True)
    ]
    report: dict[str, Any] = {"file": str(settings.path), "scope": settings.scope, "stages": stages}
    if WORK_MODEL in settings.components:
        report[WORK_MODEL] = _component(settings.components[WORK_MODEL])
    if settings.scope == "all":
        sections = [section for section in BACKEND_SECTIONS if section in settings.components]
        report["backends"] = {section: _component(settings.components[section]) for section in sections}
        if "execute" in settings.order:
            report["serving"] = _serving(pipeline)
    return report


def _component(component: Component) -> dict[str, Any]:
    about = (component.cls.__doc__ or "").strip().splitlines()
    return {
        "type": component.name,
        "class": f"{component.cls.__module__}:{component.cls.__name__}",
        "package": names(component.kind)[component.name][1],
        "about": about[0] if about else "",
        "config": component.config.model_dump(mode="json"),
        "means": {name: field.description or "" for name, field in type(component.config).model_fields.items()},
    }


def _serving(pipeline: Pipeline) -> dict[str, dict[str, list[str]]]:
    """For both attention kinds, why each registered backend could not serve; an empty list says that it could."""
    need = pipeline.need()
    return {
        kind: {name: _why_not(kind, name, need, pipeline.settings.components[kind]) for name in sorted(names(kind))}
        for kind in ("linear_attention", "full_attention")
    }


def _why_not(kind: str, name: str, need: Any, chosen: Component) -> list[str]:
    try:
        cls = resolve(kind, name)
        config = chosen.config if name == chosen.name else cls.Config()
    except ConfigError as error:
        return [str(error)]
    except ValidationError as error:
        fields = ", ".join(str(each["loc"][0]) for each in error.errors() if each["loc"])
        return [f"it has no default for {fields}"]
    found: list[str] = cls(config).why_not(need)
    return found


def registered() -> dict[str, dict[str, dict[str, str | None]]]:
    """Every registered name of every kind: its package, its target, and why it cannot be imported, or None."""
    return {kind: dict(_registered(kind)) for kind in BUILT_IN}


def _registered(kind: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    for name, (target, package) in sorted(names(kind).items()):
        why: str | None = None
        try:
            resolve(kind, name)
        except ConfigError as error:
            why = str(error.__cause__ or error)
        yield name, {"package": package, "target": target, "why_not": why}


def render_explanation(report: dict[str, Any]) -> str:
    """The text of `explain`."""
    lines = [f"{report['file']}"]
    for stage in report["stages"]:
        how = ", each microbatch" if stage["each_microbatch"] else ""
        lines += ["", f"{stage['stage']}: {stage['type']}  ({stage['class']}, {stage['package']})"]
        lines += [f"  {stage['about']}", f"  {stage['takes']} -> {stage['gives']}{how}"]
        lines += _values(stage)
    sections = {WORK_MODEL: report[WORK_MODEL]} if WORK_MODEL in report else {}
    for section, part in (sections | report.get("backends", {})).items():
        lines += ["", f"{section}: {part['type']}  ({part['class']}, {part['package']})", f"  {part['about']}"]
        lines += _values(part)
    for kind, found in report.get("serving", {}).items():
        lines += ["", f"{kind} that could serve this model"]
        lines += [f"  {name}: {'; '.join(reasons) or 'yes'}" for name, reasons in found.items()]
    if report["scope"] == "plan":
        lines += ["", "Planning only; execution and training are not looked at."]
    return "\n".join(lines)


def _values(part: dict[str, Any]) -> Iterator[str]:
    """Each value of a section, and under it what it means."""
    for key, value in part["config"].items():
        yield f"    {key}: {_plain(value)}"
        if part["means"][key]:
            yield f"        {' '.join(part['means'][key].split())}"


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def render_registered(report: dict[str, dict[str, dict[str, str | None]]]) -> str:
    """The text of `backends`."""
    lines = []
    for kind, found in report.items():
        lines.append(kind)
        for name, each in found.items():
            lines.append(f"  {name:<20} {each['package']:<16} {each['why_not'] or 'ok'}")
    return "\n".join(lines)
