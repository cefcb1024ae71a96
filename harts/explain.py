"""What a pipeline file says, without running it: stages with their edges and configs, and which backends serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harts.config import BACKEND_SECTIONS, WORK_MODEL, Component
from harts.config.edges import type_name
from harts.errors import BackendError, ConfigError
from harts.pipeline import Pipeline
from harts.registry import BUILT_IN, names, resolve

if TYPE_CHECKING:
    from harts.backends.base import Need


def attention_need(pipeline: Pipeline, here: bool) -> Need | None:
    """What the file's model asks of the attention backends; None if it does not execute, or the caller has the model.

    Args:
        pipeline: of any scope; its model is built only if its config does not tell.
        here: whether the device has to be here. Costs can be told for one that is not.

    Raises:
        ConfigError: the device is not here, or torch knows none of this name.
    """
    settings = pipeline.settings
    if settings.scope == "plan" or "execute" not in settings.order or pipeline.waits_for_module:
        return None
    from harts.train.doctor import need_of  # noqa: PLC0415  (imports torch)

    need = need_of(pipeline)
    fault = device_fault(need.device)
    if fault is not None and (here or not _known(need.device)):
        raise ConfigError(f"{settings.path}: {fault}")
    return need


def device_fault(device: str) -> str | None:
    """Why this machine cannot use a device, or None."""
    from harts.backends.build import check_device  # noqa: PLC0415  (imports torch)

    try:
        check_device(device)
    except BackendError as error:
        return str(error)
    return None


def _known(device: str) -> bool:
    """Whether torch knows a device of this name, here or elsewhere."""
    import torch  # noqa: PLC0415  (planning must not import it)

    try:
        torch.device(device)
    except RuntimeError:
        return False
    return True


def explain(pipeline: Pipeline, need: Need | None) -> dict[str, Any]:
    """Describe a loaded pipeline.

    Args:
        pipeline: of any scope; in scope `plan` the sections of execution and training are left out.
        need: see `attention_need`.
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
    if need is not None:
        report |= _attention(pipeline, need)
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


def _attention(pipeline: Pipeline, need: Need) -> dict[str, Any]:
    """Why each registered attention backend could not serve, and which full-attention ones are deterministic.

    Returns:
        `serving`: reasons by kind and name; an empty list says that it could. `deterministic`: by name, whether two
        runs give equal bits; None of a backend that cannot be built.
    """
    from harts.backends.build import refusals  # noqa: PLC0415  (imports torch)

    fault = device_fault(need.device)
    serving: dict[str, dict[str, list[str]]] = {"linear_attention": {}, "full_attention": {}}
    deterministic: dict[str, bool | None] = {}
    for kind, found in serving.items():
        for name in sorted(names(kind)):
            backend, reasons = backend_of(kind, name, pipeline.settings.components[kind])
            if backend is not None:
                reasons = refusals(backend, need) if fault is None else [fault, *backend.why_not(need)]
            found[name] = reasons
            if kind == "full_attention":
                deterministic[name] = None if backend is None else backend.deterministic(need)
    return {"serving": serving, "deterministic": deterministic}


def backend_of(kind: str, name: str, chosen: Component) -> tuple[Any | None, list[str]]:
    """A registered backend, with the file's config if it is the file's choice and with its default config otherwise.

    Args:
        kind: of backends.
        name: registered name.
        chosen: the file's choice of this kind.

    Returns:
        The backend; or None, and why it cannot be built.
    """
    try:
        cls = resolve(kind, name)
        config = chosen.config if name == chosen.name else cls.Config()
    except ConfigError as error:
        return None, [str(error)]
    except ValidationError as error:
        fields = ", ".join(str(each["loc"][0]) for each in error.errors() if each["loc"])
        return None, [f"it has no default for {fields}"]
    return cls(config), []


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
        equal_bits = report["deterministic"] if kind == "full_attention" else {}
        lines += [f"  {name}: {'; '.join(reasons) or _yes(equal_bits.get(name))}" for name, reasons in found.items()]
    if report["scope"] == "plan":
        lines += ["", "Planning only; execution and training are not looked at."]
    return "\n".join(lines)


def _yes(deterministic: bool | None) -> str:
    return {None: "yes", True: "yes, deterministic", False: "yes, not deterministic"}[deterministic]


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
